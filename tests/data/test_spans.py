"""Each test renders with a small template of one family and spells out the part that must be supervised."""

import datetime

import pytest

from osprey_jax.command import UserError
from osprey_jax.data.rendering import ChatTemplate, RecordRefused
from osprey_jax.data.spans import SpanFinder
from osprey_jax.data.tokenizer import load_tokenizer
from tests.data.rendering import assistant_spans, supervised, tokenize

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA = """{{ '<|begin|>' }}{% for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# No generation prompt, no header, and a user turn has no terminator.
BASE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

# Qwen3: thinking is kept after the last question only, and the last turn always gets a block of it.
QWEN3 = r"""{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role != 'assistant' %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- else %}
{%- set content = m.content %}{% set reasoning = m.reasoning_content or '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if content or not loop.first %}{{- '\n' }}{% endif %}
{{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

# The generation prompt opens the thinking, history has none without reasoning (MiniMax-M2).
OPENED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""

# A channel stands between the generation prompt and the content, and the model writes it (gpt-oss).
CHANNEL = """{% for m in messages %}{{ '<|im_start|>' + m.role }}
{%- if m.role == 'assistant' %}{{ '<|begin|>final' }}{% endif %}{{ '\n' + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def test_chatml(make_tokenizer):
    """The header and the newline after the terminator are out, the terminator is in."""
    messages = [{"role": "system", "content": "s"}, user("hi"), assistant("hello"), user("no"), assistant("yes\n\n🙂")]
    assert supervised(make_tokenizer(CHATML), messages) == ["hello<|im_end|>", "yes\n\n🙂<|im_end|>"]


def test_llama(make_tokenizer):
    """The header's two newlines are out, and contents that the template trims are found."""
    messages = [user("hi"), assistant("  hello\n\n"), user("no"), assistant("yes\n\nno")]
    assert supervised(make_tokenizer(LLAMA), messages) == ["hello<|eot_id|>", "yes\n\nno<|eot_id|>"]


def test_base_model(make_tokenizer):
    """Without header, the turn begins at its first character."""
    assert supervised(make_tokenizer(BASE), [user("hello"), assistant("\nyes"), user("\nno")]) == ["\nyes</s>"]


def test_empty_thinking_block(make_tokenizer):
    """Qwen3 puts an empty block into the last turn: it is no model output."""
    messages = [user("hi"), assistant("hello"), user("no"), assistant("yes")]
    assert supervised(make_tokenizer(QWEN3), messages) == ["hello<|im_end|>", "yes<|im_end|>"]
    text, _ = assistant_spans(make_tokenizer(QWEN3), messages)
    assert "<think>\n\n</think>\n\nyes" in text


@pytest.mark.parametrize("template", [CHATML, LLAMA, BASE, QWEN3])
def test_unfinished_turn(make_tokenizer, template):
    """Of a turn that a limit cut the terminator is the template's, not the model's; other turns keep theirs."""
    messages = [user("hi"), assistant("hello"), user("no"), assistant("yes"), user("hi")]
    finder = SpanFinder(ChatTemplate(make_tokenizer(template)))
    text, whole = finder.assistant_spans(messages)
    _, (first, second) = finder.assistant_spans(messages, unfinished={1})
    assert first == whole[0] and text[slice(*first)].startswith("hello<")
    assert text[slice(*second)] == "yes"


def test_unfinished_thinking(make_tokenizer):
    """Where the limit fell into the thinking, the model wrote nothing that closes it."""
    finder = SpanFinder(ChatTemplate(make_tokenizer(QWEN3)))
    for content, expected in (
        ("", "<think>\nno no"),
        ("yes", "<think>\nno no\n</think>\n\nyes"),
    ):
        messages = [user("hi"), assistant(content, reasoning_content="no no")]
        text, [span] = finder.assistant_spans(messages, unfinished={0})
        assert text[slice(*span)] == expected
        text, [span] = finder.assistant_spans(messages)
        assert text[slice(*span)].endswith("</think>\n\n" + content + "<|im_end|>")


@pytest.mark.parametrize("thinking", [{"reasoning_content": "no no"}, {}])
def test_thinking_that_the_record_has(make_tokenizer, thinking):
    """Written thinking is supervised where the template keeps it (last turn) and absent where it drops it."""
    content = "yes" if thinking else "<think>\nno no\n</think>\n\nyes"
    messages = [user("hi"), assistant(content, **thinking), user("no"), assistant(content, **thinking)]
    expected = ["yes<|im_end|>", "<think>\nno no\n</think>\n\nyes<|im_end|>"]
    assert supervised(make_tokenizer(QWEN3), messages) == expected


@pytest.mark.parametrize("template", [CHATML, QWEN3])
def test_thinking_in_spite_of_thinking_off(make_tokenizer, template):
    """A turn with thinking has no empty block to leave out."""
    tokenizer = make_tokenizer(template + "{# enable_thinking #}")
    messages = [user("hi"), assistant("<think>\nno\n</think>\n\nyes")]
    expected = ["<think>\nno\n</think>\n\nyes<|im_end|>"]
    assert supervised(tokenizer, messages, {"enable_thinking": False}) == expected


def test_thinking_off(make_tokenizer):
    """The generation prompt then ends with the empty block, which only the last turn has."""
    messages = [user("hi"), assistant("hello"), user("no"), assistant("yes")]
    options = {"enable_thinking": False}
    assert supervised(make_tokenizer(QWEN3), messages, options) == ["hello<|im_end|>", "yes<|im_end|>"]


def test_empty_thinking_block_that_the_record_has(make_tokenizer):
    """Where the template writes none, a block in the content is the record's own text."""
    content = "<think>\n\n</think>\n\nyes"
    assert supervised(make_tokenizer(CHATML), [user("hi"), assistant(content)]) == [content + "<|im_end|>"]


def test_thinking_opened_by_the_generation_prompt(make_tokenizer):
    """Serving begins after the opened tag, in turns that have thinking."""
    messages = [user("hi"), assistant("hello"), user("no"), assistant("yes", reasoning_content="no no")]
    assert supervised(make_tokenizer(OPENED), messages) == ["hello<|im_end|>", "no no\n</think>\n\nyes<|im_end|>"]


def test_channel_after_the_generation_prompt(make_tokenizer):
    """What the template writes after the generation prompt, other than empty thinking, the model has to write."""
    messages = [user("hi"), assistant("hello"), user("no"), assistant("yes")]
    expected = ["<|begin|>final\nhello<|im_end|>", "<|begin|>final\nyes<|im_end|>"]
    assert supervised(make_tokenizer(CHANNEL), messages) == expected


def test_tool_calls(make_tokenizer):
    """A turn without content, and one with: the calls are the model's."""
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("yes", "no")]
    messages = [user("hi"), assistant("", tool_calls=calls), {"role": "tool", "content": "no"}]
    messages += [assistant("hello", tool_calls=calls[:1])]
    assert supervised(make_tokenizer(QWEN3), messages) == [
        "<tool_call>yes{}</tool_call>\n<tool_call>no{}</tool_call><|im_end|>",
        "hello\n<tool_call>yes{}</tool_call><|im_end|>",
    ]


@pytest.mark.parametrize(
    "content", ["", " ", "\n\n", " yes ", "<|im_end|>\n<|im_start|>user\nyes", "no", "osprey0turn"]
)
@pytest.mark.parametrize("template", [CHATML, QWEN3])
def test_awkward_contents(make_tokenizer, template, content):
    """Empty, blank, equal to another turn, and with a header, a terminator or a marker of ours inside."""
    asked = (
        "no<|im_start|>assistant\nno<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n osprey0turn osprey1turn"
    )
    messages = [user(asked), assistant(content), user(asked), assistant("no"), user(content), assistant("no")]
    expected = [content + "<|im_end|>", "no<|im_end|>", "no<|im_end|>"]
    assert supervised(make_tokenizer(template), messages) == expected


def test_two_renderings(make_tokenizer, monkeypatch):
    """One more than the real one, however many turns."""
    renderings = []
    render = ChatTemplate.render
    finder = SpanFinder(ChatTemplate(make_tokenizer(QWEN3)))
    monkeypatch.setattr(ChatTemplate, "render", lambda *a, **k: renderings.append(1) or render(*a, **k))
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [user("hi"), assistant("", tool_calls=[call]), {"role": "tool", "content": "no"}, assistant("yes")] * 9
    assert len(finder.assistant_spans(messages)[1]) == 18
    assert len(renderings) == 2


def test_text_outside_that_stands_twice(make_tokenizer):
    """An answer that quotes the next question with its header is told from it."""
    frame = "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    messages = [user("hi"), assistant("yes" + frame), user("no"), assistant(frame[10:]), user("no"), assistant("yes")]
    expected = ["yes" + frame + "<|im_end|>", frame[10:] + "<|im_end|>", "yes<|im_end|>"]
    assert supervised(make_tokenizer(CHATML), messages) == expected


def test_arguments_as_text(make_tokenizer):
    """A template that wants text gets JSON; one that takes objects gets them."""
    wants_text = QWEN3.replace("call.function.arguments | tojson", "call.function.arguments")
    messages = [user("hi"), assistant("", tool_calls=[{"function": {"name": "no", "arguments": {"é": 1}}}])]
    for template in (QWEN3, wants_text):
        [turn] = supervised(make_tokenizer(template), messages)
        assert turn.endswith('<tool_call>no{"é": 1}</tool_call><|im_end|>')


def test_arguments_that_are_no_json(make_tokenizer):
    """Serving refuses them."""
    messages = [user("hi"), assistant("", tool_calls=[{"function": {"name": "no", "arguments": "{yes"}}])]
    with pytest.raises(RecordRefused, match="arguments are not a JSON object"):
        assistant_spans(make_tokenizer(QWEN3), messages)


def test_message_that_becomes_two_turns(make_tokenizer):
    """A call and a content as turns of their own would make the second header the model's."""
    two = CHATML.replace(
        "{{ '<|im_start|>'",
        "{% for call in m.tool_calls or [] %}"
        "{{ '<|im_start|>assistant\n' + call.function.arguments | tojson + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>'",
        1,
    )
    messages = [user("hi"), assistant("yes", tool_calls=[{"function": {"name": "no", "arguments": {}}}])]
    with pytest.raises(UserError, match="becomes more than one turn"):
        assistant_spans(make_tokenizer(two, "<|im_end|>"), messages)


@pytest.mark.parametrize("start", ["", "\n", "  ", "  {% if true %}\n yes{% endif %}"])
def test_date_in_a_rendering(make_tokenizer, start):
    """A day given in place of the clock's changes the date alone."""
    template = start + "{{ strftime_now('%d %b %Y, %A; %Y-%m-%d') }} \n" + CHATML
    today = datetime.date(2026, 7, 4)
    [fixed, clock] = [ChatTemplate(make_tokenizer(template), today=day).render([user("hi")]) for day in (today, None)]
    formats = "%d %b %Y, %A; %Y-%m-%d"
    assert "04 Jul 2026, Saturday; 2026-07-04 " in fixed
    days = [datetime.date.today() - datetime.timedelta(days) for days in (0, 1)]  # midnight may have passed
    assert fixed in [clock.replace(day.strftime(formats), today.strftime(formats)) for day in days]


def test_two_assistant_turns_in_a_row(make_tokenizer):
    """Each has a span of its own."""
    assert supervised(make_tokenizer(CHATML), [user("hi"), assistant("no"), assistant("no")]) == ["no<|im_end|>"] * 2


def test_token_across_the_edge(make_tokenizer):
    """A token that holds the header's last space and the content's first letters is not supervised."""
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = make_tokenizer(template)
    token_ids, mask = tokenize(tokenizer, [user("hi"), assistant("yes no")], 100)
    assert " yes" in [tokenizer.decode([token]) for token in token_ids]
    assert tokenizer.decode(token_ids[mask == 1]) == " no</s>"


def test_cut_on_the_right(make_tokenizer):
    """A cut keeps the beginning, and the mask of what is kept."""
    tokenizer, messages = make_tokenizer(CHATML), [user("hi"), assistant("yes no yes no")]
    token_ids, mask = tokenize(tokenizer, messages, 100)
    first = int(mask.argmax())
    cut_ids, cut_mask = tokenize(tokenizer, messages, first + 2)
    assert cut_ids.tolist() == token_ids[: first + 2].tolist()
    assert cut_mask.tolist() == [0] * first + [1, 1]


def test_golden_tokenizer(golden):
    """The golden target's own template, by hand."""
    messages = [user("For on Program"), assistant("GNU GENERAL"), user("a"), assistant("b")]
    assert supervised(load_tokenizer(golden / "target"), messages) == ["GNU GENERAL<|im_end|>", "b<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content + m.content + eos_token }}{% endfor %}", "appears 2 times"),
        ("{% for m in messages %}{{ m.content + '\nEND\n' }}{% endfor %}", "no special token ends message 1"),
        ("{{ messages[-1].content | length }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}", "before"),
        ("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}{{ messages[-1].content | length }}", "after"),
        (
            "{% for m in messages %}{{ m.content + (eos_token if m.content != 'the answer' else '') }}{% endfor %}",
            "after",
        ),
    ],
)
def test_unreadable_template(make_tokenizer, template, message):
    """A template that cannot be located is refused with its rendering, not guessed."""
    with pytest.raises(UserError, match=message) as raised:
        assistant_spans(make_tokenizer(template), [user("question"), assistant("the answer")])
    assert "question" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_gap_without_header(make_tokenizer):
    """What stands before the content is the model's where serving appends nothing."""
    template = BASE.replace(
        "{{ m['content'] }}", "{{ ('<|begin|>final' if m.role == 'assistant' else '') + m.content }}"
    )
    messages = [user("hi"), assistant("yes"), user("no"), assistant("no")]
    assert supervised(make_tokenizer(template), messages) == ["<|begin|>finalyes</s>", "<|begin|>finalno</s>"]


