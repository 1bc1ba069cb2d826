from __future__ import annotations

import json
from itertools import islice

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from rope_patch.cli import main
from rope_patch.errors import CorpusError
from rope_patch.evaluation import corpora
from rope_patch.evaluation.corpora import load_corpus, read_documents, standard_library, text_or_dataset
from rope_patch.evaluation.documents import from_rows

from .conftest import documents


def lines(*rows) -> bytes:
    return b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)


def texts(source, **settings) -> list[str]:
    return [document["text"] for document in read_documents(str(source), **settings)]


@pytest.fixture
def folder(tmp_path):
    """Three records in a file of lines, two in a Parquet file, and the card of the dataset."""
    rows = [{"text": text, "id": i} for i, text in enumerate("abcde")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[3:]), tmp_path / "b.parquet")
    (tmp_path / "README.md").write_text("about the data")
    return tmp_path


def test_lines_and_tables_are_read_alone_from_a_folder_and_by_a_pattern(folder):
    assert texts(folder / "a.jsonl") == ["a", "b", "c"]
    assert texts(folder / "b.parquet") == ["d", "e"]
    assert texts(folder) == texts(folder / "*.*[lt]") == ["a", "b", "c", "d", "e"]
    assert texts(folder / "**" / "*.md") == ["about the data"]


def test_documents_are_named_by_their_place_or_by_their_own_name(folder):
    names = [document["name"] for document in read_documents(str(folder))]
    assert names == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "b.parquet:1", "b.parquet:2"]
    (folder / "a.jsonl").write_text('{"text": "x", "name": "own"}')
    assert next(iter(read_documents(str(folder))))["name"] == "own"


def test_text_files_of_a_folder_come_before_its_data(folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "z.txt").write_text("one\r\ndocument")
    assert texts(folder) == ["about the data", "one\ndocument"]


def test_a_json_file_of_lines_is_read_where_there_is_nothing_else(tmp_path):
    (tmp_path / "a.json").write_text('{"body": "x"}\n\n{"body": "y"}\n')
    assert texts(tmp_path / "a.json", column="body") == texts(tmp_path, column="body") == ["x", "y"]


def test_a_dataset_is_read_whole_and_as_a_stream(folder):
    (folder / "b.parquet").rename(folder / "test.parquet")
    (folder / "a.jsonl").unlink()
    for streaming in (False, True):
        found = read_documents(str(folder), split="test", streaming=streaming)
        assert list(found) == [{"name": "test[0]", "text": "d"}, {"name": "test[1]", "text": "e"}]
        assert list(found.starting_at(1)) == [{"name": "test[1]", "text": "e"}]
        with pytest.raises(CorpusError, match="has no column 'body'; it has"):
            read_documents(str(folder), split="test", column="body", streaming=streaming)


def test_the_splits_of_the_standard_library_remain(monkeypatch):
    assert list(read_documents("stdlib", split="held_out")) == standard_library("held_out").to_list()
    with pytest.raises(CorpusError, match="split 'test' of the standard library"):
        read_documents("stdlib", split="test")
    monkeypatch.setattr(corpora, "standard_library", lambda split: Dataset.from_list([{"name": split, "text": "x"}]))
    assert [document["name"] for document in read_documents()] == ["train"]
    assert load_corpus()["name"][:] == ["held_out"]


@pytest.mark.parametrize("on_bad_line", ["stop", "skip"])
def test_documents_are_iterated_again_and_from_any_place(folder, on_bad_line):
    found = read_documents(str(folder), on_bad_line=on_bad_line)
    assert list(found) == list(found)
    for first in range(7):
        assert list(found.starting_at(first)) == list(found)[first:]


BAD = {
    "not JSON": (b'{"text": "b"', r"line 2: not JSON \("),
    "a number": (b"17", "line 2: int, where an object with a column 'text' is expected"),
    "another column": (b'{"txet": "b"}', "line 2: there is no column 'text'; there is 'txet'"),
    "no text": (b'{"text": null}', "line 2: column 'text' holds NoneType, not text"),
    "not UTF-8": (b'{"text": "\xff"}', r"line 2: not UTF-8 \(invalid start byte at byte 10\)"),
    "half a pair": (b'{"text": "\\ud800"}', r"line 2: column 'text' is not Unicode"),
    "deep": (b"[" * 100_000, "line 2: not JSON"),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD)
def test_a_bad_line_stops_the_reading_or_is_left_out_and_counted(bad, message, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"text": "a"}\n' + bad + b'\n{"text": "c"}\n')
    strict = read_documents(str(file))
    with pytest.raises(CorpusError, match=f"x.jsonl, {message}"):
        list(strict)
    lenient = read_documents(str(file), on_bad_line="skip")
    for _ in range(2):  # a second pass meets the same line again
        assert [document["text"] for document in lenient] == ["a", "c"]
    assert lenient.bad_records.count == 1
    assert "x.jsonl, line 2: " in str(lenient.bad_records)
    assert [document["text"] for document in lenient.starting_at(1)] == ["c"]


