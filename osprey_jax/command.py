"""What every command shares: bad input is one line on stderr and a non-zero exit, never a traceback."""

import argparse
import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")


class UserError(Exception):
    """Input that cannot be used. The message is one line: what is wrong, where, and what to do."""


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose complaints are one line like any other, and which takes no abbreviation for an option."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def run(main: Callable[[], None]) -> None:
    """Run a command's `main`; exit 2 after a `UserError` or a file that cannot be used, 130 after an interrupt."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit, so that temporary files are removed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # text of any language on any terminal
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        sys.exit(_complain(error, 2))
    except BrokenPipeError:  # the reader of the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
        sys.exit(141)
    except OSError as error:
        if error.errno is None:
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        sys.exit(_complain(f"{where}{error.strerror}", 2))
    except KeyboardInterrupt:
        sys.exit(_complain("interrupted; run the same command again to go on", 130))


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, whose tasks end in order at SIGTERM too, not only at Ctrl-C.

    Of what several tasks raise, the first comes out.
    """

    async def cancellable() -> Result:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
        return await work

    before = signal.getsignal(signal.SIGTERM)
    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        sys.exit(143)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(message: object, status: int) -> int:
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    return status
