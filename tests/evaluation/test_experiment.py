from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.description import check_types
from rope_patch.evaluation.experiment import Experiment, run
from rope_patch.evaluation.protocols import Request, check_request
from rope_patch.evaluation.specs import scheme_at

from .conftest import documents

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
        ("{lengths: [1], stride: 0}", "stride=0 is not allowed; stride must be at least 1"),
        ("{lengths: [1], tokens_per_document: 1.5}", "tokens_per_document must be a whole number or nothing"),
        ("{lengths: [1], text: a, dataset: b}", "give one of them"),
    ],
)
def test_a_wrong_description_says_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(EvaluationError) as raised:
        Experiment.from_yaml(path)
    assert message in str(raised.value)


def test_a_description_says_all_that_a_protocol_may_be_asked(tmp_path):
    path = tmp_path / "sliding.yaml"
    path.write_text("{lengths: [16, 32], protocol: sliding, stride: 8, tokens_per_document: 100, documents: 3}")
    request = Experiment.from_yaml(path).request
    assert check_request(**request) == Request((16, 32), "sliding", None, 8, 100, 3, 1, 0)


def test_whole_documents_from_end_to_end(tmp_path, checkpoint):
    (tmp_path / "text.txt").write_text(documents(70)[0]["text"])
    settings = {"model": str(checkpoint), "text": str(tmp_path / "text.txt"), "device": "cpu"}
    asked = {"protocol": "sliding", "stride": 8, "tokens_per_document": 50}
    outcome = run(Experiment([16, 32], ["pi:factor=auto"], output=str(tmp_path), **settings, **asked))
    assert [row.scored_tokens for row in outcome.rows] == [49] * 6
    assert len(outcome.results.read_text().splitlines()) == 6
    assert outcome.picture.is_file()


@dataclass(frozen=True)
class Mixed:
    """Hints of every kind that a description may have."""

    number: float | None = None
    several: int | tuple[float, ...] = 5

    def __post_init__(self):
        check_types(self)


def test_a_whole_number_is_a_number_and_unions_are_what_they_say():
    assert Mixed(number=5).number == 5
    assert Mixed(number="2e-5").number == 2e-5
    assert Mixed(several=[0, 0.5]).several == (0, 0.5)
    for wrong in ({"number": True}, {"several": 0.5}, {"several": ["a"]}, {"several": None}):
        (name,) = wrong
        with pytest.raises(EvaluationError, match=f"{name} must be a"):
            Mixed(**wrong)
    with pytest.raises(EvaluationError, match="several must be a whole number or a list, each a number"):
        Mixed(several="a")


def test_references_are_always_among_the_lines():
    assert Experiment([256], ["yarn:factor=2"]).lines == ("plain", "window", "yarn:factor=2")
    assert Experiment([256], ["yarn:factor=2", "plain"]).lines == ("window", "yarn:factor=2", "plain")
    assert Experiment([256], ["yarn:factor=2"], references=False).lines == ("yarn:factor=2",)
