"""Chat templates as transformers compiles them, in a sandbox, but faster where templates read messages."""

import datetime
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

_DICT_ATTRIBUTES = frozenset(dir(dict))
_TEXT_METHODS = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))
_PLAIN = (str, int, bool, list, type(None))


def compile_template(source: str, today: datetime.date | None = None) -> jinja2.Template:
    """The template, with what `apply_chat_template` gives to templates; `today` is the date instead of the clock's.

    Raises `jinja2.TemplateError`.
    """
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: (today or datetime.datetime.now()).strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(source)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.role`: the same as in the base class, which asks much more about every object."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _TEXT_METHODS:
            return getattr(obj, attribute)
        if kind is _Namespace and not attribute.startswith("_"):
            value = getattr(obj, attribute, self)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model writes, in the few templates that have it; it changes no text."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


class _Dict:
    """`dict` for templates, without the class's own attributes."""

    def __call__(self, *arguments: Any, **fields: Any) -> dict:
        return dict(*arguments, **fields)

    def fromkeys(self, *arguments: Any) -> dict:
        return dict.fromkeys(*arguments)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` for templates, which could else put Python's own attributes in the sandbox's way."""

    def __init__(*arguments: Any, **fields: Any):
        self, *rest = arguments
        values = dict(*rest, **fields)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r} on a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
