"""Text that every Python installation has, as a miniature run's inputs: documents, prompts, two tokenizers.

python configs/quickstart/texts.py OUT

Two domains: `code`, the standard library's sources without comments and docstrings, and `prose`, the language reference
in `pydoc_data.topics` (the library's docstrings, where a distribution leaves that out). A file or topic is held out as
a whole, by a hash of its name: nothing of it is in any tokenizer or training text.
"""

import ast
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from osprey_jax.command import UserError, run
from osprey_jax.data.tokenizer import load_tokenizer
from osprey_jax.files import new_directory, write_json, write_text

CODE_CHARACTERS = 1_500_000
HELD_OUT_PART = 8  # one name in so many
CHATS = {"code": 3600, "prose": 2400}  # what the target learns from
QUESTIONS = 768  # prompts that the target answers for the drafters to learn from
HELD_OUT_PROMPTS = 48  # of each domain
CHAT_TOKENS = [
    "<|pad|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|tool|>",
]  # ids 0..5: target/config.json
LM_TOKENS = ["<|endoftext|>"]

_NOT_CODE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}
# About 32 and 96 tokens, each ending before a space.
_QUESTION, _ANSWER = (
    r"(?s:.{59,89}\S)(?=\s)",
    r"(?s:.{220,300}\S)(?=\s)",
)  # about 32 and 96 tokens, ending before a space
_WINDOW = re.compile(f"({_QUESTION})({_ANSWER})")

Texts = dict[str, dict[str, list[str]]]  # domain -> "train" or "held_out" -> documents


def write_inputs(out: Path) -> None:
    """Write `tokenizers/`, `text/` (to train on) and `prompts/` to `out`, which appears complete or not at all."""
    texts = read_texts()
    chosen = random.Random(0)
    with new_directory(out) as directory:
        for name in ("tokenizers", "text", "prompts"):
            (directory / name).mkdir()
        code, prose = (texts[domain]["train"] for domain in ("code", "prose"))
        target = directory / "tokenizers" / "target"
        write_tokenizer(target, code + prose, 768, CHAT_TOKENS, eos="<|end|>", pad="<|pad|>")
        shutil.copyfile(Path(__file__).with_name("chat_template.jinja"), target / "chat_template.jinja")
        # Another text and another size: the two models share no vocabulary, as two real ones do not.
        small_lm = directory / "tokenizers" / "small_lm"
        write_tokenizer(small_lm, code[::2] + prose[1::2], 512, LM_TOKENS, eos="<|endoftext|>", pad="<|endoftext|>")

        for split, part in (("train", 1), ("held_out", 60)):
            text = directory / "text"
            windows = {d: draw_windows(texts[d][split], CHATS[d] // part, chosen) for d in texts}
            write_lines(text / f"chats.{split}.jsonl", render(target, [w for d in texts for w in windows[d]]))
            documents = [document for domain in texts for document in texts[domain][split]]
            if split == "held_out":
                documents = [question + answer for domain in texts for question, answer in windows[domain]]
            write_lines(text / f"plain.{split}.jsonl", documents)

        prompts = directory / "prompts"
        write_prompts(prompts / "code.train.jsonl", draw_windows(code, QUESTIONS, chosen))
        for domain in texts:
            windows = draw_windows(texts[domain]["held_out"], HELD_OUT_PROMPTS, chosen)
            write_prompts(prompts / f"{domain}.held_out.jsonl", windows)


# ---- texts


def read_texts() -> Texts:
    """Both domains, in an order that depends on names alone."""
    texts: Texts = {domain: {"train": [], "held_out": []} for domain in ("code", "prose")}
    seen: set[str] = set()  # some modules are copies, and many are next to empty
    characters = 0
    for name, source in sorted(_sources(), key=lambda item: _hash(item[0])):
        if characters >= CODE_CHARACTERS:
            break
        code = bare_code(source)
        if len(code) >= 300 and code not in seen:
            seen.add(code)
            texts["code"][split_of(name)].append(code)
            characters += len(code)
    for name, text in sorted(_prose()):
        texts["prose"][split_of(name)].append(text)
    return texts


def split_of(name: str) -> str:
    return "held_out" if _hash(name) % HELD_OUT_PART == 0 else "train"


def bare_code(source: str) -> str:
    """Python source without comments and docstrings; next to nothing where it cannot be parsed."""
    tree = _parse(source)
    for node, _ in _docstrings(tree):
        node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree) + "\n"


def _sources() -> Iterator[tuple[str, str]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _NOT_CODE]
        for name in files:
            path = Path(folder, name)
            if path.suffix == ".py" and not name.startswith("_sysconfigdata"):  # of this machine
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    yield path.relative_to(library).as_posix(), path.read_text(encoding="utf-8")


def _prose() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        for name, source in _sources():
            docstrings = [text for _, text in _docstrings(_parse(source)) if len(text) > 150]
            if docstrings:
                yield name, "\n\n".join(docstrings) + "\n"
    else:
        plain = str.maketrans("“”‘’", "\"\"''")
        for name, text in topics.items():
            yield name, text.translate(plain)


def _parse(source: str) -> ast.Module:
    """The syntax tree, an empty one where there is none."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _docstrings(tree: ast.Module) -> list[tuple[ast.AST, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [(node, text) for node in nodes if (text := ast.get_docstring(node)) is not None]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


# ---- chats


def draw_windows(documents: list[str], count: int, chosen: random.Random) -> list[tuple[str, str]]:
    """(question, answer): what follows the start of a line, and what follows that. Long documents give more."""
    starts = [(i, match.end()) for i, text in enumerate(documents) for match in re.finditer(r"\n(?=\S| {4})", text)]
    windows: list[tuple[str, str]] = []
    chosen.shuffle(starts)
    for i, start in starts:
        if window := _WINDOW.match(documents[i], start):
            windows.append(window.groups())
        if len(windows) == count:
            return windows
    raise UserError(f"the standard library of this Python gives only {len(windows)} of {count} pieces of text")


def render(tokenizer_directory: Path, windows: list[tuple[str, str]]) -> list[str]:
    """Windows as the chat template writes them, up to the last answer's end token: training adds that itself."""
    tokenizer = load_tokenizer(tokenizer_directory)
    rendered = []
    for question, answer in windows:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rendered.append(tokenizer.apply_chat_template(messages, tokenize=False).removesuffix(tokenizer.eos_token))
    return rendered


def write_prompts(path: Path, windows: list[tuple[str, str]]) -> None:
    records = [
        {"id": f"{path.name.split('.')[0]}-{i}", "conversations": [{"role": "user", "content": question}]}
        for i, (question, _) in enumerate(windows)
    ]
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def write_lines(path: Path, documents: list[str]) -> None:
    write_text(path, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents))


# ---- tokenizers


def write_tokenizer(out: Path, texts: list[str], size: int, special: list[str], *, eos: str, pad: str) -> None:
    """Train a byte-level BPE of `size` entries, `special` first, and write it as a Hugging Face tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    out.mkdir()
    tokenizer.save(str(out / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": pad}
    write_json(out / "tokenizer_config.json", config | {"clean_up_tokenization_spaces": False})


def main() -> None:
    if len(sys.argv) != 2:
        raise UserError("usage: python configs/quickstart/texts.py OUT")
    write_inputs(Path(sys.argv[1]))
    print(f"written to {sys.argv[1]}")


if __name__ == "__main__":
    run(main)
