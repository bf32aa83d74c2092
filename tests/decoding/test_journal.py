import resource

import pytest

from osprey_jax.command import UserError
from osprey_jax.decoding.journal import Journal


@pytest.fixture
def opened(tmp_path):
    def make():
        return Journal(tmp_path / "journal", {"seed": 1})

    return make


def test_entries_are_found_again(opened):
    """In this process and the next one; the last entry of a key counts."""
    journal = opened()
    for entry in ({"key": "a", "n": 1}, {"key": "b", "n": "\u2028é"}, {"key": "a", "n": 2}):
        journal.add(entry)
    for same in (journal, opened()):
        assert "a" in same and "c" not in same
        assert same.read("a") == {"key": "a", "n": 2}
        assert same.read("b")["n"] == "\u2028é"
        assert same.read("c") is None
    journal.close()


def test_no_file_without_an_entry(opened, tmp_path):
    opened().close()
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_what_follows_a_torn_line_is_whole(opened, tmp_path, cut):
    """The line that a kill cut off is removed, so that the next one does not become a part of it."""
    journal = opened()
    journal.add({"key": "a"})
    journal.add({"key": "torn"})
    journal.close()
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[:-cut])
    journal = opened()
    journal.add({"key": "b"})
    journal.close()
    journal = opened()
    assert "b" in journal and "torn" not in journal
    assert ("a" in journal) == (cut < 18)
    assert len(path.read_bytes().splitlines()) == 2 + (cut < 18)


def test_failed_until_it_is_not(opened):
    journal = opened()
    journal.add({"key": "a", "failed": "x"})
    journal.add({"key": "b", "failed": "x"})
    journal.add({"key": "a"})
    journal.close()
    assert journal.failed == opened().failed == {"b"}


def test_what_cannot_be_written_is_one_line(tmp_path):
    """An error of a write, other than one of opening, does not name the file by itself."""
    with pytest.raises(UserError, match=r"gone/journal: cannot be written \(No such file or directory\)"):
        Journal(tmp_path / "gone/journal", {}).add({"key": "a"})


@pytest.mark.parametrize("room, kept", [(10, 0), (30, 0), (80, 1)])
def test_a_full_disk(opened, tmp_path, room, kept):
    """A line of which a part fits is taken back, the first one too: what follows in this process and the next is whole.

    A limit of the file's size cuts writes as a full disk does.
    """
    journal = opened()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(UserError, match=r"journal: cannot be written \(File too large\)"):
            for key in ("a", "b"):
                journal.add({"key": key, "text": "x" * 10})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "journal").read_bytes().count(b"\n") == (0 if room == 10 else 1 + kept)
    journal.add({"key": "c"})
    journal.close()
    for same in (journal, opened()):
        assert ("a" in same) == bool(kept) and "b" not in same
        assert same.read("c") == {"key": "c"}
