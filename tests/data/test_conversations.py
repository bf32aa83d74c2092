"""Records as they are found, and the rows made of them."""

import gzip
import json
import pickle

import pytest

from osprey_jax.command import UserError
from osprey_jax.data.conversations import (
    Record,
    Rejection,
    asking_messages,
    block_records,
    parse_record,
    prompt_messages,
    read_records,
    write_rejections,
)
from osprey_jax.data.records import Block, read_blocks

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
    """Other names of the turns that much chat data has."""
    for name in ("messages", "conversation"):
        (record,) = read(json.dumps({"id": "x", name: PAIR}).encode())
        assert record.messages == PAIR


def test_sharegpt(read):
    """`from` and `value` with their names for the roles."""
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    [record] = read(line(turns))
    assert record.messages == [{"role": "system", "content": "s"}, USER, ASSISTANT]


def test_columns_that_hold_nothing(read):
    """A table of several makes of records has null where a record has no such field."""
    turn = {"role": None, "from": "human", "content": None, "value": "hi", "tool_calls": None, "name": None}
    record = {"conversations": None, "messages": [turn, ASSISTANT | {"reasoning": None}], "tools": None, "id": None}
    assert read(json.dumps(record).encode())[0].messages == PAIR


@pytest.mark.parametrize(
    ("names", "role"),
    [
        (("system", "developer"), "system"),
        (("user", "human", "Human"), "user"),
        (("assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai"), "assistant"),
        (("tool", "function", "function_response", "tool_response", "observation", "ipython"), "tool"),
    ],
)
def test_roles(read, names, role):
    """The names that are in use for each of the four."""
    for name in names:
        (record,) = read(line([USER, {"from": name, "value": "x"}]))
        assert record.messages == [USER, {"role": role, "content": "x"}]


@pytest.mark.parametrize("turns", [[], [{"role": "system", "content": "s"}], [USER], [USER, USER, ASSISTANT, USER]])
def test_turns_are_kept(read, turns):
    """No turn at all, a system turn alone, two users in a row: records like others, nothing is joined or invented."""
    assert read(line(turns))[0].messages == turns


@pytest.mark.parametrize(
    "content", ["yes é🙂 <|im_end|>\r\n" * 50_000, "🙂", "  ", ""], ids=["MB", "emoji", "blank", "empty"]
)
def test_content_is_not_touched(read, content):
    """Whatever is in a turn, and however long it is."""
    (record,) = read(line([{"role": "user", "content": content}, ASSISTANT]))
    assert record.messages == [{"role": "user", "content": content}, ASSISTANT]


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


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning(read, name):
    """One name for what has three; a turn that a limit cut within its reasoning needs no content."""
    for content in ("yes", None):
        (record,) = read(line([USER, {"role": "assistant", "content": content, name: "r"}]))
        assert record.messages[1] == {"role": "assistant", "content": content or "", "reasoning_content": "r"}


CALL = {"name": "f", "arguments": {"a": [1, "é"]}}


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": CALL | {"arguments": '{"a": [1, "é"]}'}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "function_call": CALL | {"arguments": '{"a":[1,"\\u00e9"]}'}},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps([CALL])},
    ],
)
def test_tool_calls(read, turn):
    """Every form becomes OpenAI's with the arguments an object, which chat templates expect."""
    (record,) = read(line([USER, turn]))
    expected = [{"type": "function", "function": CALL}]
    assert record.messages[1] == {"role": "assistant", "content": "", "tool_calls": expected}


def test_several_tool_calls(read):
    """They stay in order, and what else a call has passes."""
    calls = [{"id": name, "function": {"name": name, "arguments": "{}", "strict": True}} for name in "fgh"]
    (record,) = read(line([USER, {"role": "assistant", "content": "c", "tool_calls": calls}]))
    made = [{"id": name, "function": {"name": name, "arguments": {}, "strict": True}} for name in "fgh"]
    assert record.messages[1] == {"role": "assistant", "content": "c", "tool_calls": made}


@pytest.mark.parametrize(
    ("arguments", "made"), [("", {}), (" ", {}), ("{}", {}), ("[1]", "[1]"), ("{", "{"), ("text", "text"), (None, None)]
)
def test_arguments(read, arguments, made):
    """No text is no arguments; a text that is no object stays as the model wrote it; arguments cannot be missing."""
    (record,) = read(line([USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}]))
    if made is None:
        assert record.reason == "unreadable tool call"
    else:
        assert record.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": made}


def test_a_call_without_arguments(read):
    """A name alone is a call; a name beside arguments under another name is not read as one without any."""
    without, other = read(line([USER, {"from": "function_call", "value": '{"name": "f"}'}]) * 2)
    assert without.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    (other,) = read(line([USER, {"from": "function_call", "value": '{"name": "f", "args": {"a": 1}}'}]))
    assert other.reason == "unreadable tool call"


