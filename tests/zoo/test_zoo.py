"""docs/families.md agrees with the rows of the last whole run, and the rows with the library."""

import pytest
import transformers

from rope_patch import patch
from tests.families import FAMILIES
from tests.zoo import page, truth
from tests.zoo.__main__ import alone
from tests.zoo.builder import model_types, run, specimen, text
from tests.zoo.checks import REROPE, TOLERANCE, WINDOW, difference, touched

ROWS = page.read(page.ROWS)
VERDICTS = {model_type: page.verdict(row)[0] for model_type, row in ROWS.items()}
_PARTS = 24

same_version = pytest.mark.skipif(
    {row["transformers"] for row in ROWS.values()} != {transformers.__version__},
    reason="written with another version of Transformers",
)


def test_the_page_is_made_of_the_rows():
    assert page.PAGE.read_text(encoding="utf-8") == page.page(ROWS.values())


def test_no_row_is_wrong_or_ends_in_a_foreign_error():
    assert set(VERDICTS.values()) <= {"right", "table", "refused", "not built"}


@same_version
def test_the_families_of_the_contract_are_right():
    assert {VERDICTS[values["model_type"]] for values in FAMILIES.values()} == {"right"}


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "helium", "gpt_oss", "modernbert"])
def test_the_truth_agrees_with_one_window_alone(model_type):
    found = specimen(model_type)
    with patch(model := found.fresh(), REROPE) as handle:
        states = run(model, text())
    plain = found.again(found.model.config, "eager")
    for window in (WINDOW - 1, WINDOW, WINDOW + 1):
        with truth.rerope(touched(plain, handle), window):
            assert (difference(run(plain, text()), states) <= TOLERANCE) == (window == WINDOW)


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ({"rerope": 1e-5, "alibi": "refused: a reason"}, ("right", "`alibi`: a reason")),
        ({"rerope": 1e-5, "pads alibi": 0.1}, ("WRONG", "`pads alibi` 0.1")),
        ({"rerope": 1e-5, "pi": "blind: no effect"}, ("WRONG", "`pi` blind: no effect")),
        ({"rerope": 1e-5, "pi": "foreign: KeyError: 'x'"}, ("FOREIGN", "`pi`: KeyError: 'x'")),
        ({"rerope": float("nan")}, ("WRONG", "`rerope` nan")),
        ({"rerope": "refused: a reason; more", "table": 0.0}, ("table", "")),
        ({"rerope": "refused: a reason; more", "table": "refused: another"}, ("refused", "a reason")),
    ],
)
def test_a_row_is_as_good_as_its_worst_check(checks, verdict):
    assert page.verdict({"type": "x", "checks": checks}) == verdict


@same_version
@pytest.mark.parametrize("model_type", ["bert", "opt", "llama", "falcon_h1", "mamba"])
def test_a_row_of_each_verdict_is_found_again(model_type):
    assert page.verdict(alone(model_type))[0] == VERDICTS[model_type]


@same_version
@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
def test_every_type_is_what_its_row_states(part):
    types = model_types()[part::_PARTS]
    found = {model_type: page.verdict(alone(model_type)) for model_type in types}
    assert {name: verdict for name, verdict in found.items() if verdict[0] != VERDICTS.get(name)} == {}
