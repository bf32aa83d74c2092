"""Kernels are decorated on import, and none is launched on a CPU."""

from stand_in import stand_in_for

__version__ = "3.7.1"


class Kernel:
    """A kernel that says so when it is launched after all."""

    def __init__(self, function):
        self.function = function
        self.__name__ = function.__name__

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"there is no triton to launch {self.__name__}")


def jit(function=None, **options):
    return Kernel(function) if function is not None else Kernel


def autotune(*args, **options):
    return lambda kernel: kernel


heuristics = autotune


def cdiv(a, b):
    return -(-a // b)


stand_in_for(__name__)


def _no_driver():
    raise RuntimeError("there is no triton driver")


from triton import runtime  # noqa: E402

runtime.driver.active.get_current_target = _no_driver
