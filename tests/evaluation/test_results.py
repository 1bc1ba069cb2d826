from __future__ import annotations

import dataclasses
import errno
import math
import os

import pytest

from rope_patch.errors import EvaluationError
from rope_patch.evaluation import results
from rope_patch.evaluation.results import ResultFile

from .rows import row


def test_rows_come_back(tmp_path):
    file = ResultFile(tmp_path / "deep" / "rows.jsonl")
    first, second = row(), row(length=512, nll=math.nan, perplexity=math.nan)
    file.append(first)
    file.append(second)
    again = ResultFile(file.path)
    assert again.find(first.key()) == first
    assert math.isnan(again.find(second.key()).nll)
    assert "NaN" not in file.path.read_text()


def test_the_last_of_equal_rows_counts(tmp_path):
    file = ResultFile(tmp_path / "rows.jsonl")
    file.append(row(nll=1.0))
    file.append(row(nll=2.0))
    assert ResultFile(file.path).find(row().key()).nll == 2.0


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("rest", [b"{", b'{"model": "x", "le', b"\xe2\x82"])
def test_a_line_cut_off_while_writing_is_removed_and_nothing_else(tmp_path, kept, rest):
    file = ResultFile(tmp_path / "rows.jsonl")
    for length in range(256, 256 + kept):
        file.append(row(length=length))
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + rest)
    again = ResultFile(file.path)
    assert file.path.read_bytes() == whole
    again.append(row(length=512))
    assert len(ResultFile(file.path).path.read_text().splitlines()) == kept + 1


@pytest.mark.parametrize("content", ["hello\n", '{"a": 1}\n', "[]\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(EvaluationError, match=r"rows.jsonl, line 1, is not a result row"):
        ResultFile(path)
    assert path.read_text() == content


def test_a_full_disk_leaves_whole_rows(tmp_path, monkeypatch):
    file = ResultFile(tmp_path / "rows.jsonl")
    file.append(row())
    whole = file.path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        file.append(row(length=512))
    assert file.path.read_bytes() == whole
    with pytest.raises(OSError, match="No space left"):
        ResultFile(file.path)


def test_code_that_only_shows_is_no_part_of_the_fingerprint(tmp_path, monkeypatch):
    showing = ("report.py", "sweep_report.py", "figures.py", "retrieval/report.py", "cli/plot.py", "plots/style.py")
    for name in ("perplexity.py", *showing):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    monkeypatch.setattr(results, "_PACKAGE", tmp_path)
    before = results._code_fingerprint()
    for name in showing:
        (tmp_path / name).write_text("x = 2")
    assert results._code_fingerprint() == before
    (tmp_path / "perplexity.py").write_text("x = 2")
    assert results._code_fingerprint() != before


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ('"""What it is for."""\nx = 1\n"""What x is."""\n\n\ndef f():\n    """Of nothing."""\n    return x\n', True),
        ("x = 1\ndef f():\n    # why\n    return (x)\n", True),
        ("x = 1\ndef f():\n    return -x\n", False),
        ('x = 1\ny = "text"\ndef f():\n    return x\n', False),
    ],
)
def test_docstrings_comments_and_layout_are_no_part_of_the_fingerprint(changed, same, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "_PACKAGE", tmp_path)
    fingerprints = []
    for source in ("x = 1\ndef f():\n    return x\n", changed):
        (tmp_path / "module.py").write_text(source)
        fingerprints.append(results._code_fingerprint())
    assert (fingerprints[0] == fingerprints[1]) == same


def test_the_key_tells_measurements_apart_and_ignores_circumstances():
    same = {"line": "x", "seconds": 9.0, "device": "cuda", "commit": None, "seed": 7, "nll": 0.0}
    assert dataclasses.replace(row(), **same).key() == row().key()
    for field, value in {
        "model": "x",
        "weights": "x",
        "scheme": {"name": "pi", "factor": 4.0},
        "protocol": "by_position",
        "length": 1,
        "targets": 1,
        "texts": "x",
        "dtype": "bfloat16",
        "attention": "eager",
        "code": "x",
    }.items():
        assert row(**{field: value}).key() != row().key(), field
