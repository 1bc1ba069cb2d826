from __future__ import annotations

from pathlib import Path

import pytest

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.experiment import Experiment
from rope_patch.evaluation.specs import scheme_at

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"


def test_the_demo_parses_and_shows_what_it_must():
    demo = Experiment.from_yaml(CONFIGS / "demo.yaml")
    assert [length // 256 for length in demo.lengths] == [1, 2, 4, 8, 16]
    assert len(demo.lines) >= 8
    for length in demo.lengths:
        names = [getattr(scheme_at(line, length, 256), "name", "plain") for line in demo.lines]
        assert {"plain", "window", "pi", "ntk", "yarn", "rerope", "compose", "self_extend"} <= set(names)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("lenghts: [256]", "unknown key 'lenghts'; did you mean 'lengths'"),
        ("schemes: [plain]", "says no 'lengths'"),
        ("- a", "holds no mapping"),
        ("a: [", "is not YAML"),
        ("lengths: 256", "lengths=256 is not allowed; lengths must be a list, each a whole number"),
        ("lengths: [a]", "lengths must be a list, each a whole number"),
        ("{lengths: [1], schemes: [{yarn: 2}]}", "schemes must be a list, each a text"),
        ("{lengths: [1], targets: many}", "targets='many' is not allowed; targets must be a whole number or nothing"),
        ("{lengths: [1], seed: true}", "seed=True is not allowed"),
        ("{lengths: [1], documents: 0}", "documents=0 is not allowed"),
        ("{lengths: [1], text: a, dataset: b}", "give one of them"),
    ],
)
def test_a_wrong_description_says_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(EvaluationError) as raised:
        Experiment.from_yaml(path)
    assert message in str(raised.value)


def test_references_are_always_among_the_lines():
    assert Experiment([256], ["yarn:factor=2"]).lines == ("plain", "window", "yarn:factor=2")
    assert Experiment([256], ["yarn:factor=2", "plain"]).lines == ("window", "yarn:factor=2", "plain")
    assert Experiment([256], ["yarn:factor=2"], references=False).lines == ("yarn:factor=2",)
