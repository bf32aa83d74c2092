"""Modules that can be imported and of which nothing computes: for packages that SGLang only imports on a CPU."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types


class _Named(type):
    """A class any of whose attributes exist, as their own names: `Mode.NEAREST` in a table, say."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class StandIn(types.ModuleType):
    """Capitalised names are classes, all others modules that can also be called, as decorators are."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper() or name == "constexpr":
            value = _Named(name, (), {"__init__": lambda self, *args, **kwargs: None})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package):
        self.prefix = f"{package}."

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(self.prefix) else None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def stand_in_for(package: str) -> None:
    """`package`, whose `__init__` calls this, and any submodule of it become stand-ins."""
    stand_in_below(package)
    sys.modules[package].__class__ = StandIn


def stand_in_below(package: str) -> None:
    """Any submodule of `package` becomes a stand-in; it stays what it is."""
    sys.meta_path.insert(0, _Finder(package))
    vars(sys.modules[package]).setdefault("__path__", [])
