"""Whatever goes wrong is one line and an exit status."""

import errno
import os
import subprocess
import sys

import pytest

from osprey_jax.command import ArgumentParser, UserError


def raises(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("a:\n  b"), 2, "error: a: b\n"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 2, "error: x: No such file\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: No space left on device\n"),
        (KeyboardInterrupt(), 130, "error: interrupted; run the same command again to go on\n"),
    ],
)
def test_errors(run_command, error, status, line):
    assert run_command(raises(error)) == (status, "", line)


def test_a_bug_is_not_hidden(run_command):
    """What no user has caused keeps its traceback."""
    for error in (ValueError("bug"), OSError("bug")):
        with pytest.raises(type(error), match="bug"):
            run_command(raises(error))


def test_arguments(run_command):
    """Also those that argparse refuses, and no abbreviation is taken."""

    def main():
        parser = ArgumentParser()
        parser.add_argument("--show", type=int)
        parser.parse_args()

    for arguments in (("--show", "x"), ("--sho", "1"), ("x",)):
        status, out, err = run_command(main, *arguments)
        assert (status, out) == (2, "") and err.startswith("error: ") and err.endswith("; see --help\n")


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"\\u27e6"), ("utf-8", "⟦".encode())])
def test_output_of_any_language(encoding, shown):
    """A terminal that cannot show a character gets its number, and the command goes on."""
    code = "from osprey_jax.command import run; run(lambda: print('\\u27e6'))"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, shown, b"")


def test_reader_that_has_had_enough():
    """`prepare --show 1000 | head` ends without a traceback."""
    code = "from osprey_jax.command import run; run(lambda: [print('x' * 1000) for _ in range(10000)])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
