"""What became of the data: counts in words, lengths as a picture, records as text with their mask."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import transformers
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from osprey_jax.data.rows import LENGTH_EDGES, Report, Rows
from osprey_jax.reports.plots import new_figure, save

# Control characters except newline and tab, which could drive the terminal; what turns the direction of writing; line
# separators; and the marks below.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069⟦⟧]")
_MARKED, _BOLD, _PLAIN = "\x1b[30;42m", "\x1b[1m", "\x1b[0m"  # black on green: spaces show too


def describe(report: Report) -> str:
    """`report` in words: one line, then one line for each reason and measure, their numbers aligned."""
    reasons = sorted(report.dropped.items(), key=lambda item: (-item[1], item[0]))
    supervised = f"{report.supervised:,} of them supervised ({_share(report.supervised, report.tokens)})"
    measures = [
        *((count, f"dropped: {reason}") for reason, count in reasons),
        *([(report.cut, f"cut at {report.length:,} tokens")] if report.cut else []),
        (report.tokens, f"tokens, {supervised}"),
        (report.rows, f"{_plural(report.rows, 'row')} of {report.length:,} tokens, {report.fill:.1%} full"),
    ]
    width = max(len(f"{number:,}") for number, _ in measures)
    lines = [f"{report.read:,} {_plural(report.read, 'record')} read, {report.used:,} used"]
    return "\n".join(lines + [f"  {number:>{width},} {words}" for number, words in measures])


def write_histogram(path: Path, report: Report) -> None:
    """Write the lengths of the records used, in tokens before a cut, to `path` as a PNG; a line is where a row ends."""
    counts = np.array(report.lengths)
    edges = np.append(LENGTH_EDGES, 2 * LENGTH_EDGES[-1])
    filled = np.flatnonzero(counts)
    shown = slice(filled[0], filled[-1] + 1) if len(filled) else slice(0, 1)
    figure = new_figure(8, 4)
    axes = figure.subplots()
    axes.stairs(counts[shown], edges[shown.start : shown.stop + 1], fill=True, color="#4c72b0")
    axes.axvline(report.length, color="#c44e52", linestyle="--", label=f"a row: {report.length:,} tokens")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(2, numticks=24))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    )
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("tokens of a record")
    axes.set_ylabel("records")
    cut = f"{report.cut:,} cut ({_share(report.cut, report.used)})" if report.cut else "none cut"
    axes.set_title(f"{report.used:,} {_plural(report.used, 'record')}, {cut}")
    axes.legend()
    save(figure, path)


def show(
    rows: Rows, tokenizer: transformers.PreTrainedTokenizerBase, count: int, *, colour: bool = False
) -> Iterator[str]:
    """The first `count` records in `rows` as text: a header, then the record with its supervised parts marked.

    They are black on green with `colour`, their newlines ↵ before they break the line; else between ⟦ and ⟧. Characters
    that could disturb a terminal appear as escapes.
    """
    segments = ((row, segment) for row in range(len(rows)) for segment in enumerate(rows.records(row), start=1))
    for _, (row, (segment, name)) in zip(range(count), segments, strict=False):
        arrays = rows[row]
        inside = arrays["segment_ids"] == segment
        token_ids, mask = arrays["token_ids"][inside], arrays["loss_mask"][inside] > 0
        counts = f"{len(mask):,} {_plural(len(mask), 'token')}, {mask.sum():,} supervised"
        header = f"{_safe(name, line=True)} (row {row}): {counts}"
        parts = [_mark(text, colour) if taught else text for text, taught in _runs(tokenizer, token_ids, mask)]
        yield "\n".join([f"{_BOLD}{header}{_PLAIN}" if colour else header, "".join(parts)])


def _runs(
    tokenizer: transformers.PreTrainedTokenizerBase, token_ids: np.ndarray, mask: np.ndarray
) -> Iterator[tuple[str, bool]]:
    """(text, supervised) of each run of tokens with the same mask."""
    decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    ends = [*(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    before = ""
    for start, end in zip([0, *ends], ends, strict=False):
        # With what precedes it, since some tokenizers strip a space where a text begins; alone if the mask cuts a
        # character in two, of which the part before looked like another.
        text = decode(token_ids[:end].tolist())
        run = text[len(before) :] if text.startswith(before) else decode(token_ids[start:end].tolist())
        yield _safe(run), bool(mask[start])
        before = text


def _mark(text: str, colour: bool) -> str:
    if not colour:
        return f"⟦{text}⟧"
    # Line by line: a colour that is on at a line's end fills the line up in some terminals.
    *lines, last = text.split("\n")
    marked = [f"{_MARKED}{line}↵{_PLAIN}\n" for line in lines] + ([f"{_MARKED}{last}{_PLAIN}"] if last else [])
    return "".join(marked)


def _safe(text: str, line: bool = False) -> str:
    """`text` without what a terminal would act on; within a `line`, newlines and tabs neither."""
    text = _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
    return text.replace("\n", "\\n").replace("\t", "\\t") if line else text


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}"


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
