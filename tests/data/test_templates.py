"""Released chat templates: what the model writes in each turn, spelled out by hand.

Each span leaves out the header (`<|im_start|>assistant` and a newline, say), an empty thinking block of the template's
own and the newline after the terminator, and has the terminator.
"""

import functools
import random
from pathlib import Path

import pytest

from osprey_jax.command import UserError
from osprey_jax.data.rendering import ChatTemplate, RecordRefused
from osprey_jax.data.spans import SpanFinder
from osprey_jax.data.tokenizer import load_tokenizer
from tests.data.rendering import TODAY, assistant_spans, supervised
from tests.data.test_spans import BASE, CHANNEL, CHATML, LLAMA, OPENED, QWEN3, assistant, user
from tests.real_tokenizers import real_template, real_tokenizer

TEMPLATES = Path(__file__).parent / "templates"

# The special tokens of a template; the first ends the model's generation.
_DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
SPECIAL = {
    "qwen3": ("<|im_end|>", "<|im_start|>", "</tool_call>", "</think>"),
    "minimax_m2": ("[e~[", "]~b]", "]~!b[", "</minimax:tool_call>"),
    "gpt_oss": ("<|return|>", "<|end|>", "<|call|>", "<|start|>", "<|message|>", "<|channel|>"),
    "deepseek_r1": _DEEPSEEK,
    "deepseek_v3_1": _DEEPSEEK,
}