def test_tool_results(read):
    """They keep the call that they answer and the tool's name."""
    turns = [
        {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
        {"from": "observation", "value": "r"},
        {"role": "function", "name": "f", "content": "r"},
    ]
    (record,) = read(line([USER, *turns]))
    assert record.messages[1:] == [
        {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
        {"role": "tool", "content": "r"},
        {"role": "tool", "content": "r", "name": "f"},
    ]


@pytest.mark.parametrize("field", ["tools", "functions"])
def test_tools(read, field):
    """Definitions in the record, bare or wrapped, as JSON or as text, are those of the chat template; none is None."""
    definition = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    wrapped = [{"type": "function", "function": definition}]
    for tools in (wrapped, [definition], json.dumps(wrapped), json.dumps([definition])):
        assert read(line(PAIR, **{field: tools}))[0].tools == wrapped
    for tools in ([], None, "", " ", "[]"):
        assert read(line(PAIR, **{field: tools}))[0].tools is None
    assert read(line(PAIR))[0].tools is None
    for others in ([{"type": "web_search"}], [{"name": "f", "function": definition}]):
        assert read(line(PAIR, **{field: others}))[0].tools == others


def test_unfinished_turns(read):
    """The assistant's turns whose `finish_reasons` say that a limit cut them."""
    for reasons, expected in (
        (["stop", "length"], {1}),
        (["length", "length"], {0, 1}),
        ("length", set()),
        (None, set()),
    ):
        assert read(line([*PAIR, *PAIR], finish_reasons=reasons))[0].unfinished == expected


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
        (line([USER, ASSISTANT | {"reasoning_content": ["r"]}]), "not a conversation"),
        (line([{"role": "narrator", "content": "a"}, *PAIR]), "unknown role"),
        (line([*PAIR, {"role": "", "content": "a"}]), "unknown role"),
        (line([ASSISTANT, *PAIR]), "assistant first"),
        (line([{"role": "system", "content": "s"}, ASSISTANT]), "assistant first"),
        (
            line([{"role": "system", "content": " "}, {"from": "function_call", "value": '{"name": "f"}'}]),
            "assistant first",
        ),
        (line([USER, ASSISTANT | {"tool_calls": "f"}]), "unreadable tool call"),
        (line([USER, ASSISTANT | {"tool_calls": 1}]), "unreadable tool call"),
        (line([USER, {"from": "function_call", "value": "[]"}]), "unreadable tool call"),
        (line([USER, ASSISTANT | {"tool_calls": ["f"]}]), "unreadable tool call"),
        (line([USER, ASSISTANT | {"tool_calls": [{"function": "f"}]}]), "unreadable tool call"),
        (line([USER, ASSISTANT | {"tool_calls": [{"arguments": {}}]}]), "unreadable tool call"),
        (line([USER, {"from": "function_call", "value": "f(1)"}]), "unreadable tool call"),
        (line([USER, {"from": "function_call", "value": ["f"]}]), "unreadable tool call"),
        (line([USER, {"from": "function_call", "value": ""}]), "unreadable tool call"),
        (line(PAIR, tools="f"), "unreadable tools"),
        (line(PAIR, tools=["f"]), "unreadable tools"),
        (line(PAIR, tools={"f": 1}), "unreadable tools"),
    ],
)
def test_rejections(read, content, reason):
    """A line that is no conversation has a reason, and the next line is read all the same."""
    rejection, record = read(content.removesuffix(b"\n") + b"\n" + line(PAIR))
    assert isinstance(rejection, Rejection) and rejection.reason == reason
    assert record.messages == PAIR


def test_truncated_last_line(read):
    """What an interrupted copy left is a malformed line; all before it is read."""
    record, rejection = read(line(PAIR) + line(PAIR)[:40])
    assert record.messages == PAIR and rejection.reason == "malformed JSON"
    assert rejection.id == rejection.where and rejection.where.endswith(":2")


def test_rejected_records_have_their_names(read):
    """The id where a record has one."""
    (rejection,) = read(line([ASSISTANT], id="n"))
    assert (rejection.id, rejection.reason) == ("n", "assistant first")


def test_blocks(tmp_path):
    """Records and their places do not depend on the blocks that a file is read in; a block can be sent to a process."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(line(PAIR, id=number) + b"\r\n" for number in range(20)) + b"{")
    whole = list(read_records([str(path)]))
    assert len(whole) == 21 and whole[19].where == f"{path}:39" and isinstance(whole[20], Rejection)
    for size in (1, 300):
        made = [pickle.loads(pickle.dumps(block)) for block in read_blocks([path], size)]
        assert len(made) > 5
        assert [record for block in made for record in block_records(block)] == whole


def test_parse_record():
    """A value that another reader parsed."""
    assert parse_record("x:1", {"id": "a", "messages": PAIR}) == Record("x:1", "a", PAIR)
    assert parse_record("x:1", ValueError("bad")) == Rejection("x:1", "x:1", "malformed JSON")


@pytest.mark.parametrize(
    ("name", "message"), [("a.txt", r"read from \.jsonl"), ("a.parquet", r"read from \.jsonl"), ("a.json", "jq")]
)
def test_other_files(tmp_path, name, message):
    """Conversations are in JSONL; another file is refused by its name, before anything is read."""
    (tmp_path / "0.jsonl").write_bytes(line(PAIR))
    (tmp_path / name).write_bytes(b"[]")
    with pytest.raises(UserError, match=f"{name}: .*{message}"):
        next(read_records([str(tmp_path / "0.jsonl"), str(tmp_path / name)]))
    with pytest.raises(UserError, match=f"{name}: .*{message}"):
        next(block_records(Block(str(tmp_path / name), 1, [b"a"])))


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


def test_write_rejections(tmp_path):
    """One JSON object a line."""
    write_rejections(tmp_path / "rejected.jsonl", [Rejection("a:1", "é", "unknown role"), Rejection("a:2", "b", "r")])
    lines = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {"where": "a:1", "id": "é", "reason": "unknown role"}
    assert len(lines) == 2