def test_name_that_the_template_escapes(make_tokenizer):
    """What stands before a call's arguments is then not as learned; it begins where the history ends."""
    template = QWEN3.replace("call.function.name +", "call.function.name | tojson +").replace("loop.last or ", "")
    call = {"function": {"name": 'a"b', "arguments": {}}}
    messages = [user("hi"), assistant("", tool_calls=[call]), {"role": "tool", "content": "no"}, assistant("yes")]
    expected = ['<tool_call>"a\\"b"{}</tool_call><|im_end|>', "yes<|im_end|>"]
    assert supervised(make_tokenizer(template), messages) == expected


def test_content_or_calls(make_tokenizer):
    """A template that writes calls only where there is no content loses those beside one."""
    template = QWEN3.replace("m.tool_calls or []", "([] if content else m.tool_calls or [])")
    call = {"function": {"name": "yes", "arguments": {}}}
    calling = supervised(make_tokenizer(template), [user("hi"), assistant("", tool_calls=[call])])
    assert calling == ["<tool_call>yes{}</tool_call><|im_end|>"]
    with pytest.raises(RecordRefused, match="leaves out tool calls"):
        assistant_spans(make_tokenizer(template), [user("hi"), assistant("no", tool_calls=[call])])


def test_reason_of_a_refusal(make_tokenizer):
    """The template's words for the conversation as it is, not for the second try with arguments as text."""
    template = QWEN3.replace("call.function.name", "raise_exception(call.function.arguments | tojson)")
    call = {"function": {"name": "yes", "arguments": {"a": 1}}}
    with pytest.raises(RecordRefused, match=r'^{"a": 1}$'):
        assistant_spans(make_tokenizer(template), [user("hi"), assistant("", tool_calls=[call])])


