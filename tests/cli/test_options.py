"""Options from YAML and from the command line."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest

from rope_patch.cli import COMMANDS, load, main
from rope_patch.cli.options import Lengths, Measured, Names, Positional, Specs, parse, run
from rope_patch.errors import EvaluationError


@dataclass(kw_only=True)
class Options(Measured):
    lengths: Lengths  # context lengths in tokens
    schemes: Specs = ()  # a line of the table
    only: Names = ()  # these alone
    protocol: Literal["auto", "last"] = "auto"  # which
    learning_rate: float = 0.5  # of the optimizer
    references: bool = True  # whether plain and window are added
    targets: int | None = None  # scored tokens


def options(*words, file=None, text=""):
    if file is not None:
        file.write_text(text)
        words = (str(file), *words)
    return parse(Options, words)


def test_every_kind_of_option():
    found = options(
        *("--lengths", "256,512", "--scheme", "yarn:target=auto", "--scheme=rerope:window=128+logn"),
        *("--only", "a", "b", "--no-references", "--targets", "8", "--learning-rate", "1e-3", "--seed", "3"),
    )
    assert found == Options(
        lengths=(256, 512),
        schemes=("yarn:target=auto", "rerope:window=128+logn"),
        only=("a", "b"),
        references=False,
        targets=8,
        learning_rate=1e-3,
        seed=3,
    )
    for words in (["256", "512"], ["256 512"], ["256, 512"]):
        assert options("--lengths", *words).lengths == (256, 512)
    assert options("--lengths", "1X,2x").lengths == options("--lengths", "1x,2x").lengths


YAML = """
lengths: [64, 128]
schemes: [plain, "pi:target=auto"]
references: false
targets: 4
learning_rate: 1e-4
model: null
"""


def test_a_file_gives_the_same_and_the_command_line_overrules_it(tmp_path):
    found = options(file=tmp_path / "c.yaml", text=YAML)
    expected = Options(
        lengths=(64, 128), schemes=("plain", "pi:target=auto"), references=False, targets=4, learning_rate=1e-4
    )
    assert found == expected
    found = options("--scheme", "ntk:factor=2", "--references", "--lengths=32", file=tmp_path / "c.yaml", text=YAML)
    assert found == dataclasses.replace(expected, lengths=(32,), schemes=("ntk:factor=2",), references=True)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], ["--lengths"]),
        (["--lenghts", "3"], ["'--lenghts'", "did you mean '--lengths'", "--protocol"]),
        (["--lengths", "x2"], ["--lengths", "'x2'", "256,512", "1x,2x"]),
        (["--lengths", "3", "--protocol", "lst"], ["--protocol", "'lst'", "'last'"]),
        (["--lengths", "3", "--targets", "x"], ["--targets", "'x' is not a whole number"]),
        (["--lengths", "3", "--seed"], ["--seed needs a value; write --seed INT"]),
        (["--lengths", "3", "--protocol"], ["--protocol needs a value; write --protocol {"]),
        (["--lengths", "3", "--learning-rate", "fast"], ["--learning-rate", "'fast' is not a number"]),
    ],
)
def test_what_is_wrong_is_named_in_one_line(words, named, capsys):
    with pytest.raises(EvaluationError) as refused:
        parse(Options, words)
    assert all(name in str(refused.value) for name in named), refused.value
    assert "\n" not in str(refused.value)
    assert run(Options, print, words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"rope-patch: {refused.value}\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("lenghts: [3]", ["'lenghts'", "did you mean 'lengths'"]),
        ("[1, 2]", ["mapping"]),
        ("a: b: c", ["not valid YAML"]),
        ("lengths: {a: 1}", ["lengths", "{'a': 1}"]),
        ("lengths: [a]", ["--lengths", "'a'"]),
        ("lengths: [3]\ntargets: many", ["--targets", "'many'"]),
        ("lengths: [3]\nseed: true", ["--seed"]),
        ("", ["--lengths"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named_likewise(text, named, tmp_path):
    with pytest.raises(EvaluationError) as refused:
        options(file=tmp_path / "c.yaml", text=text)
    assert all(name in str(refused.value) for name in named), refused.value


def test_a_file_that_is_not_there_is_one_line(capsys, tmp_path):
    assert run(Options, print, [str(tmp_path / "no.yaml")]) == 2
    assert "no.yaml: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "doctor"])  # tests/doctor/test_command.py
def test_every_help_shows_examples_and_explains_every_option(command, capsys):
    module = load(command)
    assert run(module.Options, module.main, ["--help"], f"rope-patch {command}") == 0
    shown = capsys.readouterr().out
    assert f"rope-patch {command} " in module.__doc__
    assert module.__doc__.split("\n")[0].strip() in shown
    for field in dataclasses.fields(module.Options):
        if "Positional" not in str(field.type) and field.name != "schemes":
            assert f"--{'for' if field.type == 'Readers' else field.name.replace('_', '-')}" in shown
    assert shown.count("(default") + shown.count("(required") + shown.count("(repeatable") + shown.count("(sets") > 0
    assert "None" not in shown
    assert not re.search(r"\(default: (''|\"\")?\)", shown)
    rows = shown.splitlines()
    unexplained = [
        row
        for row, after in pairwise(rows)
        if row.startswith("│ --") and "  " not in row.strip("│ ") and not re.match(r"│ {6,}\w", after)
    ]
    assert unexplained == []
    assert "without it," not in shown
    assert re.findall(r"--\S+ STR\b", shown) == ([] if command != "serve" else ["--api-key STR"])


def test_a_positional_word():
    @dataclass(kw_only=True)
    class Plot:
        kind: Positional[str]  # the picture
        base: float = 2.0  # of the frequencies

    assert parse(Plot, ["biases", "--base", "3"]) == Plot(kind="biases", base=3.0)


@pytest.mark.parametrize(
    "words", [["perplexity", "DIR", "--lengths", "8"], ["perplexity", "--lengths", "8", "--model", "DIR"]]
)
def test_a_checkpoint_may_be_the_first_word(words):
    command, *rest = words
    assert parse(load(command).Options, rest).model == "DIR"


@pytest.mark.parametrize(
    "words", [["DIR", "--scheme", "rope"], ["--model", "DIR", "--scheme", "rope"], ["--scheme", "rope", "--model=DIR"]]
)
def test_a_checkpoint_that_is_a_word_may_be_an_option(words):
    options = parse(load("export").Options, words)
    assert (options.checkpoint, options.scheme) == ("DIR", "rope")


def test_doctor_takes_the_option_too(capsys):
    folder = str(Path(__file__).parents[2] / "recipes" / "assets" / "tiny-llama")
    answers = []
    for words in (["doctor", folder], ["doctor", "--model", folder]):
        assert main(words) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
