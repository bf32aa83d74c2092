"""What every command shares: bad input is one line on stderr and a non-zero exit, never a traceback."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """Input that cannot be used. The message is one line: what is wrong, where, and what to do."""


def run(main: Callable[[], None]) -> None:
    """Run a command's `main`; exit 2 after a `UserError`, 130 after an interrupt."""
    try:
        main()
    except UserError as error:
        sys.exit(_complain(error, 2))
    except KeyboardInterrupt:
        sys.exit(_complain("interrupted; run the same command again to go on", 130))


def _complain(message: object, status: int) -> int:
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
    return status