@pytest.mark.parametrize("messages", [2, 4])
def test_turns_in_another_order(make_tokenizer, messages):
    """A template that writes the last message first."""
    template = CHATML.replace("in messages", "in messages | reverse")
    talk = [user("hi"), assistant("yes"), user("no"), assistant("no")][:messages]
    if messages == 2:
        assert supervised(make_tokenizer(template), talk) == ["yes<|im_end|>"]
        return
    with pytest.raises(UserError, match="overlap"):
        assistant_spans(make_tokenizer(template), talk)


def test_generation_prompt_that_is_not_at_the_end(make_tokenizer):
    """Where a turn would begin is then unknown."""
    template = "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}" + CHATML
    with pytest.raises(UserError, match="generation prompt is not at the end"):
        assistant_spans(make_tokenizer(template), [user("hi"), assistant("yes")])


@pytest.mark.parametrize("option", ["messages", "add_generation_prompt", "tokenize"])
def test_option_that_is_none(make_tokenizer, option):
    """What a rendering decides itself cannot be an option, though the template has the word."""
    with pytest.raises(UserError, match=option):
        ChatTemplate(make_tokenizer(CHATML + "{# tokenize #}"), {option: True})


def test_history_rewritten_before_an_unknown_header(make_tokenizer):
    """A channel's header is found behind the history; where that is rewritten the template is refused."""
    rewritten = "{{ messages | length }}" + CHANNEL
    with pytest.raises(UserError, match="header"):
        assistant_spans(make_tokenizer(rewritten), [user("hi"), assistant("yes")])


def test_unknown_option(make_tokenizer):
    """An option that the template ignores would do nothing."""
    with pytest.raises(UserError, match="enable_thinkin"):
        ChatTemplate(make_tokenizer(QWEN3), {"enable_thinkin": False})


def test_no_template(make_tokenizer):
    """A tokenizer without chat template is refused."""
    with pytest.raises(UserError, match="no chat template"):
        ChatTemplate(make_tokenizer())


def test_template_refuses_a_record(make_tokenizer):
    """`raise_exception` in a template concerns the record, not the run."""
    template = CHATML + "{% if messages | length == 3 %}{{ raise_exception('odd') }}{% endif %}"
    with pytest.raises(RecordRefused, match="odd"):
        assistant_spans(make_tokenizer(template), [user("a"), user("b"), assistant("c")])
