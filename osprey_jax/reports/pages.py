"""A page of headings, paragraphs, lists, tables and bars, as Markdown and as HTML.

The HTML is one file that asks for nothing else: no script, no font, no picture. It is read on a phone (tables scroll)
and on paper. Whatever text the blocks hold is escaped; they hold no markup of their own.
"""

import html
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

Tone = Literal["good", "bad", "unsure", "plain"]


class Cell(NamedTuple):
    """What a table says in one place: good, bad or unsure in words, and in colour where there is any.

    `note` is smaller: an interval.
    """

    text: str
    tone: Tone = "plain"
    note: str = ""


class Heading(NamedTuple):
    text: str
    level: int = 2


class Text(NamedTuple):
    text: str


class Verdict(NamedTuple):
    """What a reader sees first: a line, and sentences below it."""

    line: str
    tone: Tone
    sentences: list[str]


class Bullets(NamedTuple):
    items: list[str]


class Table(NamedTuple):
    """The first column is of names, the others are of numbers unless `words`."""

    header: list[str]
    rows: list[list[str | Cell]]
    words: bool = False


class Bar(NamedTuple):
    label: str
    value: float
    low: float | None
    high: float | None
    shown: str


class Bars(NamedTuple):
    """Values with their intervals on one axis, and a line at `zero`. Of HTML alone: a table has the numbers."""

    title: str
    bars: list[Bar]
    zero: float
    zero_label: str


Block = Heading | Text | Verdict | Bullets | Table | Bars