def test_only_the_first_few_bad_lines_are_shown(tmp_path):
    (tmp_path / "x.jsonl").write_text("no\n" * 50 + '{"text": "a"}')
    found = read_documents(str(tmp_path / "x.jsonl"), on_bad_line="skip")
    assert str(found.bad_records) == "every record could be read"
    assert len(list(found)) == 1
    assert found.bad_records.count == 50
    assert len(found.bad_records.first) == 5
    assert str(found.bad_records).endswith(", ...")


def test_a_text_file_that_is_not_utf_8_is_a_bad_record(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"one\ntwo \xe9\n")
    with pytest.raises(CorpusError, match=r"b.txt: not UTF-8 \(.* at byte 8 in line 2\)"):
        load_corpus(str(tmp_path))
    found = read_documents(str(tmp_path), on_bad_line="skip")
    assert [document["text"] for document in found] == ["fine"]


def test_a_table_without_the_column_or_cut_short_is_named(folder):
    with pytest.raises(CorpusError, match=r"b.parquet has no column 'body'; it has text, id"):
        texts(folder / "b.parquet", column="body")
    (folder / "b.parquet").write_bytes((folder / "b.parquet").read_bytes()[:-5])
    with pytest.raises(CorpusError, match=r"cannot read .*b.parquet"):
        texts(folder / "b.parquet")


def test_where_there_is_no_text_one_sentence_says_so(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    (tmp_path / "bad.jsonl").write_text("no\n")
    with pytest.raises(CorpusError, match=r"no text in '.*empty.jsonl': 0 documents"):
        texts(tmp_path / "empty.jsonl")
    with pytest.raises(CorpusError, match=r"no text in '.*blank.jsonl': 2 documents, all empty"):
        load_corpus(str(tmp_path / "blank.jsonl"))
    with pytest.raises(CorpusError, match=r"0 documents, all empty; 1 records were left out: .*line 1"):
        texts(tmp_path / "bad.jsonl", on_bad_line="skip")
    with pytest.raises(CorpusError, match=r"no file matches '.*\*.parquet'"):
        texts(tmp_path / "*.parquet")
    with pytest.raises(CorpusError, match=r"there is no file 'no/where.jsonl'"):
        texts("no/where.jsonl")
    with pytest.raises(CorpusError, match="no text at 'no/where'"):
        texts("no/where")
    with pytest.raises(CorpusError, match="on_bad_line='pass' is not allowed"):
        texts(tmp_path / "bad.jsonl", on_bad_line="pass")


def test_lines_are_read_as_they_are_needed(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\nno\n')
    assert [row["text"] for row in islice(read_documents(str(tmp_path / "x.jsonl")), 1)] == ["a"]
    # where records must all be documents, those passed over are not even parsed
    (tmp_path / "x.jsonl").write_text('no\n{"text": "b"}\n')
    assert next(read_documents(str(tmp_path / "x.jsonl")).starting_at(1))["text"] == "b"


def test_a_corpus_to_measure_on_is_read_from_lines_and_from_a_test_split(folder):
    assert load_corpus(str(folder)).to_list() == list(read_documents(str(folder)))
    (folder / "a.jsonl").rename(folder / "latest.jsonl")
    assert load_corpus(str(folder))["text"][:] == ["d", "e", "a", "b", "c"]
    (folder / "latest.jsonl").unlink()
    (folder / "b.parquet").rename(folder / "my-test.parquet")
    assert load_corpus(str(folder)).to_list() == [{"name": f"test[{i}]", "text": text} for i, text in enumerate("de")]


def test_a_measurement_reads_a_text_a_pattern_a_dataset_or_what_is_held_out(folder, monkeypatch):
    monkeypatch.setattr(corpora, "standard_library", lambda split: split)
    assert text_or_dataset(None, None) == "held_out"
    assert text_or_dataset(str(folder / "*.jsonl"), None)["text"] == ["a", "b", "c"]
    assert text_or_dataset(None, str(folder))["text"] == ["a", "b", "c", "d", "e"]
    (folder / "a.jsonl").write_text('{"body": "x"}')
    assert text_or_dataset(str(folder / "a.jsonl"), None, column="body")["text"] == ["x"]
    with pytest.raises(CorpusError, match="there is no text file or folder 'nowhere'"):
        text_or_dataset("nowhere", None)
    with pytest.raises(CorpusError, match=r"no file matches 'nowhere\*'"):
        text_or_dataset("nowhere*", None)


def test_documents_in_memory_are_read_like_any_others():
    rows = documents(3, 4, 5)
    assert list(from_rows("memory", rows).starting_at(1)) == rows[1:]


def test_perplexity_is_measured_on_lines(checkpoint, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents(60, 90)))
    output = tmp_path / "out"
    arguments = ["--model", checkpoint, "--text", file, "--lengths", "8,16", "--targets", 8]
    assert main(["perplexity", *map(str, arguments), "--output", str(output)]) == 0
    rows = [json.loads(line) for line in (output / "perplexity.jsonl").read_text().splitlines()]
    assert {row["documents"] for row in rows} == {2}
