"""The recipe of RULER: from options to rows, a table, heat maps and what they do not mean."""

from __future__ import annotations

import json
import sys

import pytest

from rope_patch.cli.options import parse
from rope_patch.evaluation import charts
from rope_patch.evaluation.row import Row
from rope_patch.evaluation.tasks import ruler
from rope_patch.shipped import recipes_folder
from tests.recipes import load_recipe, refuse, run_recipe

from .conftest import byte_tokenizer, tiny_llama

recipe = load_recipe("ruler")


def main(words):
    return run_recipe("ruler", words)


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory):
    """Trained, as its config has it, at 1024 tokens."""
    folder = tmp_path_factory.mktemp("tiny") / "long"
    model = tiny_llama()
    model.config.max_position_embeddings = 1024
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def words(long_checkpoint, tmp_path):
    """The command line that works; each test breaks one word of it."""

    def make(**changed):
        options = {
            "--model": long_checkpoint,
            "--scheme": "yarn:target=auto",
            "--lengths": "1024,1100",
            "--tasks": "fwe",
            "--samples": "2",
            "--output": tmp_path / "out",
            "--device": "cpu",
        }
        options |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
        return [str(word) for name, value in options.items() if value is not None for word in (name, value)]

    return make


def test_from_end_to_end(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(words()) == 0
    captured = capsys.readouterr()
    for name in ("plain checkpoint", "sliding window", "YaRN", "fwe", "means nothing", "0 ± 0", "L = 1024"):
        assert name in captured.out
    assert "task fwe means nothing here: within its training length this checkpoint gives 0%" in captured.err
    assert (tmp_path / "out" / "ruler.png").stat().st_size > 10_000
    written = [json.loads(line) for line in (tmp_path / "out" / "ruler.jsonl").read_text().splitlines()]
    assert len(written) == 3 * 2
    assert main([*words(), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert sorted(again, key=lambda row: row["length"]) == written  # the second run measured nothing


def test_beyond_the_training_length_alone_nothing_is_known(words, checkpoint, capsys):
    assert main([*words(model=checkpoint, lengths="1024", samples=1, scheme="plain"), "--no-references"]) == 0
    captured = capsys.readouterr()
    assert "no length within L = 16 was measured" in captured.err
    assert "means nothing" not in captured.out
    assert "│ 0    │" in captured.out  # one sample has no standard error


def test_the_heat_map_names_every_cell_and_what_means_nothing():
    scores = {("vt", 8): 0.01, ("vt", 32): 0.0, ("cwe", 8): 0.4, ("cwe", 32): 0.25}
    rows = [
        Row(line="plain", model="folder/tiny", training_length=16, task=task, length=length, score=score)
        for (task, length), score in scores.items()
    ]
    figure = charts.figure(rows, what="the answers to RULER's tasks")
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "plain checkpoint"
    assert [text.get_text() for text in axes.texts] == ["1", "0", "40", "25"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["vt\n(means nothing)", "cwe"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.5L\n8", "2L\n32"]
    assert axes.lines[0].get_xdata()[0] == 0.5
    caption = figure._supxlabel.get_text().replace("\n", " ")
    assert "cannot do within L means nothing" in caption
    assert caption.startswith("tiny, L = 16: percent of the answers to RULER's tasks.")


@pytest.mark.parametrize("name", ["ruler", "ruler_smollm2"])
def test_the_configs_are_options(name):
    options = parse(recipe.Options, [str(recipes_folder() / "configs" / f"{name}.yaml")])
    assert options.chat
    assert options.seed == 42
    assert options.tasks == ("niah_single_1", "vt", "cwe", "fwe")


COMPLAINTS = {
    "there is no scheme 'yran'; did you mean 'yarn'": {"scheme": "yran:factor=2"},
    "lengths 1100, 1024: they must ascend": {"lengths": "1100,1024"},
    "samples=0": {"samples": 0},
    "texts of RULER's tasks are part of them": {"text": "book.txt"},
    "niah_single_2": {"tasks": "niah_single_2"},
    "length 512: the shortest prompt of task 'fwe'": {"lengths": "512"},
    "there is no checkpoint './nowhere'": {"model": "./nowhere"},
}


@pytest.mark.parametrize("message", COMPLAINTS)
def test_wrong_input_is_one_clear_line(message, words, capsys):
    refuse("ruler", words(**COMPLAINTS[message]), message, capsys)


def test_what_is_missing_is_found_before_the_model_is_loaded(words, capsys, monkeypatch):
    monkeypatch.setattr("rope_patch.saving.loading.load_model", None)
    assert main([*words(), "--chat"]) == 2
    assert "no chat template" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    monkeypatch.setattr(ruler, "_words", ruler._words.__wrapped__)  # without what an earlier test read
    assert main(words(tasks="cwe")) == 2
    assert 'needs wonderwords: pip install ".[ruler]" in a checkout of rope_patch' in capsys.readouterr().err
