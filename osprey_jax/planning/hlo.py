"""Compiled HLO as text: its computations, their instructions, and the size of what these give.

Written for what XLA prints for GPUs (jax 0.10 to 0.12): one instruction a line, `%name = type opcode(operands), ...`.
"""

import dataclasses
import functools
import math
import re
from pathlib import PurePath

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|called_computations|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line. `type` is as printed: `bf16[8,128]{1,0}` or a tuple of such."""

    name: str
    type: str
    opcode: str
    rest: str  # operands and attributes

    @property
    def op_name(self) -> str:
        """What JAX called it: a path of traced functions, or an argument's name; empty where it has none."""
        match = re.search(r'metadata=\{[^}]*?op_name="([^"]*)"', self.rest)
        return "" if match is None else match[1]

    @property
    def called(self) -> list[str]:
        """Computations that it runs."""
        return [name for group in _CALLS.findall(self.rest) for name in re.findall(r"[\w.\-]+", group)]

    @property
    def trip_count(self) -> int | None:
        """Of a while loop, where the compiler knows it."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.rest)
        return None if match is None else int(match[1])

    @property
    def stack_frame(self) -> int | None:
        match = re.search(r"stack_frame_id=(\d+)", self.rest)
        return None if match is None else int(match[1])


class Module:
    """A compiled module's text."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self._tables: dict[str, dict[int, str]] = {}
        current: list[Instruction] = []
        table: dict[int, str] = {}
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self.computations[header[2]] = []
                self.entry = header[2] if header[1] else self.entry
            elif start := _INSTRUCTION.match(line):
                type_, rest = _split_type(line[start.end() :])
                opcode, _, rest = rest.partition("(")
                current.append(Instruction(start[1], type_, opcode, rest))
            elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = self._tables[line] = {}
            elif entry := re.match(r"(\d+) (.*)", line):
                table[int(entry[1])] = entry[2]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions of all computations; names are unique in a module."""
        return {i.name: i for instructions in self.computations.values() for i in instructions}

    def source(self, instruction: Instruction) -> str:
        """`file.py:line function` of the innermost traced code that made it; empty where that is not known."""
        frame = self._tables.get("StackFrames", {}).get(instruction.stack_frame or 0, "")
        numbers = dict(re.findall(r"(\w+)=(\d+)", frame))
        location = self._tables.get("FileLocations", {}).get(int(numbers.get("file_location_id", 0)), "")
        numbers = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", location)}
        file = self._tables.get("FileNames", {}).get(numbers.get("file_name_id", 0), "").strip('"')
        function = self._tables.get("FunctionNames", {}).get(numbers.get("function_name_id", 0), "").strip('"')
        return f"{PurePath(file).name}:{numbers['line']} {function}" if file else ""


def parts(type_: str) -> list[str]:
    """Elements of a tuple's type; of an array's type the one."""
    if not type_.startswith("("):
        return [type_]
    found, depth, start = [], 0, 1
    for i, letter in enumerate(type_):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            found.append(re.sub(r"/\*.*?\*/", "", type_[start:i]).strip())
            start = i + 1
    return [part for part in found if part]


def size(type_: str) -> int:
    """Bytes of an array or of all arrays of a tuple."""
    return sum(
        math.ceil(math.prod(int(d) for d in dimensions.split(",") if d) * int(bits or 8) / 8)  # `pred` takes a byte
        for kind, bits, dimensions in _ARRAY.findall(type_)
        if bits or kind == "pred"
    )


def shape(type_: str) -> str:
    """An array's type without its layout: `bf16[8,128]`."""
    return type_.partition("{")[0]


def _split_type(text: str) -> tuple[str, str]:
    """(type, what follows it)."""
    if not text.startswith("("):
        type_, _, rest = text.partition(" ")
        return type_, rest
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 2 :]
    return text, ""