# SmolLM2's, and of many others: ChatML with a system turn of its own.
SMOLLM2 = """{% for m in messages %}
{%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nYou are SmolLM<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

ADD = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALL = assistant("", reasoning_content="It needs a tool.", tool_calls=[ADD])
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "3"}
SYSTEM, QUESTION, THANKS = {"role": "system", "content": "Be brief."}, user("Add 1 and 2."), user("Thanks 🙂")
ANSWER = assistant("It is 3.", reasoning_content="The tool says 3.")
BYE = assistant("Bye 🙂", reasoning_content="Be kind.")

TALK = [SYSTEM, QUESTION, assistant("It is 3."), THANKS, assistant("Bye 🙂")]
TOOLS = [SYSTEM, QUESTION, CALL, RESULT, ANSWER]  # one question
THINKING = [*TOOLS, THANKS, BYE]  # and a second: thinking about the first is history

QWEN3_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
MINIMAX_CALL = """
<minimax:tool_call>
<invoke name="add">
<parameter name="a">1</parameter>
<parameter name="b">2</parameter>
</invoke>
</minimax:tool_call>[e~["""
GPT_OSS_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>'
R1_CALL = """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
```json
{"a": 1, "b": 2}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"""
V3_1_CALL = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)

EXPECTED = [
    # The last turn has an empty thinking block of the template's: it is left out.
    ("qwen3", TALK, ["It is 3.<|im_end|>", "Bye 🙂<|im_end|>"]),
    (
        "qwen3",
        TOOLS,
        [
            "<think>\nIt needs a tool.\n</think>\n\n" + QWEN3_CALL,
            "<think>\nThe tool says 3.\n</think>\n\nIt is 3.<|im_end|>",
        ],
    ),
    ("qwen3", THINKING, [QWEN3_CALL, "It is 3.<|im_end|>", "<think>\nBe kind.\n</think>\n\nBye 🙂<|im_end|>"]),
    ("minimax_m2", TALK, ["It is 3.[e~[", "Bye 🙂[e~["]),
    # The generation prompt opens the thinking: `<think>` is not the model's.
    (
        "minimax_m2",
        TOOLS,
        ["It needs a tool.\n</think>\n\n" + MINIMAX_CALL, "The tool says 3.\n</think>\n\nIt is 3.[e~["],
    ),
    ("minimax_m2", THINKING, [MINIMAX_CALL, "It is 3.[e~[", "Be kind.\n</think>\n\nBye 🙂[e~["]),
    # The model writes channels. It ends with <|return|>, which history keeps as <|end|>, or with <|call|>.
    ("gpt_oss", TALK, ["<|channel|>final<|message|>It is 3.<|end|>", "<|channel|>final<|message|>Bye 🙂<|return|>"]),
    # Its thinking and its answer are one generation, so that the header between them is the model's.
    (
        "gpt_oss",
        TOOLS,
        [
            GPT_OSS_CALL,
            "<|channel|>analysis<|message|>The tool says 3.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>It is 3.<|return|>",
        ],
    ),
    (
        "gpt_oss",
        TOOLS[:4],
        ["<|channel|>analysis<|message|>It needs a tool.<|end|><|start|>assistant" + GPT_OSS_CALL],
    ),
    (
        "gpt_oss",
        THINKING,
        [
            GPT_OSS_CALL,
            "<|channel|>final<|message|>It is 3.<|end|>",
            "<|channel|>analysis<|message|>Be kind.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Bye 🙂<|return|>",
        ],
    ),
    ("deepseek_r1", TALK, ["It is 3.<｜end▁of▁sentence｜>", "Bye 🙂<｜end▁of▁sentence｜>"]),
    # Results are followed by the answer without a header.
    ("deepseek_r1", TOOLS, [R1_CALL, "It is 3.<｜end▁of▁sentence｜>"]),
    ("deepseek_r1", THINKING, [R1_CALL, "It is 3.<｜end▁of▁sentence｜>", "Bye 🙂<｜end▁of▁sentence｜>"]),
    # <think></think> stands before every answer, put there by the template.
    ("deepseek_v3_1", TALK, ["It is 3.<｜end▁of▁sentence｜>", "Bye 🙂<｜end▁of▁sentence｜>"]),
    ("deepseek_v3_1", TOOLS, [V3_1_CALL, "It is 3.<｜end▁of▁sentence｜>"]),
    (
        "deepseek_v3_1",
        [*TOOLS[:4], CALL, RESULT, ANSWER],
        [V3_1_CALL, V3_1_CALL, "It is 3.<｜end▁of▁sentence｜>"],
    ),
    # A second answer has no header at all.
    (
        "deepseek_v3_1",
        [QUESTION, ANSWER, ANSWER, THANKS, BYE],
        ["It is 3.<｜end▁of▁sentence｜>", "It is 3.<｜end▁of▁sentence｜>", "Bye 🙂<｜end▁of▁sentence｜>"],
    ),
    ("deepseek_v3_1", THINKING, [V3_1_CALL, "It is 3.<｜end▁of▁sentence｜>", "Bye 🙂<｜end▁of▁sentence｜>"]),
]
NAMES = [f"{name}-{len(messages)}" for name, messages, _ in EXPECTED]


@pytest.fixture
def small(make_tokenizer):
    """`small(name)`: a small tokenizer with a released template and its special tokens."""

    def small(name: str):
        others = [token for token in SPECIAL[name] if token not in ("<|im_start|>", "<|im_end|>")]
        return make_tokenizer((TEMPLATES / f"{name}.jinja").read_text(), SPECIAL[name][0], tuple(others))

    return small


@pytest.mark.parametrize(("name", "messages", "expected"), EXPECTED, ids=NAMES)
def test_released_template(small, name, messages, expected):
    """Each turn as the model writes it."""
    assert supervised(small(name), messages) == expected


@functools.cache
def real(package: str):
    return load_tokenizer(real_tokenizer(package))


# MiniMax's is in no package.
PACKAGES = {"qwen3": "qwen3", "gpt_oss": "gptoss", "deepseek_r1": "deepseek_v3", "deepseek_v3_1": "deepseek_v3"}


@pytest.mark.network
@pytest.mark.parametrize(("name", "messages", "expected"), [case for case in EXPECTED if case[0] in PACKAGES])
def test_released_template_and_tokenizer(name, messages, expected):
    """The same on the model's own tokenizer."""
    tokenizer = real(PACKAGES[name])
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    assert supervised(tokenizer, messages) == expected


def test_smollm2(make_tokenizer):
    """A system turn that the template invents, as serving does, is not the model's."""
    tokenizer = make_tokenizer(SMOLLM2, "<|im_end|>")
    messages = TALK[1:]
    assert assistant_spans(tokenizer, messages)[0].startswith("<|im_start|>system\nYou are SmolLM<|im_end|>")
    assert supervised(tokenizer, messages) == ["It is 3.<|im_end|>", "Bye 🙂<|im_end|>"]


@pytest.mark.network
@pytest.mark.parametrize("thinking", [True, False])
def test_qwen3_packaged_template(thinking):
    """Qwen3's tokenizer with the template in its own files, emoji, and a special token inside user text."""
    messages = [user("<|im_end|>\n<|im_start|>assistant\n"), assistant("Hello 🙂 é"), THANKS, assistant("\nTwo.")]
    expected = ["Hello 🙂 é<|im_end|>", "Two.<|im_end|>"]
    options = {} if thinking else {"enable_thinking": False}
    assert supervised(load_tokenizer(real_tokenizer("qwen3")), messages, options) == expected


@pytest.mark.network
@pytest.mark.parametrize("template", [None, "llama3_1"])
def test_llama3(template):
    """Trimmed contents on Llama 3.1's own tokenizer, with the template of its files and with the released one."""
    tokenizer = load_tokenizer(real_tokenizer("llama3_1"))
    if template:
        tokenizer.chat_template = real_template(template)
    messages = [user("hi"), assistant(" Hello 🙂\n\nyou\n"), user("<|eot_id|>"), assistant("no")]
    assert supervised(tokenizer, messages) == ["Hello 🙂\n\nyou<|eot_id|>", "no<|eot_id|>"]
    if template:
        calls = ['{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', "It is 3.<|eot_id|>"]
        assert supervised(tokenizer, TOOLS) == calls


@pytest.mark.network
def test_deepseek_v3():
    """DeepSeek-V3's own files; this template drops calls whose content is empty text, so that record is refused."""
    tokenizer = load_tokenizer(real_tokenizer("deepseek_v3"))
    assert supervised(tokenizer, TALK) == ["It is 3.<｜end▁of▁sentence｜>", "Bye 🙂<｜end▁of▁sentence｜>"]
    with pytest.raises(RecordRefused, match="leaves out tool calls"):
        assistant_spans(tokenizer, TOOLS)


def test_thinking_by_option(small):
    """DeepSeek-V3.1 asked to think: its generation prompt then opens what history never has."""
    expected = ["It is 3.<｜end▁of▁sentence｜>", "Bye 🙂<｜end▁of▁sentence｜>"]
    assert supervised(small("deepseek_v3_1"), TALK, {"thinking": True}) == expected


@pytest.mark.parametrize("name", ["qwen3", "minimax_m2", "gpt_oss"])
def test_tool_definitions(small, name):
    """A record's tools stand in the rendering, and the spans are the same."""
    add = {"name": "add", "description": "Adds numbers", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": add}]
    tokenizer = small(name)
    text, _ = SpanFinder(ChatTemplate(tokenizer)).assistant_spans(TOOLS, tools=tools)
    assert "Adds numbers" in text
    assert supervised(tokenizer, TOOLS, tools=tools) == supervised(tokenizer, TOOLS)


def test_several_calls(small):
    """MiniMax writes each; gpt-oss only the first: then the record is refused."""
    messages = [QUESTION, assistant("I add.", tool_calls=[ADD, ADD]), RESULT, RESULT, ANSWER]
    [call, _] = supervised(small("minimax_m2"), messages)
    assert call.startswith("I add.\n<minimax:tool_call>\n<invoke") and call.count("<invoke") == 2
    assert call.endswith("</minimax:tool_call>[e~[")
    with pytest.raises(RecordRefused, match="leaves out tool calls"):
        assistant_spans(small("gpt_oss"), messages)


def test_call_after_a_template_error(small):
    """DeepSeek-R1's template writes a second call without its beginning: shown, not guessed."""
    with pytest.raises(UserError, match=r"header .* rendering is") as raised:
        assistant_spans(small("deepseek_r1"), [QUESTION, CALL, RESULT, CALL, RESULT, ANSWER])
    assert "\n" not in str(raised.value)


def test_date(small):
    """gpt-oss writes the date: of the clock as in serving, of a fixed day where rows must not depend on it."""
    tokenizer = small("gpt_oss")
    assert "Current date: 2025-01-01\n" in ChatTemplate(tokenizer, today=TODAY).render(TALK)
    assert "Current date: 2025-01-01\n" not in ChatTemplate(tokenizer).render(TALK)


# ---- one rendering with all turns marked = one turn at a time

SPECIAL_TEXTS = [
    *("yes", "no", " ", "\n", "🙂", "{", "osprey0turn", "osprey0turn2x", "</s>", "<|eot_id|>", "[e~[\n]~b]ai\n"),
    *("<|im_end|>", "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n"),
    *("<think>", "</think>", "<think>\n\n</think>\n\n", "<tool_response>", "</tool_response>", "}\n</tool_call>"),
    *("<|end|><|start|>assistant", "<|return|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    *("<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜><｜User｜>yes<｜Assistant｜>"),
]


def random_conversation(rng: random.Random) -> list[dict]:
    def words() -> str:
        return "".join(rng.choices(SPECIAL_TEXTS, k=rng.randrange(4)))

    messages = [{"role": "system", "content": words() + "s"}] if rng.random() < 0.3 else []
    for _ in range(rng.randrange(1, 5)):
        messages += [user(words()) for _ in range(rng.choice([1, 1, 1, 2]))]
        if rng.random() < 0.3:
            calls = [{**ADD, "function": {"name": rng.choice(["add", "yes"]), "arguments": {"a": words()}}}]
            calls *= rng.choice([1, 1, 2])
            messages += [assistant(rng.choice(["", words()]), tool_calls=calls)]
            messages += [{**RESULT, "content": words()} for _ in calls]
        answers = [assistant(words()) for _ in range(rng.choice([1, 1, 1, 2]))]
        messages += [answer | ({"reasoning_content": words()} if rng.random() < 0.3 else {}) for answer in answers]
    return messages + ([user(words())] if rng.random() < 0.2 else [])


def outcome(finder: SpanFinder, messages: list[dict]):
    try:
        return finder.assistant_spans(messages)
    except (RecordRefused, UserError) as error:
        return str(error)


OURS = {"chatml": CHATML, "llama": LLAMA, "base": BASE, "small": QWEN3, "opened": OPENED, "channel": CHANNEL}


@pytest.mark.parametrize("name", [*SPECIAL, *OURS])
def test_all_turns_at_once(small, make_tokenizer, monkeypatch, name):
    """Whatever the contents, the turns are those that are found one at a time, and most are found at once."""
    finder = SpanFinder(ChatTemplate(make_tokenizer(OURS[name]) if name in OURS else small(name), today=TODAY))
    rng = random.Random(name)
    conversations = [random_conversation(rng) for _ in range(60)]
    turns_at_once, of_all = [], SpanFinder._spans_of_all
    monkeypatch.setattr(
        SpanFinder, "_spans_of_all", lambda *arguments: turns_at_once.append(of_all(*arguments)) or turns_at_once[-1]
    )
    at_once = [outcome(finder, messages) for messages in conversations]
    found = [turns for result, turns in zip(at_once, turns_at_once, strict=True) if not isinstance(result, str)]
    certain = [turn is not None for turns in found for turn in turns]
    assert len(certain) > 50
    assert sum(certain) > len(certain) / 2 or name == "base"  # without headers only contents are outside
    monkeypatch.setattr(SpanFinder, "_spans_of_all", lambda _, conversation, turns: [None] * len(turns))
    assert [outcome(finder, messages) for messages in conversations] == at_once


# ---- the same text as transformers'


def served(tokenizer, messages, **options):
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        return str(error)


def rendered(template, messages, **options):
    try:
        return template.render(messages, **options)
    except RecordRefused as error:
        return str(error)


@pytest.mark.parametrize("name", [*SPECIAL, *OURS])
def test_text_of_transformers(small, make_tokenizer, name):
    """What serving renders, to the letter, errors of templates included."""
    tokenizer = make_tokenizer(OURS[name]) if name in OURS else small(name)
    template, rng = ChatTemplate(tokenizer), random.Random(name)
    for _ in range(40):
        messages = random_conversation(rng)
        if name == "deepseek_r1" and any("tool_calls" in message for message in messages):
            continue  # it wants arguments as text
        for add_generation_prompt in (True, False):
            expected = served(tokenizer, messages, add_generation_prompt=add_generation_prompt)
            assert rendered(template, messages, add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.parametrize(
    "template",
    [
        "  {% if true %}\n  yes\n  {% endif %}\n {{ messages | tojson(indent=2) }} {{ '<é>' | tojson }}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% set ns = namespace(a=[], self=1) %}{% set ns.b = messages[0].nothing %}{{ ns.a }}{{ ns.b }}{{ ns.c }}",
        "{{ messages[0].items() | list }}{{ messages[0].get('role') }}{{ messages[0].keys is callable }}",
        "{{ dict(a=1) }}",
        "{{ '{0}'.format(messages[0].role) }}{{ 'a b'.split() }}{{ dict.fromkeys(['a'], 2) }}{{ eos_token }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ messages[0].thinking }}{{ tools }}",
        "{{ raise_exception('no') if messages | length == 3 }}{{ strftime_now('%Y') }}",
        "{{ messages[0].__class__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages[0].content.nothing.nothing }}",
        "{{ messages[0].nothing.nothing }}",
        "{% set ns = namespace(a=1) %}{{ ns.__class__ }}",
        "{{ dict.mro is defined }}",
    ],
)
def test_language_of_transformers(make_tokenizer, template):
    """Blocks, filters, functions, and what the sandbox forbids are transformers'."""
    template = "{% if messages[0].content == '?' %}?{% else %}" + template + "{% endif %}"
    tokenizer = make_tokenizer(template)
    for messages in (TALK, [user("hi") | {"reasoning_content": "no"}], [user("{}")] * 3):
        assert rendered(ChatTemplate(tokenizer), messages) == served(tokenizer, messages)


@pytest.mark.parametrize(
    "template", ["{% set ns = namespace(_a=1) %}", "{% set ns = namespace() %}{% set ns._a = 1 %}"]
)
def test_namespace_of_a_hostile_template(make_tokenizer, template):
    """Names of Python's own are not for templates."""
    with pytest.raises(UserError, match="_a"):
        ChatTemplate(make_tokenizer(template))


def test_invalid_template(make_tokenizer):
    """One line, not Jinja's traceback."""
    with pytest.raises(UserError, match="no valid Jinja"):
        ChatTemplate(make_tokenizer("{% for m in messages %}"))
