"""Outputs appear complete or not at all; fingerprints see every change that matters."""

import os

import pytest

from osprey_jax.command import UserError
from osprey_jax.files import fingerprint, new_directory, read_json, write_json


def test_directory_appears_when_complete(tmp_path):
    """Until the block ends nothing is at the output's name."""
    out = tmp_path / "deep" / "out"
    with new_directory(out) as directory:
        (directory / "a").write_text("x")
        assert not out.exists()
    assert (out / "a").read_text() == "x" and [p.name for p in out.parent.iterdir()] == ["out"]


def test_failure_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "out") as directory:
        (directory / "a").write_text("x")
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    """An output that exists stays as it is; an empty directory is no output."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("x")
    with pytest.raises(UserError, match="already exists"), new_directory(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "old").read_text() == "x"
    (tmp_path / "empty").mkdir()
    with new_directory(tmp_path / "empty") as directory:
        (directory / "a").write_text("x")
    assert (tmp_path / "empty" / "a").exists()


def test_json(tmp_path):
    write_json(tmp_path / "a.json", {"ä": [1]})
    assert read_json(tmp_path / "a.json") == {"ä": [1]} and len(os.listdir(tmp_path)) == 1
    (tmp_path / "b.json").write_text("[1]")
    with pytest.raises(UserError, match="expected a JSON object, found list"):
        read_json(tmp_path / "b.json")


def test_fingerprint(tmp_path):
    """Contents and names count, the directory's own name and place do not; of weights, the ends do."""
    a, b = tmp_path / "a", tmp_path / "b"
    for directory in (a, b):
        directory.mkdir()
        (directory / "x").write_bytes(b"1" * 3_000_000)
        (directory / "w.safetensors").write_bytes(b"1" * 3_000_000)
    same = fingerprint(a)
    assert fingerprint(b) == same
    with (b / "x").open("r+b") as file:
        file.seek(1_500_000)
        file.write(b"2")
    assert fingerprint(b) != same
    for place in (0, 2_999_999):
        (b / "x").write_bytes(b"1" * 3_000_000)
        weights = bytearray(b"1" * 3_000_000)
        weights[place] = 2
        (b / "w.safetensors").write_bytes(weights)
        assert fingerprint(b) != same
    (a / "x").rename(a / "y")
    assert fingerprint(a) != same
    assert fingerprint(a / "y") != fingerprint(a / "y", a / "y")
