"""Records as they are found, and the rows made of them."""

import gzip
import json

import numpy as np
import pytest

from osprey_jax.command import UserError
from osprey_jax.data.conversations import (
    Record,
    Rejection,
    _masked,
    asking_messages,
    conversation_rows,
    prompt_messages,
    read_records,
    write_rejections,
)
from osprey_jax.data.tokenizer import load_tokenizer
from tests.data.rendering import tokenize

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
PAIR = [USER, ASSISTANT]


def line(conversations, **fields) -> bytes:
    return json.dumps({"id": "x", "conversations": conversations, **fields}).encode() + b"\n"


@pytest.fixture
def read(tmp_path):
    """`read(bytes)`: the records in a file of that content."""

    def read(content: bytes) -> list[Record | Rejection]:
        path = tmp_path / "a.jsonl"
        path.write_bytes(content)
        return list(read_records([str(path)]))

    return read


def test_golden_records(golden):
    """Every line of a clean file is a record with its id, place and messages."""
    path = golden / "train.jsonl"
    records = list(read_records([str(path)]))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [
        Record(f"{path}:{number}", line["id"], line["conversations"]) for number, line in enumerate(lines, start=1)
    ]


def test_names(read):
    """`id`, else `uuid`, else the place; numbers are names too (0 is one)."""
    lines = [b'{"uuid": "u"', b'{"id": 0', b'{"id": null, "uuid": ""', b'{"source": {"a": 1}']
    records = read(b"".join(line + b', "conversations": [{"role": "user", "content": "a"}]}\n' for line in lines))
    where = [record.where for record in records]
    assert [record.id for record in records] == ["u", "0", where[2], where[3]]
    assert [place.rpartition(":")[2] for place in where] == ["1", "2", "3", "4"]


def test_messages(read):
    """The name of the turns that most chat data has today."""
    (record,) = read(json.dumps({"id": "x", "messages": PAIR}).encode())
    assert record.messages == PAIR


def test_sharegpt(read):
    """`from` and `value` with their names for the roles."""
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    [record] = read(line(turns))
    assert record.messages == [{"role": "system", "content": "s"}, USER, ASSISTANT]


def test_empty_system_turn(read):
    """It is none."""
    assert read(line([{"role": "system", "content": " \n"}, *PAIR]))[0].messages == PAIR


def test_content_parts(read):
    """Text parts are joined."""
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert read(line([{"role": "user", "content": parts}, ASSISTANT]))[0].messages == PAIR


