import json
import shutil
from pathlib import Path

import pytest

from osprey_jax.data.rendering import ChatTemplate
from osprey_jax.data.tokenizer import load_tokenizer
from osprey_jax.decoding.chat import Chat, token_limit
from tests.real_tokenizers import real_tokenizer

TARGET = Path(__file__).parents[1] / "golden/qwen3/target"
QUESTION = [{"role": "user", "content": "why?"}]

# Shows the thinking of the last turn alone, as Qwen3's does; its generation prompt may open it, as DeepSeek-R1's does.
THINKING = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>
{{ (m.reasoning_content or '').strip('\\n') }}
</think>

{% endif %}{{ m.content.lstrip('\\n') }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if opened %}<think>
{% endif %}{% endif %}"""


@pytest.fixture
def make_chat(tmp_path):
    def make(template=THINKING, **options):
        copy = tmp_path / "target"
        shutil.copytree(TARGET, copy, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        (copy / "chat_template.jinja").write_text(template)
        tokenizer = load_tokenizer(copy)
        return Chat(tokenizer, ChatTemplate(tokenizer, options), 512)

    return make


def test_limit_near_the_end_of_the_context():
    """SGLang's rule: two places stay free, and a prompt within six of the end is refused."""
    assert token_limit(10, 50, 100) == 50
    assert token_limit(60, 50, 100) == 38
    assert token_limit(93, 50, 100) == 5
    assert token_limit(94, 50, 100) is None


@pytest.mark.parametrize(
    "opened, text",
    [(False, "<think>\nit is\nso\n</think>\n\nyes"), (True, "it is\nso\n</think>\n\nyes")],
    ids=["by the model", "by the prompt"],
)
def test_thinking_is_kept_apart(make_chat, opened, text):
    """And what is rendered of the record is what the model wrote."""
    chat = make_chat(opened=opened)
    message = chat.message(QUESTION, text)
    assert message == {"role": "assistant", "reasoning_content": "it is\nso", "content": "yes"}
    rendered = chat.template.render([*QUESTION, message])
    assert rendered == chat.prompt(QUESTION) + text + "<|im_end|>\n"


@pytest.mark.parametrize(
    "text",
    [
        "<think> it is </think> yes",  # not the template's newlines
        "<think>\nit is\n",  # cut, and a template strips it
        "so <think>\nit is\n</think>\n\nyes",
        "\n<think>\nit is\n</think>\n\nyes",
        "yes",
        "",
    ],
)
def test_what_would_not_come_back_stays(make_chat, text):
    """Split, the record would render other text than the model wrote."""
    assert make_chat().message(QUESTION, text) == {"role": "assistant", "content": text}


def test_thinking_that_a_limit_cut(make_chat):
    """What closes it is the template's; the record has no answer."""
    chat = make_chat(opened=True)
    message = chat.message(QUESTION, "it is")
    assert message == {"role": "assistant", "reasoning_content": "it is", "content": ""}
    assert make_chat().message(QUESTION, "<think>\nit is") == message


def test_tools_are_shown(make_chat):
    """As serving shows them to the model."""
    chat = make_chat("{{ tools | tojson }}" + THINKING)
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert chat.prompt(QUESTION, tools).startswith('[{"type"') and chat.prompt(QUESTION).startswith("null")
    assert len(chat.prompt_ids(QUESTION, tools)) > len(chat.prompt_ids(QUESTION))


def test_a_template_without_thinking(make_chat):
    """It would leave out `reasoning_content`."""
    text = "<think>\nit is\n</think>\n\nyes"
    plain = make_chat((TARGET / "chat_template.jinja").read_text())
    assert plain.message(QUESTION, text) == {"role": "assistant", "content": text}


def test_empty_thinking_is_no_reasoning(make_chat):
    """The template writes it by itself."""
    message = make_chat().message(QUESTION, "<think>\n\n</think>\n\nyes")
    assert message == {"role": "assistant", "content": "yes"}


def test_other_tags(make_chat):
    chat = make_chat(THINKING.replace("<think>", "[THINK]").replace("</think>", "[/THINK]"))
    message = chat.message(QUESTION, "[THINK]\nit is\n[/THINK]\n\nyes </think>")
    assert message == {"role": "assistant", "reasoning_content": "it is", "content": "yes </think>"}


def test_in_a_later_turn(make_chat):
    """The turn that was written counts, not those before it."""
    chat = make_chat()
    history = [*QUESTION, {"role": "assistant", "reasoning_content": "a", "content": "b"}, *QUESTION]
    message = chat.message(history, "<think>\nc\n</think>\n\nd")
    assert message == {"role": "assistant", "reasoning_content": "c", "content": "d"}


def test_a_servers_thinking_without_newlines(make_chat):
    """They are the template's; where it writes none itself they are the model's."""
    given = ("\nhm\n", "\n\nyes")
    assert make_chat().tidied(QUESTION, *given) == {"role": "assistant", "reasoning_content": "hm", "content": "yes"}
    exact = make_chat(THINKING.replace(".strip('\\n')", "").replace(".lstrip('\\n')", ""))
    kept = {"role": "assistant", "reasoning_content": "\nhm\n", "content": "\n\nyes"}
    assert exact.tidied(QUESTION, *given) == kept


@pytest.mark.network
def test_qwen3():
    """Its own template, thinking and not."""
    tokenizer = load_tokenizer(real_tokenizer("qwen3"))
    text = "<think>\nit is\n</think>\n\nyes"
    chat = Chat(tokenizer, ChatTemplate(tokenizer), 512)
    message = chat.message(QUESTION, text)
    assert message == {"role": "assistant", "reasoning_content": "it is", "content": "yes"}
    assert chat.template.render([*QUESTION, message]) == chat.prompt(QUESTION) + text + "<|im_end|>\n"
    without = Chat(tokenizer, ChatTemplate(tokenizer, {"enable_thinking": False}), 512)
    assert without.message(QUESTION, "yes") == {"role": "assistant", "content": "yes"}
    assert json.dumps(without.prompt(QUESTION)).endswith('<think>\\n\\n</think>\\n\\n"')