# What would not print, or would turn the direction of what follows; halves of characters, which no file can hold.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def _line(text: str) -> str:
    """`text` in one line that any file can hold; what would not print appears as an escape."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", " ".join(text.split()))


# ---- Markdown


def markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(part for part in map(_markdown, blocks) if part) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_plain(text)}"
        case Text(text):
            return _plain(text)
        case Verdict(line, _, sentences):
            return "\n>\n".join(f"> {text}" for text in (f"**{_plain(line)}**", *map(_plain, sentences)))
        case Bullets(items):
            return "\n".join(f"- {_plain(item)}" for item in items)
        case Table(header, rows, words):
            rule = ["---", *(["---" if words else "---:"] * (len(header) - 1))]
            lines = [list(map(_plain, header)), rule, *([_cell(cell) for cell in row] for row in rows)]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case Bars():
            return ""


def _cell(cell: str | Cell) -> str:
    text, tone, note = cell if isinstance(cell, Cell) else Cell(cell)
    whole = _plain(f"{text} ({note})" if note else text)
    return f"**{whole}**" if tone == "bad" else whole


def _plain(text: str) -> str:
    """`text` in one line of which nothing is markup, neither Markdown's nor HTML's."""
    line = re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", _line(text))
    line = re.sub(r"^(\d*)([-+=.)])(?=\s|$)", r"\1\\\2", line)  # a list, or a line below a heading
    return re.sub(r"&(?=\w+;)", "&amp;", line)


# ---- HTML


def page(title: str, blocks: Sequence[Block]) -> str:
    """A whole HTML document."""
    body = "\n".join(map(_html, blocks))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escaped(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _escaped(text: str) -> str:
    return html.escape(_line(text))


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_escaped(text)}</h{level}>"
        case Text(text):
            return f"<p>{_escaped(text)}</p>"
        case Verdict(line, tone, sentences):
            rest = "".join(f"<p>{_escaped(sentence)}</p>" for sentence in sentences)
            return f'<section class="verdict {tone}"><p class="line">{_escaped(line)}</p>{rest}</section>'
        case Bullets(items):
            return f"<ul>{''.join(f'<li>{_escaped(item)}</li>' for item in items)}</ul>"
        case Table(header, rows, words):
            kind = "words" if words else "numbers"
            head = "".join(f'<th scope="col">{_escaped(name)}</th>' for name in header)
            body = "".join(f"<tr>{_row(row)}</tr>" for row in rows)
            return (
                f'<div class="table"><table class="{kind}"><thead><tr>{head}</tr></thead>'
                f"<tbody>{body}</tbody></table></div>"
            )
        case Bars():
            return _bars(block)


def _row(row: Sequence[str | Cell]) -> str:
    cells = []
    for i, cell in enumerate(row):
        text, tone, note = cell if isinstance(cell, Cell) else Cell(cell)
        inside = _escaped(text) + (f"<small>{_escaped(note)}</small>" if note else "")
        cells.append(f'<td class="{tone}">{inside}</td>' if i else f'<th scope="row">{inside}</th>')
    return "".join(cells)


def _bars(block: Bars) -> str:
    ends = [block.zero, *(end for bar in block.bars for end in (bar.value, bar.low, bar.high) if end is not None)]
    margin = 0.04 * (max(ends) - min(ends)) or 0.5
    low, span = min(ends) - margin, max(ends) - min(ends) + 2 * margin

    def at(value: float) -> float:
        return round(100 * (value - low) / span, 2)

    rows = []
    for bar in block.bars:
        inside = f'<i class="zero" style="left:{at(block.zero)}%"></i>'
        if bar.low is not None and bar.high is not None:
            width = round(at(bar.high) - at(bar.low), 2)
            inside += f'<i class="spread" style="left:{at(bar.low)}%;width:{width}%"></i>'
        inside += f'<i class="dot" style="left:{at(bar.value)}%"></i>'
        rows.append(
            f"<div><dt>{_escaped(bar.label)}</dt>"
            f'<dd><span class="track">{inside}</span><span class="shown">{_escaped(bar.shown)}</span></dd></div>'
        )
    note = _escaped(f"{block.title}. Bar: 95% interval; dot: measured; line: {block.zero_label}.")
    return f'<figure><dl class="bars">{"".join(rows)}</dl><figcaption>{note}</figcaption></figure>'


_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; color: #1b1f24; background: #fff; }
body { font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid #d0d7de; padding-bottom: .2rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p, ul { margin: .5rem 0; max-width: 46rem; }
li { margin: .3rem 0; }
p, li, figcaption, .words td { overflow-wrap: anywhere; }
th { overflow-wrap: break-word; }
.verdict { border-left: .4rem solid #57606a; background: #f6f8fa; padding: .7rem 1rem; margin: 1rem 0; }
.verdict.good { border-color: #1a7f37; background: #eef9f0; }
.verdict.bad { border-color: #b42318; background: #fdf1f0; }
.verdict.unsure { border-color: #9a6700; background: #fff8e5; }
.verdict p { max-width: none; }
.verdict .line { font-size: 1.25rem; font-weight: 700; margin: 0 0 .3rem; }
.table { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .875rem; line-height: 1.35; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem .35rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e8ec; }
thead th { border-bottom: 2px solid #8c959f; vertical-align: bottom; }
tbody th { font-weight: 600; min-width: 6rem; }
tbody th, thead th:first-child { position: sticky; left: 0; background: #fff; }
.numbers td, .numbers thead th:not(:first-child) { text-align: right; min-width: 5.5rem; }
.words td { min-width: 7rem; }
small { display: block; font-size: .92em; font-weight: 400; color: #57606a; white-space: nowrap; }
td.good { color: #116329; }
td.bad { color: #b42318; font-weight: 700; }
td.unsure { color: #7d4e00; }
figure { margin: .8rem 0; max-width: 46rem; }
figcaption { font-size: .8rem; color: #57606a; }
.bars { margin: 0 0 .3rem; }
.bars > div { display: flex; flex-wrap: wrap; align-items: center; margin: .25rem 0; font-size: .875rem; }
.bars dt { flex: 0 0 11rem; padding-right: .6rem; overflow-wrap: anywhere; }
.bars dd { flex: 1 1 16rem; display: flex; align-items: center; margin: 0; }
.track { position: relative; flex: 1; height: 1.1rem; background: #f0f2f4; }
.track i { position: absolute; top: 0; height: 100%; }
.track .zero { width: 2px; margin-left: -1px; background: #57606a; }
.track .spread { top: .35rem; height: .4rem; background: #79aee0; }
.track .dot { top: .25rem; width: .6rem; height: .6rem; margin-left: -.3rem; border-radius: 50%; background: #0a4f9e; }
.shown { flex: 0 0 6rem; text-align: right; font-variant-numeric: tabular-nums; }
.track, .track i, .verdict { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
@page { size: A4; margin: 16mm 14mm; }
@media print {
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  .table { overflow: visible; }
  table { font-size: 8.5pt; }
  th, td, .numbers td, .numbers thead th:not(:first-child), .words td { padding-right: .4rem; min-width: 0; }
  small { white-space: normal; }
  .bars > div, figcaption { font-size: 8.5pt; }
  tr, figure, .verdict, .bars > div { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
}
"""