def test_message_fields(read):
    """Reasoning and tool calls pass, a turn of calls needs no content, other fields of a turn are left out."""
    calls = [{"function": {"name": "f", "arguments": {}}}]
    turns = [USER, {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": calls, "weight": 1}]
    expected = {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": calls}
    assert read(line(turns))[0].messages == [USER, expected]


def test_bytes_around_the_records(read):
    """Byte-order mark, Windows line ends, blank lines and a line separator inside a text (U+2028) are no trouble."""
    content = b"\xef\xbb\xbf" + line(PAIR).replace(b"\n", b"\r\n") + b"\r\n"
    content += '{"conversations": [{"role": "user", "content": "a\u2028b"}]}'.encode()
    records = read(content)
    assert [record.messages for record in records] == [PAIR, [{"role": "user", "content": "a\u2028b"}]]
    assert [record.where.rpartition(":")[2] for record in records] == ["1", "3"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"id": "x", "conversations": [{"role": "us', "malformed JSON"),
        (b'{"id": "x", "conversations": [{"role": "user", "content": "\xff"}]}', "malformed JSON"),
        (b'{"id": "x", "conversations": [{"role": "user", "content": "\\ud83d"}]}', "malformed JSON"),
        (b"[" * 100_000, "malformed JSON"),
        (b"[1]", "not a conversation"),
        (b'{"id": "x"}', "not a conversation"),
        (line("text"), "not a conversation"),
        (line(["text"]), "not a conversation"),
        (line([{"role": "user"}]), "not a conversation"),
        (line([{"role": "user", "content": 1}]), "not a conversation"),
        (line([{"role": "user", "content": [{"type": "image", "url": "a"}]}]), "not a conversation"),
        (line([{"role": "user", "content": [{"type": "text"}]}]), "not a conversation"),
        (line([{"content": "a"}]), "not a conversation"),
        (line([{"role": ["user"], "content": "a"}]), "not a conversation"),
        (line([{"role": "narrator", "content": "a"}, *PAIR]), "unknown role"),
        (line([ASSISTANT, *PAIR]), "assistant first"),
        (line([{"role": "system", "content": "s"}, ASSISTANT]), "assistant first"),
    ],
)
def test_rejections(read, content, reason):
    """A line that is no conversation has a reason, and the next line is read all the same."""
    rejection, record = read(content.removesuffix(b"\n") + b"\n" + line(PAIR))
    assert isinstance(rejection, Rejection) and rejection.reason == reason
    assert record.messages == PAIR


def test_files(tmp_path):
    """Globs are sorted, a file that two patterns match is read once, `.gz` is unpacked."""
    for name in "dfbec":
        (tmp_path / f"{name}.jsonl").write_bytes(line(PAIR, id=name))
    (tmp_path / "a[1].jsonl").write_bytes(line(PAIR, id="a"))
    with gzip.open(tmp_path / "g.jsonl.gz", "wb") as packed:
        packed.write(line(PAIR, id="g"))
    patterns = [str(tmp_path / "*.jsonl"), str(tmp_path / "a[1].jsonl"), str(tmp_path / "**/*.gz")]
    assert [record.id for record in read_records(patterns)] == [*"abcdefg"]


def test_no_match(tmp_path):
    """A pattern that matches nothing is named."""
    (tmp_path / "a.jsonl").write_bytes(line(PAIR))
    with pytest.raises(UserError, match=r"b\*\.jsonl"):
        list(read_records([str(tmp_path / "a.jsonl"), str(tmp_path / "b*.jsonl")]))


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(line(PAIR) * 1000)[:40]], ids=["no gzip", "cut short"])
def test_broken_gzip(tmp_path, content):
    """A file that is not gzip, or ends early, is named."""
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot be read"):
        list(read_records([str(tmp_path / "a.jsonl.gz")]))


def test_prompts():
    """Evaluation asks what stands before the first answer; regeneration keeps what the assistant did not write."""
    system, tool = {"role": "system", "content": "s"}, {"role": "tool", "content": "t"}
    messages = [system, USER, ASSISTANT, tool, ASSISTANT, USER]
    assert prompt_messages(messages) == [system, USER]
    assert prompt_messages([USER]) == [USER]
    assert asking_messages(messages) == [system, USER, USER]


# ---- tokens and rows


def test_tokens_without_characters(make_tokenizer):
    """At a span's edge they belong to what lies outside, within it to the span."""
    encoding = make_tokenizer().backend_tokenizer.encode("no  yes  no")  # the offsets leave spaces out
    assert encoding.tokens == ["no", "Ġ", "Ġyes", "Ġ", "Ġno"]
    assert encoding.offsets == [(0, 2), (3, 3), (4, 7), (8, 8), (9, 11)]
    assert _masked(encoding, [(3, 11)], 100)[1].tolist() == [0, 0, 1, 1, 1]
    assert _masked(encoding, [(0, 8)], 100)[1].tolist() == [1, 1, 1, 0, 0]


@pytest.fixture
def rows(tmp_path, make_tokenizer):
    """`rows(lines, length)`: `conversation_rows` of a file with these lines, in ChatML."""

    def rows(lines, length, template=CHATML):
        (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
        return conversation_rows([str(tmp_path / "a.jsonl")], make_tokenizer(template), length)

    return rows


def test_rows_golden(golden):
    """Rows of the golden conversations: the rendering's tokens, the answers under the mask, padding of zeros."""
    tokenizer = load_tokenizer(golden / "target")
    rows, rejections, report = conversation_rows([str(golden / "train.jsonl")], tokenizer, 400)
    records = [json.loads(line) for line in (golden / "train.jsonl").read_text().splitlines()]
    assert rejections == [] and rows.ids == [record["id"] for record in records]
    assert all(array.shape == (len(records), 400) and array.dtype == np.int32 for array in rows.arrays.values())
    for index, record in enumerate(records):
        row, turns = rows[index], record["conversations"]
        count = row["segment_ids"].sum()
        text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
        answers = "".join(turn["content"] + "<|im_end|>" for turn in turns if turn["role"] == "assistant")
        assert tokenizer.decode(row["token_ids"][:count]) == text
        assert tokenizer.decode(row["token_ids"][row["loss_mask"] == 1]) == answers
        assert row["segment_ids"].tolist() == [1] * count + [0] * (400 - count)
        assert row["positions"].tolist() == [*range(count)] + [0] * (400 - count)
        assert not row["token_ids"][count:].any() and not row["loss_mask"][count:].any()
    assert (report.read, report.used, report.cut, report.dropped) == (len(records), len(records), 0, {})
    assert report.tokens == rows.arrays["segment_ids"].sum()
    assert report.supervised == rows.arrays["loss_mask"].sum()


def test_more_records_than_a_batch_of_the_tokenizer(rows, make_tokenizer):
    """Nothing is lost or moved at a batch's end, and every row equals its record's own tokens."""
    contents = [f"yes {number}" for number in range(600)]
    made, _, report = rows([line([USER, {"role": "assistant", "content": c}], id=c) for c in contents], 64)
    assert made.ids == contents and report.used == 600
    for index in (0, 255, 256, 511, 512, 599):
        token_ids, mask = tokenize(
            make_tokenizer(CHATML), [USER, {"role": "assistant", "content": contents[index]}], 64
        )
        assert made[index]["token_ids"][: len(token_ids)].tolist() == token_ids.tolist()
        assert made[index]["loss_mask"][: len(mask)].tolist() == mask.tolist()


def test_cut(rows, make_tokenizer):
    """A record longer than a row is cut, counted, and kept while something in it is supervised."""
    token_ids, mask = tokenize(make_tokenizer(CHATML), PAIR, 100)
    first = int(mask.argmax())
    made, rejections, report = rows([line(PAIR)], first + 1)
    assert made.arrays["token_ids"][0].tolist() == token_ids[: first + 1].tolist()
    (listed,) = rejections
    assert listed.id == "x" and listed.reason == f"cut at {first + 1} of {len(token_ids)} tokens"
    assert (report.used, report.cut, report.supervised, report.dropped) == (1, 1, 1, {})
    _, _, exact = rows([line(PAIR)], len(token_ids))
    assert exact.cut == 0


def test_answer_that_a_limit_cut(rows):
    """Where `regenerate` says that a turn was cut, its terminator is not supervised."""
    for reasons, unfinished in ((["stop"], 0), (["length"], 1), (None, 0)):
        _, _, whole = rows([line(PAIR)], 64)
        _, _, report = rows([line(PAIR, finish_reasons=reasons)], 64)
        assert whole.supervised - report.supervised == unfinished


def test_reasons(rows):
    """Every record not used is listed in the order of the file and counted by reason."""
    long = [{"role": "user", "content": "no " * 100}, ASSISTANT]
    lines = [
        b"{\n",
        line([], id="e"),
        line([USER], id="u"),
        line(long, id="l"),
        line([*PAIR, *PAIR], id="r"),
        line(PAIR),
    ]
    template = CHATML + "{% if messages | length == 4 %}{{ raise_exception('odd') }}{% endif %}"
    made, rejections, report = rows(lines, 40, template)
    nothing = "nothing supervised within the length"
    assert made.ids == ["x"]
    assert [(rejection.id, rejection.reason) for rejection in rejections[1:]] == [
        ("e", "no assistant turn"),
        ("u", "no assistant turn"),
        ("l", nothing),
        ("r", "refused by the chat template: odd"),
    ]
    assert report.dropped == {
        "malformed JSON": 1,
        "no assistant turn": 2,
        nothing: 1,
        "refused by the chat template: odd": 1,
    }
    assert (report.read, report.used) == (6, 1)


def test_nothing_usable(rows):
    """A run without one usable record is an error that says why."""
    with pytest.raises(UserError, match=r"among 3 records \(no assistant turn: 2, malformed JSON: 1\)"):
        rows([line([USER]), line([]), b"{"], 40)
    with pytest.raises(UserError, match="empty"):
        rows([b"\n"], 40)


def test_unreadable_template_names_the_record(rows):
    """A turn that cannot be located stops the run with the record's place."""
    with pytest.raises(UserError, match=r"a\.jsonl:2: .*cannot be read"):
        rows(
            [line(PAIR), line([*PAIR, *PAIR])], 40, CHATML + "{% if messages[2] %}{{ messages[1].content }}{% endif %}"
        )


def test_write_rejections(tmp_path):
    """One JSON object a line."""
    write_rejections(tmp_path / "rejected.jsonl", [Rejection("a:1", "é", "unknown role"), Rejection("a:2", "b", "r")])
    lines = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {"where": "a:1", "id": "é", "reason": "unknown role"}
    assert len(lines) == 2
