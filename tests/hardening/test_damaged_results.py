"""Results, settings and words of a command line that nobody wrote on purpose: one line, and exit status 2."""

from __future__ import annotations

import io
import json
import os
import time
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from rich.console import Console

from rope_patch.cli import main
from rope_patch.data.corpora import load_text
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.tables import print_table
from rope_patch.evaluation.verdict import of_losses
from rope_patch.json_files import read_object
from rope_patch.training.checkpoints import claim
from tests.evaluation.rows import row
from tests.hardening.exploring import explore, in_memory, in_time
from tests.hardening.hostile import damaged
from tests.hardening.scale import parts

WHOLE = row().to_json()


def with_field(name: str, value: str) -> bytes:
    """A row with another value, as it is spelled in JSON; in place of its own or as one more key."""
    fields = json.loads(WHOLE)
    fields.pop(name, None)
    return f"{json.dumps(fields)[:-1]}, {json.dumps(name)}: {value}}}".encode()


DAMAGED = {
    "text for a number": (with_field("length", '"256"'), "length='256' must be a whole number"),
    "a fraction for a whole number": (with_field("length", "256.5"), "must be a whole number"),
    "true for a number": (with_field("documents", "true"), "documents=True must be a whole number"),
    "an object for text": (with_field("line", "{}"), "line={} must be text"),
    "null for text": (with_field("model", "null"), "model=None must be text"),
    "a number for a list": (with_field("nll_by_document", "3"), "must be a list"),
    "text in a list": (with_field("nll_by_document", '[1.0, "x"]'), "must be a list (a number each)"),
    "a list for an object": (with_field("scheme", "[]"), "must be an object"),
    "a list for a loss": (with_field("nll", "[]"), "nll=[] must be a number"),
    "no length": (with_field("length", "0"), "length=0 must be at least 1"),
    "no training length": (with_field("training_length", "-1"), "training_length=-1 must be at least 1"),
    "a share of 2": (with_field("accuracy", "2"), "accuracy=2 must be from 0 to 1"),
    "a negative share": (with_field("scores", "[0.5, -0.1]"), "must be from 0 to 1"),
    "a huge whole number": (with_field("documents", "9" * 400), "is too large"),
    "a number of 5000 digits": (with_field("documents", "9" * 5000), "is too large"),
    "a huge number": (with_field("nll", "1e999"), "1e999 is not a finite number"),
    "NaN": (with_field("nll", "NaN"), "NaN is not a finite number"),
    "-Infinity": (with_field("seconds", "-Infinity"), "is not a finite number"),
    "a key twice": (WHOLE.replace("{", '{"nll": 1.0, ', 1).encode(), "the key 'nll' is there twice"),
    "half a character": (with_field("line", r'"\ud800"'), "half a character"),
    "half a character in a key": (with_field("\\ud800", "1").replace(rb"\\u", rb"\u"), "half a character"),
    "not UTF-8": (WHOLE.replace("plain", "pl\xe4in").encode("latin-1"), "can't decode byte"),
    "UTF-16": (WHOLE.encode("utf-16"), "can't decode byte"),
    "a NUL": (WHOLE.encode() + b"\0", "Extra data"),
    "100,000 brackets": (b"[" * 100_000, "nested too deep"),
    "100,000 braces": (b'{"a":' * 100_000, "nested too deep"),
    "brackets in a field": (with_field("scheme", '{"name": ' + "[" * 100_000), "nested too deep"),
    "900 closed brackets": (with_field("scheme", '{"name": ' + "[" * 900 + "]" * 900 + "}"), "nested too deep"),
    "40 closed brackets": (with_field("scheme", '{"name": ' + "[" * 40 + "]" * 40 + "}"), "nested too deep"),
    "a list": (b"[]", "must be an object"),
    "a number": (b"3", "must be an object"),
    "nothing": (b"", "Expecting value"),
    "two rows": ((WHOLE + WHOLE).encode(), "Extra data"),
}


