"""The recipe of retrieval: from options to rows, a table and heat maps."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from rope_patch.cli.options import parse
from rope_patch.evaluation import charts
from rope_patch.evaluation.tables import print_table
from rope_patch.shipped import recipes_folder
from tests.recipes import load_recipe, refuse, run_recipe

from .conftest import LEARNED, folder_of_texts
from .retrieval_rows import row

recipe = load_recipe("passkey")


def main(words):
    return run_recipe("passkey", words)


@pytest.fixture
def texts(tmp_path):
    return folder_of_texts(tmp_path / "texts", 90, 110, 20)


@pytest.fixture
def words(checkpoint, texts, tmp_path):
    """The command line that works; each test breaks one word of it."""

    def make(**changed):
        options = {
            "--model": checkpoint,
            "--task": "spans",
            "--scheme": "rerope:window=8+logn",
            "--lengths": "16,64",
            "--depths": "3",
            "--trials": "2",
            "--span": "6",
            "--text": texts,
            "--output": tmp_path / "out",
            "--device": "cpu",
        }
        options |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
        return [str(word) for name, value in options.items() if value is not None for word in (name, value)]

    return make


def test_spans_from_end_to_end(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(words()) == 0
    out = capsys.readouterr().out
    for name in ("plain checkpoint", "sliding window", "ReRoPE, w = 8, log-n", "synthetic", "nothing hidden"):
        assert name in out
    assert (tmp_path / "out" / "spans.png").stat().st_size > 20_000
    written = [json.loads(line) for line in (tmp_path / "out" / "spans.jsonl").read_text().splitlines()]
    assert len(written) == 3 * 2 * 3
    assert main([*words(), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert sorted(again, key=lambda row: row["length"]) == written  # the second run measured nothing


def test_the_passkey_from_end_to_end(words, tmp_path, capsys):
    assert main([*words(task="passkey", text=None, lengths="320", depths="0,1", batch_size=2), "--no-references"]) == 0
    captured = capsys.readouterr()
    assert "five-digit keys" in captured.out
    assert "farther than L" in captured.out
    assert "nothing hidden" not in captured.out  # the passkey has no control
    assert len((tmp_path / "out" / "passkey.jsonl").read_text().splitlines()) == 2


def test_a_checkpoint_that_finds_no_key_within_its_training_length_is_said_to_prove_nothing(
    words, checkpoint, tmp_path, capsys
):
    config = json.loads((checkpoint / "config.json").read_text())
    longer = shutil.copytree(checkpoint, tmp_path / "longer")
    (longer / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    within = words(task="passkey", text=None, model=longer, lengths="320", depths="0,1", trials=1)
    assert main([*within, "--no-references"]) == 0
    assert "this checkpoint cannot do the task" in capsys.readouterr().err


def test_lengths_beyond_the_training_length_alone_do_not_show_that_a_checkpoint_cannot_do_the_task(words, capsys):
    beyond = words(task="passkey", text=None, lengths="640", depths="0,1", trials=1)
    assert main([*beyond, "--no-references"]) == 0
    assert "cannot do the task" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["passkey_tiny", "passkey_llama"])
def test_the_configs_are_options(name):
    options = parse(recipe.Options, [str(recipes_folder() / "configs" / f"{name}.yaml")])
    assert options.task == ("spans" if name == "passkey_tiny" else "passkey")
    assert options.schemes[:2] == ("plain", "window")
    assert len(recipe.shares(options.depths)) == (5 if name == "passkey_tiny" else 10)


@pytest.mark.parametrize(
    ("words", "depths"),
    [
        (["5"], [0, 0.25, 0.5, 0.75, 1]),
        (["1"], [0.5]),
        (["0,0.5,1"], [0, 0.5, 1]),
        (["0", "0.1"], [0, 0.1]),
        (["0.25"], [0.25]),
    ],
)
def test_depths_are_a_number_or_a_list(words, depths):
    assert recipe.shares(words) == depths


COMPLAINTS = {
    "there is no scheme 'yran'; did you mean 'yarn'": {"scheme": "yran:factor=2"},
    "lengths 64, 16: they must ascend": {"lengths": "64,16"},
    "not a list of lengths": {"lengths": "16;32"},
    "depths 'deep': how many, such as 5": {"depths": "deep"},
    "depths 0, 2: shares of the context": {"depths": "0,2"},
    "depths 0.5, 0.1: shares of the context": {"depths": "0.5,0.1"},
    "trials=0": {"trials": 0},
    "batch_size=0": {"batch_size": 0},
    "span=3 is not allowed": {"span": 3},
    "passkeys": {"task": "passkeys"},
    "length 8: a span of 6 tokens twice": {"lengths": "8"},
    "the longest of 3 has 110": {"lengths": "16,128"},
    "nowhere.txt": {"text": "nowhere.txt"},
    "there is no checkpoint './nowhere'": {"model": "./nowhere"},
    "length 64: the question of task 'passkey'": {"task": "passkey", "text": None, "lengths": "64"},
    "the filler of task 'passkey' is part of it": {"task": "passkey"},
}


@pytest.mark.parametrize("message", COMPLAINTS)
def test_wrong_input_is_one_clear_line(message, words, capsys):
    refuse("passkey", words(**COMPLAINTS[message]), message, capsys)


def test_a_length_that_is_too_short_is_found_before_the_model_is_loaded(words, capsys, monkeypatch):
    monkeypatch.setattr("rope_patch.saving.loading.load_model", None)
    assert main(words(lengths="8,64")) == 2
    assert "needs a length of at least" in capsys.readouterr().err


def test_a_checkpoint_saved_under_a_scheme_is_measured_without_it(words, saved, capsys):
    assert main([*words(), "--json"]) == 0
    before = [row["nll"] for row in json.loads(capsys.readouterr().out)]
    assert main([*words(model=saved), "--json"]) == 0
    captured = capsys.readouterr()
    assert [row["nll"] for row in json.loads(captured.out)] == before
    assert "saved under yarn" in captured.err


def test_what_a_checkpoint_learned_is_measured_with_its_scheme(words, checkpoint, trained, tmp_path, capsys):
    def measured(folder):
        assert main([*words(model=folder, output=tmp_path / folder.name, scheme=LEARNED), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        return [row["nll"] for row in rows if row["scheme"]["name"] == "compose"]

    learned, fresh = measured(trained), measured(checkpoint)
    assert len(learned) == len(fresh) == 6
    assert all(abs(a - b) > 1e-3 for a, b in zip(learned, fresh, strict=True))


# --- what is shown ---------------------------------------------------------------------------------------------------


def rows(lines=("plain", "window", "yarn:target=auto"), control=0.25):
    """A cell is 60 percent where it is near, 30 where it is far, and 0 at 1024 tokens and depth 0."""
    made = []
    for line in lines:
        for length in (256, 1024):
            for depth in (0.0, 0.5, 1.0):
                distance = round((1 - depth) * (length - 64)) + 8
                accuracy = 0.0 if (length, depth) == (1024, 0.0) else 0.6 if distance < 256 else 0.3
                cell = {"length": length, "depth": depth, "distance": distance, "accuracy": accuracy}
                made.append(row(line=line, control_accuracy=control, **cell))
    return made


def test_means_are_over_the_depths_that_the_table_names(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    print_table(rows(), what="tokens")
    text = capsys.readouterr().out
    assert "tiny, L = 256: percent of tokens" in text
    shown = [line.replace("│", " ").split()[-2:] for line in text.splitlines() if " plain checkpoint " in line]
    assert shown == [["60", "30"], ["-", "15"], ["25", "25"]]


@pytest.mark.parametrize("control", [0.25, None])
def test_every_cell_of_every_map_is_named(control):
    figure = charts.figure(rows(control=control), what="tokens")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["plain checkpoint", "sliding window", "YaRN"]
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shown == ["0%", "50%", "100%", *(["nothing hidden"] if control else [])]
    below = ["25", "25"] if control else []
    for axes in figure.axes:
        assert [text.get_text() for text in axes.texts] == ["60", "0", "60", "30", "60", "60", *below]
        (image,) = axes.images
        assert image.get_clim() == (0, 100)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1L\n256", "4L\n1024"]
        (steps,) = [patch for patch in axes.patches if hasattr(patch, "get_data")]
        assert np.array_equal(steps.get_data().values, [-0.5, 1.5])  # none of the first column, two of the second
        assert axes.lines[0].get_xdata()[0] == 0.5  # L is the first of the two lengths


def test_many_schemes_stay_inside_the_picture():
    lines = ("plain", "window", *(f"rerope:window={w}" for w in (32, 64, 96, 128, 160)))
    figure = charts.figure(rows(lines=lines), what="tokens")
    figure.draw_without_rendering()
    for axes in figure.axes:
        place = axes.get_position()
        assert 0 <= place.x0 < place.x1 <= 1
        assert 0 < place.y0 < place.y1 < 1
