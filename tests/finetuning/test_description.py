"""What a fine-tuning is described by."""

from __future__ import annotations

from pathlib import Path

import pytest

from rope_patch.errors import EvaluationError
from rope_patch.finetuning.description import FineTuning

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"


def of(**changed):
    return FineTuning(**{"length": 1024, "schemes": ("yarn:factor=auto",), **changed})


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("finetune*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_a_description(path):
    assert FineTuning.from_yaml(path).length > 0


@pytest.mark.parametrize(
    ("length", "expected"),
    [(128, (256,)), (256, (256,)), (512, (256, 512)), (700, (256, 512, 700)), (1024, (256, 512, 1024))],
)
def test_lengths_that_are_measured(length, expected):
    assert of(length=length).measured_lengths(256) == expected


def test_a_folder_is_the_same_run_by_any_path(monkeypatch, tmp_path):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    relative, absolute = of(model="model"), of(model=str(tmp_path / "model"))
    assert relative.identity == absolute.identity
    assert of(model="some/model").checkpoint == "some/model"


WRONG = {
    "must be a multiple": {"evaluate_every": 15},
    "learning_rate=inf is not allowed": {"learning_rate": float("inf")},
    "no schemes were given": {"schemes": ()},
    "'pi:factor=2' is there twice": {"schemes": ("pi:factor=2", "pi:factor=2")},
    "text and dataset are both given": {"text": "a", "dataset": "b"},
    "batch_size=0 is not allowed": {"batch_size": 0},
    "precision='float16' is not allowed": {"precision": "float16"},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_refused(message):
    with pytest.raises(EvaluationError, match=message):
        of(**WRONG[message])
