import pytest

from osprey_jax.decoding import sink
from osprey_jax.decoding.dialogues import Dialogue
from osprey_jax.decoding.journal import Journal
from osprey_jax.decoding.sink import Sink


@pytest.fixture
def at(monkeypatch):
    """`at(seconds)` sets the clock."""

    def set_clock(seconds):
        monkeypatch.setattr(sink.time, "monotonic", lambda: seconds)

    set_clock(1000.0)
    return set_clock


def test_lines_without_a_terminal(tmp_path, at, capsys):
    """One a minute: what is done of all, the tokens/s of the last minute, the time left at the speed of this run."""
    with Sink(Journal(tmp_path / "journal", {}), 4, 10) as made:
        for second in range(0, 131, 5):
            at(1000.0 + second)
            made.tokens(50 if second < 60 else 100)
            if second == 60:
                made.finished(Dialogue("a", "a", [], finish_reasons=["stop"]))
                made.failed(Dialogue("b", "b", []), "x")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "answer: 6/10 conversations, 12 tokens/s, 02:10 left",
        "answer: 6/10 conversations, 20 tokens/s, 04:20 left",
    ]
