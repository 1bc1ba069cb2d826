"""The tool of the pictures: what each shows, how it looks, what it refuses."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import matplotlib
import pytest
import torch

from rope_patch import InvalidField
from tests.evaluation.conftest import checkpoint, documents  # noqa: F401  # a fixture
from tests.recipes import run_script
from tools import pictures, position_matrices, scores_by_distance

from .look import check_look, words_of

ROOT = Path(__file__).parents[2]

DRAWN = {
    "sinusoidal": {"length": 16, "dim": [32]},
    "inner_product": {"dim": [8, 16], "length": 512, "training_length": 64},
    "decay_bound": {"base": [100, 10000, 500000], "length": 512, "dim": [16]},
    "wavelengths": {"dim": [16], "schemes": ["yarn:factor=8", "nope"], "training_length": 256},
    "biases": {"schemes": ["alibi", "t5"], "heads": 3, "length": 20},
    "position_maps": {},
}


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_can_be_read(name):
    check_look(pictures.PICTURES[name](**DRAWN[name]))


def test_lines_are_named_and_the_training_length_is_marked():
    words = words_of(pictures.wavelengths(dim=[16], schemes=["yarn:factor=8"]))
    assert " training length" in words
    assert {"base 10,000", "base 10M", "RoPE", "YaRN, factor = 8"} <= set(words)
    assert " training length" not in words_of(pictures.inner_product([8], 512))
    assert " training length" in words_of(pictures.inner_product([8], 512, training_length=64))


def test_a_line_and_its_band_hold_every_value_once():
    figure = pictures.inner_product([8], 1000)
    (line,) = [line for line in figure.axes[0].get_lines() if line.get_label() == "d = 8"]
    values = pictures.mean_inner_products(torch.arange(1, 1001), 8)
    assert line.get_ydata()[:5] == pytest.approx(values[:5].tolist())  # near distances stand alone
    edges = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (edges.min(), edges.max()) == pytest.approx((float(values.min()), float(values.max())))


def test_hidden_pairs_are_blank():
    figure = pictures.position_maps(["window:window=4"], training_length=8, length=16)
    image = figure.axes[0].images[0].get_array()
    assert image.mask[10, 2]  # beyond the window
    assert image.mask[2, 10]  # after the query
    assert not image.mask[10, 9]


def test_the_biases_of_a_checkpoint():
    figure = pictures.biases(model=str(ROOT / "recipes" / "assets" / "tiny-t5"), length=16)
    check_look(figure)
    drawn = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert len(drawn) == 3 * 4
    assert not drawn[-1].mask.any()  # an encoder sees both sides
    assert drawn[0].mask[2, 9]


def test_scores_of_a_checkpoint(checkpoint, tmp_path, capsys):  # noqa: F811
    texts, path = tmp_path / "texts", tmp_path / "picture.png"
    texts.mkdir()
    for document in documents(70, 80, 20):
        (texts / f"{document['name']}.txt").write_text(document["text"])
    check_look(pictures.scores_by_distance(str(checkpoint), str(texts), layer=1))
    words = ["scores_by_distance", "--model", checkpoint, "--text", texts, "--layer", "1"]
    assert run_script(pictures, [*words, "--scheme", "abf:base=50000", "--length", "32", "--output", path]) == 0
    assert path.stat().st_size > 10_000
    assert run_script(pictures, [*words, "--length", "1000"]) == 2
    assert "the longest of 3 has 80" in capsys.readouterr().err


def test_mean_scores_are_printed_over_ranges_of_distances(checkpoint, tmp_path, capsys):  # noqa: F811
    (tmp_path / "text.txt").write_text(documents(70)[0]["text"])
    words = ["--model", checkpoint, "--text", tmp_path / "text.txt", "--length", "20", "--scheme", "rope"]
    assert run_script(scores_by_distance, [*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ranges = [[0, 0], [1, 1], [2, 3], [4, 7], [8, 15], [16, 19]]
    assert [(row["line"], row["distance"]) for row in found] == [(k, r) for k in ("checkpoint", "rope") for r in ranges]
    means = scores_by_distance.mean_scores(
        scores_by_distance.read_layer(str(checkpoint), str(tmp_path / "text.txt"), 0, 20, 1)
    )
    assert found[3]["slow"] == pytest.approx(float(means["slow"][4:8].mean()))
    assert found[9]["slow"] == pytest.approx(found[3]["slow"], abs=1e-5)  # rope is what the checkpoint has
    assert run_script(scores_by_distance, words) == 0
    assert "16 to 19" in capsys.readouterr().out


def test_matrices_are_printed(capsys):
    assert run_script(position_matrices, ["rerope:window=2", "--length", "4"]) == 0
    assert [line.split() for line in capsys.readouterr().out.strip().splitlines()] == [
        ["0", "-", "-", "-"],
        ["1", "0", "-", "-"],
        ["2", "1", "0", "-"],
        ["2", "2", "1", "0"],
    ]
    assert run_script(position_matrices, ["alibi", "--length", "2", "--heads", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [[[0, None], [-slope, 0]] for slope in (1 / 16, 1 / 256)]
    assert run_script(position_matrices, ["alibi", "--heads", "0"]) == 2
    assert "heads=0 is not allowed" in capsys.readouterr().err


def test_the_same_picture_is_the_same_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["inner_product", "--dim", "8", "--length", "64"]
    assert run_script(pictures, words) == run_script(pictures, [*words, "--output", "again.png"]) == 0
    assert capsys.readouterr().out.split() == ["inner_product.png", "again.png"]
    assert Path("inner_product.png").read_bytes() == Path("again.png").read_bytes()
    assert Path("again.png").read_bytes()[:4] == b"\x89PNG"


def test_numbers_and_names_to_read():
    shown = [pictures.number(x) for x in (10, 4096, 10000, 500000, 1e6, 1.5e6, 12.25)]
    assert shown == ["10", "4,096", "10,000", "500,000", "1M", "1.5M", "12.25"]
    assert pictures.name_of("yarn:factor=8.0") == "YaRN, factor = 8"
    assert pictures.name_of("rerope:window=128+logn") == "ReRoPE, w = 128, log-n"


WRONG = {
    "there is no picture 'wavelength'; did you mean 'wavelengths'?": "wavelength",
    "sinusoidal takes no option 'heads'; allowed: base, dim, length": "sinusoidal --heads 2",
    "dim: 2 were given; this picture takes one": "sinusoidal --dim 8,16",
    "dim=7 is not allowed; it must be a multiple of 2 of at least 2": "sinusoidal --dim 7",
    "length=0 is not allowed; it must be a whole number of at least 1": "sinusoidal --length 0",
    "base=0.0 is not allowed; it must be a number of at least 1": "inner_product --base 0",
    "lines: 9 were given; one to 8": "decay_bound --base 1 2 3 4 5 6 7 8 9",
    "there is no scheme 'yran'": "wavelengths --scheme yran:factor=2",
    "it must be a checkpoint with learned biases": f"biases --model {ROOT / 'recipes' / 'assets' / 'tiny-llama'}",
    "heads: 9 were given; one to 8": "biases --heads 9",
    "training_length=1 is not allowed": "position_maps --training-length 1",
    "nowhere/picture.png": "sinusoidal --output nowhere/picture.png",
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_one_clear_line(message, capsys):
    assert run_script(pictures, WRONG[message].split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_too_many_maps():
    with pytest.raises(InvalidField, match="schemes: 13 were given; one to 12"):
        pictures.position_maps(["rope"] * 13)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_every_picture_is_in_the_documentation(name):
    document = (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")
    assert f"images/{name}.png" in document
    assert f"rope-patch plot {name}" in document
    assert 5_000 < (ROOT / "docs" / "images" / f"{name}.png").stat().st_size < 150_000


def test_a_picture_needs_no_pyplot(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # what an import finds where it is not installed
    monkeypatch.delattr(matplotlib, "pyplot", raising=False)
    importlib.reload(pictures).sinusoidal()