def refused(words, said, capsys):
    """The command ends with status 2, nothing on stdout, and one line on stderr that says this."""
    capsys.readouterr()
    with in_memory(), in_time():
        assert main([str(word) for word in words]) == 2
    shown = capsys.readouterr()
    *_, line = shown.err.splitlines()
    assert shown.out == ""
    assert said in line
    assert line.startswith("rope-patch: ")
    assert len(line) < 2200


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_row_that_no_run_wrote(kind, tmp_path, capsys):
    line, said = DAMAGED[kind]
    file = tmp_path / "perplexity.jsonl"
    file.write_bytes(WHOLE.encode() + b"\n" + line + b"\n" + WHOLE.encode() + b"\n")
    before = file.read_bytes()
    with in_time(), pytest.raises(EvaluationError) as caught:
        Rows(file)
    assert f"{file}, line 2, is not a result row (" in str(caught.value)
    assert said in str(caught.value)
    assert "move the file or choose another output" in str(caught.value)
    assert file.read_bytes() == before
    refused(["perplexity", "--lengths", "256", "--output", tmp_path], "line 2, is not a result row", capsys)


COMMANDS = {
    "perplexity": (["--lengths", "256"], "perplexity.jsonl"),
    "passkey": (["--lengths", "256"], "passkey.jsonl"),
    "sweep": (["--target", "2x"], "sweep.jsonl"),
    "search": (["--target", "2x"], "search.jsonl"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_reads_rows(command, tmp_path, capsys):
    words, name = COMMANDS[command]
    for kind in ("text for a number", "100,000 brackets"):
        (tmp_path / name).write_bytes(DAMAGED[kind][0] + b"\n")
        refused([command, *words, "--output", tmp_path], f"{name}, line 1, is not a result row", capsys)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    refused([command, *words, "--output", tmp_path], f"{name}: Is a directory", capsys)
    (tmp_path / name).rmdir()
    os.mkfifo(tmp_path / name)
    refused([command, *words, "--output", tmp_path], f"{name} is not a file", capsys)
    refused([command, *words, "--output", tmp_path / name], f"{name}: File exists", capsys)


@pytest.mark.parametrize("cut", [b"{", b"[" * 100_000, b"\xff", WHOLE.encode()[:-9], b"\0"])
def test_a_last_line_that_was_cut_off_is_no_damage(cut, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(WHOLE.encode() + b"\n" + cut)
    assert len(Rows(file).rows) == 1
    assert file.read_bytes() == WHOLE.encode() + b"\n"


@pytest.mark.parametrize(("part", "number"), list(enumerate(parts(usual=150, hard=3000, size=1000))))
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_rows_are_refused_or_can_be_shown(part, number, count, tmp_path):
    plain = [json.loads(row(length=length, nll_by_document=[2.0] * 12).to_json()) for length in (256, 512)]
    schemes = [{**fields, "line": "pi:factor=2", "scheme": {"name": "pi", "factor": 2.0}} for fields in plain]
    file, whole = tmp_path / "rows.jsonl", dict(enumerate([*plain, *schemes]))

    def holds(rows):
        try:
            file.write_text("".join(json.dumps(fields) + "\n" for fields in rows.values()))
        except (TypeError, ValueError):  # what JSON cannot say
            return
        if read := Rows(file).rows:
            print_table(read, Console(file=io.StringIO(), width=120))
            of_losses(read)

    count("damaged results", explore(damaged(st.just(whole)), holds, number, part))


def test_what_runs_write_is_read():
    assert read_object('{"a": [1, 2.5, null, true], "b": {"c": "ä😀"}, "d": -9223372036854775807}') == {
        "a": [1, 2.5, None, True],
        "b": {"c": "ä😀"},
        "d": -(2**63) + 1,
    }


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1, "a": 2}', "[" * 100_000, "\ufeff{}"])
def test_settings_of_an_output_that_no_run_wrote(content, tmp_path):
    (tmp_path / "options.json").write_text(content, encoding="utf-8")
    with pytest.raises(EvaluationError, match=r"options.json is damaged \(.*; remove it, or choose another output"):
        claim(tmp_path, {"steps": 4})


# --- words -----------------------------------------------------------------------------------------------------------

ODD = {"a NUL": "a\0b", "a byte that is not UTF-8": "a\udcffb", "half a character": "\ud800"}
PATHS = [
    *(f"perplexity --lengths 256 {option}" for option in ("--output", "--model", "--text", "--dataset", "--split")),
    *("perplexity --lengths 256 --scheme", "passkey --lengths 256 --output"),
    *("sweep --target 2x --output", "search --target 2x --output", "compare --encodings rope --output"),
    *("finetune --scheme pi:factor=2 --length 512 --output", "finetune --scheme pi:factor=2 --length 512 --eval-text"),
    *("export", "export recipes/assets/tiny-llama --scheme pi:factor=2 --output", "describe --model", "doctor"),
    *("serve", "serve recipes/assets/tiny-llama --scheme", "plot", "checkpoint", "list", "completion", "perplexity"),
]


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("words", PATHS)
def test_a_word_that_is_no_path(words, kind, capsys):
    if words.split()[0] in ("plot", "checkpoint"):
        pytest.importorskip("matplotlib")
    refused([*words.split(), ODD[kind]], "contains a ", capsys)
    if (last := words.split()[-1]).startswith("--"):
        refused([*words.split()[:-1], f"{last}={ODD[kind]}"], "contains a ", capsys)


NUMBERS = {
    "perplexity --lengths " + "9" * 30: "lengths=9999",
    "perplexity --lengths " + "9" * 400 + "x": "lengths=inf",
    "perplexity --lengths " + "9" * 30 + "x": "lengths=",
    "passkey --lengths 256,1" + "0" * 20: "lengths=1000",
    "perplexity --lengths 256 --seed " + "9" * 400: "seed=9999",
    "perplexity --lengths 256 --documents -" + "9" * 30: "documents=-9999",
    **{f"finetune --scheme plain --length 512 --alpha {value}": "alpha=" for value in ("nan", "inf", "-inf", "1e400")},
}


@pytest.mark.parametrize("words", NUMBERS, ids=lambda words: words[:40])
def test_a_number_that_no_machine_has(words, capsys):
    refused(words.split(), NUMBERS[words], capsys)


def aliases(line: str) -> str:
    """A list of lists of lists, each nine times: 9 to the power of 12 words where they are written out."""
    names = "abcdefghijklm"
    lines = [line.format(name=name, inner=",".join([f"*{inner}"] * 9)) for inner, name in pairwise(names)]
    return "\n".join(["a: &a {k: v}" if "<<" in line else "a: &a [x]", *lines])


YAML = {
    "aliases of aliases": (aliases("{name}: &{name} [{inner}]").encode(), "write the value instead of *a"),
    "merges of merges": (aliases("{name}: &{name} {{<<: [{inner}]}}").encode(), "write the value instead of *a"),
    "itself": (b"a: &a [*a]", "write the value instead of *a"),
    "100,000 brackets": (b"[" * 100_000, "nested too deep"),
    "100,000 braces": (b"a: " + b"{" * 100_000, "nested too deep"),
    "100,000 dashes": (b"- " * 100_000, "nested too deep"),
    "a number of 5000 digits": (b"lengths: " + b"9" * 5000, "not valid YAML"),
    "no date": (b"output: 2020-99-99", "not valid YAML"),
    "a key twice": (b"lengths: 256\nlengths: 512", "'lengths' is there twice"),
    "a list as a key": (b"? [a]\n: b", "not valid YAML"),
    "an object of Python": (b"output: !!python/object/apply:os.getcwd []", "not valid YAML"),
    "a NUL": (b"\0", "not valid YAML"),
    "a NUL in a string": (rb'output: "a\0b"', "output: 'a\\x00b' contains a NUL character"),
    "half a character": (rb'output: "\ud800"', "contains a byte that is not UTF-8"),
    "not UTF-8": (b"output: \xff", "not valid YAML"),
}


@pytest.mark.parametrize("kind", YAML)
def test_settings_that_are_none(kind, tmp_path, capsys):
    content, said = YAML[kind]
    (tmp_path / "c.yaml").write_bytes(content)
    began = time.process_time()
    refused(["perplexity", tmp_path / "c.yaml"], said, capsys)
    assert time.process_time() - began < 20
    (tmp_path / "c.yaml").unlink()
    (tmp_path / "c.yaml").mkdir()
    refused(["perplexity", tmp_path / "c.yaml"], "c.yaml: Is a directory", capsys)


def test_a_folder_of_texts_may_have_any_names(tmp_path):
    for name in (b"caf\xe9.txt", b"a.txt"):
        with open(os.path.join(os.fsencode(tmp_path), name), "w") as file:
            file.write("some text")
    assert sorted(load_text(str(tmp_path))["name"]) == ["a.txt", "caf\ufffd.txt"]


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff", b"[]", b'{"rope_parameters": ' + b"[" * 100_000])
@pytest.mark.parametrize("command", ["describe --model", "doctor", "export --scheme pi:factor=2", "serve"])
def test_a_config_that_is_none(command, content, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes(content)
    if command == "serve":
        pytest.importorskip("uvicorn")
    refused([*command.split(), tmp_path], "config", capsys)
