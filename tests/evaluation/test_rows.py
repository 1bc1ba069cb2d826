from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from pathlib import Path

import pytest

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.standard_errors import paired_difference, pairs_of

from .rows import row


def test_rows_come_back(tmp_path):
    file = Rows(tmp_path / "deep" / "rows.jsonl")
    first, second = row(), row(length=512, nll=math.nan, perplexity=math.nan)
    file.append(first)
    file.append(second)
    again = Rows(file.path)
    assert again.find(first.key()) == first
    assert math.isnan(again.find(second.key()).nll)
    assert "NaN" not in file.path.read_text()


def test_the_last_of_equal_rows_counts(tmp_path):
    file = Rows(tmp_path / "rows.jsonl")
    file.append(row(nll=1.0))
    file.append(row(nll=2.0))
    assert Rows(file.path).find(row().key()).nll == 2.0


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("rest", [b"{", b'{"model": "x", "le', b"\xe2\x82"])
def test_a_line_cut_off_while_writing_is_removed_and_nothing_else(tmp_path, kept, rest):
    file = Rows(tmp_path / "rows.jsonl")
    for length in range(256, 256 + kept):
        file.append(row(length=length))
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + rest)
    again = Rows(file.path)
    assert file.path.read_bytes() == whole
    again.append(row(length=512))
    assert len(Rows(file.path).path.read_text().splitlines()) == kept + 1


@pytest.mark.parametrize("content", ["hello\n", '{"a": 1}\n', "[]\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(EvaluationError, match=r"rows.jsonl, line 1, is not a result row"):
        Rows(path)
    assert path.read_text() == content


def test_a_full_disk_leaves_whole_rows(tmp_path, monkeypatch):
    file = Rows(tmp_path / "rows.jsonl")
    file.append(row())
    whole = file.path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*rows.jsonl'"):
        file.append(row(length=512))
    assert file.path.read_bytes() == whole


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="taken"):
        Rows(tmp_path / "taken" / "rows.jsonl")


def test_two_runs_write_one_file(tmp_path):
    one, other = Rows(tmp_path / "rows.jsonl"), Rows(tmp_path / "rows.jsonl")
    for length in range(1, 9):
        (one if length % 2 else other).append(row(length=length))
    assert [found.length for found in Rows(one.path).rows] == list(range(1, 9))


def test_fields_of_another_version_are_left_out_and_missing_ones_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    said = json.loads(row().to_json())
    del said["nll_by_document"]
    path.write_text(json.dumps(said | {"code": "abc"}) + "\n")
    assert Rows(path).rows == [row()]
    del said["nll"]
    path.write_text(json.dumps(said) + "\n")
    with pytest.raises(EvaluationError, match=r"line 1, is not a result row .*'nll'"):
        Rows(path)


def test_another_version_of_the_software_measures_nothing_again(tmp_path):
    file = Rows(tmp_path / "rows.jsonl")
    file.append(row(versions={"rope_patch": "0.1"}, commit="abc"))
    assert Rows(file.path).find(row(versions={"rope_patch": "9.9"}, commit=None).key()) is not None


RESULTS = Path(__file__).parents[2] / "docs" / "results"
OTHERS = {"encodings", "serving", "zoo"}  # of other kinds


@pytest.mark.parametrize(
    "path", [path for path in RESULTS.rglob("*.jsonl") if path.parent.name not in OTHERS], ids=lambda path: path.stem
)
def test_the_rows_that_were_committed_are_read_and_recalled(path, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(path.read_bytes())
    rows = Rows(tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in set(path.read_text().splitlines())]
    assert len(rows.rows) == len(lines)
    for fields in lines:
        recalled = rows.recall({"task": "perplexity", "step": None, **fields})
        assert {name: value for name, value in vars(recalled).items() if name in fields} == {
            name: value for name, value in fields.items() if hasattr(recalled, name)
        }


def test_a_difference_is_paired_by_document():
    one, other = row(nll_by_document=[1.0, 3.0, 5.0], nll=3.0), row(nll_by_document=[0.9, 2.8, 4.7], nll=2.8)
    difference, error = paired_difference(one, other)
    assert difference == pytest.approx(0.2)
    assert error == pytest.approx(0.1 / 3**0.5)  # of 0.1, 0.2 and 0.3
    assert paired_difference(row(nll_by_document=[1.0]), row(nll_by_document=[2.0])) == (0.0, None)
    for changed in ({"texts": "others"}, {"protocol": "sliding"}):
        with pytest.raises(EvaluationError, match="different texts"):
            paired_difference(one, row(**changed))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_has_no_error(tmp_path, value):
    file = Rows(tmp_path / "rows.jsonl")
    file.append(row(nll_by_document=[1.0, value, 2.0]))
    for found in (file.rows[0], Rows(file.path).rows[0]):
        assert paired_difference(found, row(nll_by_document=[1.0, 2.0, 3.0])) == (0.0, None)


@pytest.mark.parametrize(
    ("documents", "windows", "values", "words"),
    [
        (12, 12, 12, "12 documents"),
        (12, 24, 12, "12 documents"),
        (1, 16, 16, "16 windows of 1 document"),
        (3, 18, 18, "18 windows of 3 documents"),
        (1, 500, 32, "32 blocks of windows of 1 document"),
    ],
)
def test_what_an_error_is_taken_over_is_said(documents, windows, values, words):
    assert pairs_of(row(documents=documents, windows=windows, nll_by_document=[1.0] * values)) == words


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
    }.items():
        assert row(**{field: value}).key() != row().key(), field
