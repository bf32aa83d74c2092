"""Compiling ahead of the first step."""

import contextlib
import ctypes
from typing import Any

import jax


def compiled(function: Any, *arguments: Any) -> jax.stages.Compiled:
    """A jitted function compiled for arguments like these, arrays or abstract values with their shardings.

    What the compiler has freed goes back to the system before the function runs: else, on a CPU, it would add hundreds
    of MB to the most memory that a step takes.
    """
    result = function.lower(*arguments).compile()
    with contextlib.suppress(OSError, AttributeError):  # glibc's; others have no such function, nor such a need
        ctypes.CDLL(None).malloc_trim(0)
    return result
