from __future__ import annotations

from pathlib import Path

import pytest

from rope_patch import InvalidField
from rope_patch.cli import main
from rope_patch.plots.command import PICTURES, draw
from tests.evaluation.conftest import checkpoint, documents  # noqa: F401  # a fixture

from .look import check_look

ROOT = Path(__file__).parents[2]
SMALL = {
    "sinusoidal": "--dim 8 --length 16",
    "inner_product": "--dim 8 --dim 16 --length 64 --training-length 16",
    "wavelengths": "--dim 16 --base 10000 --base 500000 --scheme pi:factor=4 --training-length 64",
    "decay_bound": "--dim 8 --length 64 --base 100",
    "biases": "--scheme alibi --scheme sandwich:embedding_dim=8 --heads 2 --length 8",
    "position_maps": "--training-length 8 --length 24 --scheme rerope:window=4 --scheme dca",
}


@pytest.mark.parametrize("name", SMALL)
def test_pictures_by_command(name, tmp_path, capsys):
    path = tmp_path / "picture.png"
    assert main(["plot", name, *SMALL[name].split(), "--output", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_scores_of_a_checkpoint_by_command(checkpoint, tmp_path, capsys):  # noqa: F811
    texts, path = tmp_path / "texts", tmp_path / "picture.png"
    texts.mkdir()
    for document in documents(70, 80, 20):
        (texts / f"{document['name']}.txt").write_text(document["text"])
    words = ["plot", "scores_by_distance", "--model", str(checkpoint), "--text", str(texts), "--layer", "1"]
    assert main([*words, "--output", str(path)]) == 0
    assert path.stat().st_size > 10_000
    assert main([*words, "--scheme", "abf:base=50000", "--length", "32", "--output", str(path)]) == 0
    assert main([*words, "--length", "1000"]) == 2
    assert "the longest of 3 has 80" in capsys.readouterr().err


def test_the_biases_of_a_checkpoint():
    figure = draw("biases", {"model": str(ROOT / "recipes" / "assets" / "tiny-t5"), "length": 16})
    check_look(figure)
    drawn = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert len(drawn) == 3 * 5
    assert not drawn[-1].mask.any()  # an encoder sees both sides
    assert drawn[0].mask[2, 9]


def test_the_default_picture_is_where_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "sinusoidal"]) == 0
    assert (tmp_path / "sinusoidal.png").is_file()


WRONG = {
    "there is no picture 'wavelength'; did you mean 'wavelengths'?": ["wavelength"],
    "sinusoidal takes no option 'heads'; allowed: base, dim, length": ["sinusoidal", "--heads", "2"],
    "dim: 2 were given; this picture takes one": ["sinusoidal", "--dim", "8", "--dim", "16"],
    "there is no scheme 'yran'": ["wavelengths", "--scheme", "yran:factor=2"],
    "it must be a checkpoint with learned biases": [
        "biases",
        "--model",
        str(ROOT / "recipes" / "assets" / "tiny-llama"),
    ],
    "nowhere/picture.png": ["sinusoidal", "--output", "nowhere/picture.png"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_one_clear_line(message, capsys):
    assert main(["plot", *WRONG[message]]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_the_help_names_every_picture(capsys):
    with pytest.raises(SystemExit):
        main(["plot", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in PICTURES)
    with pytest.raises(InvalidField):
        draw("", {})


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_is_in_the_documentation(name):
    document = (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")
    assert f"images/{name}.png" in document
    assert f"rope-patch plot {name}" in document
    assert 5_000 < (ROOT / "docs" / "images" / f"{name}.png").stat().st_size < 150_000
