from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from rope_patch.data.corpora import HELD_OUT_MODULES, load_corpus, load_text, name_of_text
from rope_patch.errors import CorpusError


@pytest.fixture
def folder(tmp_path):
    """Three records in a file of lines, two in a Parquet file, and the card of the dataset."""
    rows = [{"text": text, "id": i} for i, text in enumerate("abcde")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[3:]), tmp_path / "b.parquet")
    (tmp_path / "README.md").write_text("about the data")
    return tmp_path


def texts(source, **settings):
    return load_text(str(source), **settings)["text"][:]


def test_lines_and_tables_are_read_alone_from_a_folder_and_by_a_pattern(folder):
    assert texts(folder / "a.jsonl") == ["a", "b", "c"]
    assert texts(folder / "b.parquet") == ["d", "e"]
    assert texts(folder) == texts(folder / "*.*[lt]") == ["a", "b", "c", "d", "e"]
    assert texts(folder / "**" / "*.md") == ["about the data"]


def test_documents_are_named_by_their_place_or_by_their_own_name(folder):
    assert load_text(str(folder))["name"][:] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "b.parquet:1", "b.parquet:2"]
    (folder / "own.jsonl").write_text('{"text": "x", "name": "own"}')
    assert load_text(str(folder / "own.jsonl")).to_list() == [{"name": "own", "text": "x"}]


def test_text_files_of_a_folder_come_before_its_data(folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "z.txt").write_bytes(b"one\r\ndocument")
    assert texts(folder) == ["about the data", "one\ndocument"]


def test_another_column(tmp_path):
    (tmp_path / "a.json").write_text('{"body": "x"}\n{"body": "y"}\n')
    assert texts(tmp_path, column="body") == ["x", "y"]
    with pytest.raises(CorpusError, match=r"a.json has no column 'text'; it has body"):
        texts(tmp_path)


def test_a_dataset_is_read_by_its_test_split_whole_and_as_a_stream(folder):
    assert load_text(dataset=str(folder))["text"][:] == ["a", "b", "c", "d", "e"]  # no split but train
    (folder / "b.parquet").rename(folder / "test.parquet")
    (folder / "a.jsonl").unlink()
    for streaming in (False, True):
        found = load_text(dataset=str(folder), streaming=streaming)
        assert list(found) == [{"name": "test:1", "text": "d"}, {"name": "test:2", "text": "e"}]
        with pytest.raises(CorpusError, match="has no column 'body'; it has"):
            load_text(dataset=str(folder), column="body", streaming=streaming)


def test_the_standard_library_is_divided_by_module():
    held_out, train = load_text(), load_text(split="train")
    assert sorted(held_out["name"]) == sorted(HELD_OUT_MODULES)
    assert set(held_out["name"]).isdisjoint(train["name"])
    assert held_out.to_list() == load_corpus().to_list()
    with pytest.raises(CorpusError, match="split 'test' of the standard library"):
        load_corpus("test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"cannot read .*x.jsonl"),
        (b'{"text": "a"}\n{"text": null}\n', r"x.jsonl, row 2: 'text' holds NoneType, not text"),
        (b'{"text": 5}\n', r"x.jsonl, row 1: 'text' holds int, not text"),
        (b'{"text": ""}\n{"text": ""}\n', r"no text in '.*x.jsonl': 2 documents, all empty"),
        (b"", r"x.jsonl"),
    ],
)
def test_records_that_are_no_documents_are_named(content, message, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        texts(tmp_path / "x.jsonl")


def test_where_there_is_no_text_one_sentence_tells_it(folder):
    (folder / "bad.txt").write_bytes(b"one\ntwo \xe9\n")
    with pytest.raises(CorpusError, match=r"bad.txt is not UTF-8: .* at byte 8"):
        texts(folder / "bad.txt")
    for nowhere in ("nowhere", "nowhere*", "no/where.jsonl"):
        with pytest.raises(CorpusError, match=f"there is no text file at '{nowhere.replace('*', '.')}'"):
            texts(nowhere)
    with pytest.raises(CorpusError, match="dataset 'no/where'"):
        load_text(dataset="no/where")
    with pytest.raises(CorpusError, match="use only one of them"):
        load_text("a", "b")


def test_a_text_has_a_name_for_tables():
    assert name_of_text() == "Python's standard library"
    assert name_of_text("/far/away/book.txt") == "book.txt"
    assert name_of_text(dataset="wikitext", split="test") == "wikitext, split test"
