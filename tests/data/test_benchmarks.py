"""The rows of each benchmark, as it is published, ask what they should."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from osprey_jax.command import UserError
from osprey_jax.data.benchmarks import Questions, read_questions
from osprey_jax.data.records import Rejection

ROWS = {
    "mt_bench": (
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]},
        "81",
        ["Compose a post.", "Rewrite it."],
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f(a):\n    ", "entry_point": "f", "test": ""},
        "HumanEval/0",
        ["Complete this Python function; give all of it.\n\n```python\ndef f(a):\n```"],
    ),
    "math_500": (
        {"problem": "What is $1+1$?", "solution": "2", "answer": "2", "unique_id": "test/algebra/1.json"},
        "test/algebra/1.json",
        ["What is $1+1$?\n\nReason step by step, and put the final answer in \\boxed{}."],
    ),
    "gsm8k": ({"question": "How many?", "answer": "2 #### 2"}, None, ["How many?"]),
    "mgsm": (
        {"question": "Wie viele?", "answer": None, "answer_number": 2, "equation_solution": None},
        None,
        ["Wie viele?"],
    ),
    "global_mmlu": (
        {"sample_id": "a/1", "question": "Which?", "option_a": "x", "option_b": "y", "option_c": "z", "option_d": "w"},
        "a/1",
        ["Which?\n\nA. x\nB. y\nC. z\nD. w"],
    ),
    "prompt alone": ({"id": 7, "prompt": "Say hello."}, "7", ["Say hello."]),
}


def texts(questions):
    return [[message["content"] for message in turn] for turn in questions.turns]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_rows(name, suffix, tmp_path):
    row, wanted_id, wanted = ROWS[name]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        line = (json.dumps(row) + "\n").encode()
        path.write_bytes(gzip.compress(line) if suffix.endswith("gz") else line)
    [found] = read_questions(path)
    assert texts(found) == [[text] for text in wanted]
    assert found.id == (wanted_id or f"{path}:1")


def test_conversations(tmp_path):
    """The release's layout: up to the first answer, system turn included."""
    path = tmp_path / "code.jsonl"
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "no"), ("user", "again")]
    record = {"uuid": "u", "conversations": [{"role": role, "content": text} for role, text in turns]}
    path.write_text(json.dumps(record) + "\n\n{]\n" + json.dumps({"id": "x", "other": 1}) + "\n")
    first, *others = read_questions(path)
    assert texts(first) == [["Be brief.", "Hi"]] and first.id == "u"
    assert others == [
        Rejection(f"{path}:3", f"{path}:3", "malformed JSON"),
        Rejection(f"{path}:4", "x", "not a conversation"),
    ]


def test_a_conversation_with_more_columns(tmp_path):
    """Chat data often repeats its first turn as `prompt`; the system's turn would be lost."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "Hi", "messages": messages}, {"prompt": "alone", "messages": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [found.turns for found in read_questions(path)] == [[messages], [[{"role": "user", "content": "alone"}]]]


def test_a_table_that_is_not_well_formed(tmp_path):
    """A text cut at its comma is not asked; a quote that is never closed would swallow the rest of the file."""
    path = tmp_path / "p.csv"
    path.write_text("id,question\n1,Hello, world\n2,whole\n3,no more,\n")
    first, *others = read_questions(path)
    assert first == Rejection(f"{path}:2", f"{path}:2", "3 fields, 2 columns; quote texts that hold a separator")
    assert [found.id for found in others] == ["2", "3"]
    path.write_text('id,question\n1,"Hello\n2,swallowed\n')
    with pytest.raises(UserError, match="not a readable table"):
        list(read_questions(path))


def test_two_columns_with_a_header(tmp_path):
    """MGSM's files have none; the names of another's columns are not asked."""
    path = tmp_path / "p.tsv"
    path.write_text("prompt\tid\nHello\t1\n")
    assert [(found.id, found.turns[0][0]["content"]) for found in read_questions(path)] == [("1", "Hello")]


def test_mgsm_without_a_header(tmp_path):
    """Its first line is a question; quotes are part of the text."""
    path = tmp_path / "mgsm_de.tsv"
    path.write_text('Wie "viele" sind es?\t18\nUnd nun?\t3\n')
    assert [texts(found) for found in read_questions(path)] == [[['Wie "viele" sind es?']], [["Und nun?"]]]


def test_tables_with_a_header(tmp_path):
    """Global-MMLU's CSV: fields over several lines stay whole."""
    path = tmp_path / "test.csv"
    path.write_text('sample_id,question,option_a,option_b,option_c,option_d\ns1,"Which,\none?",x,y,z,w\n')
    [found] = read_questions(path)
    assert isinstance(found, Questions) and found.id == "s1"
    assert texts(found) == [["Which,\none?\n\nA. x\nB. y\nC. z\nD. w"]]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.json", b"[]", "prompts are read from"),
        ("a.parquet", b"PAR0", "not a readable Parquet file"),
        ("a.csv", b"question\n\xff\n", "not a readable table"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
    ],
)
def test_unreadable_files(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_questions(tmp_path / name))
