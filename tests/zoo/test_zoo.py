"""docs/families.md agrees with the rows of the last whole run, and the rows with the library."""

import copy
from functools import partial

import pytest
import torch
import transformers

from rope_patch import patch
from tests.families import FAMILIES
from tests.zoo import page, truth
from tests.zoo.__main__ import alone
from tests.zoo.builder import Specimen, model_types, run, specimen, text
from tests.zoo.checks import CHECKS, TOLERANCE, Blind, PlainFails, difference

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
    assert not [name for name, verdict in VERDICTS.items() if verdict in ("WRONG", "FOREIGN")]


@same_version
def test_the_families_of_the_contract_are_right():
    assert {VERDICTS[values["model_type"]] for values in FAMILIES.values()} == {"right"}


@same_version
@pytest.mark.nightly
@pytest.mark.parametrize("part", range(_PARTS))
def test_every_type_is_what_its_row_says(part):
    types = model_types()[part::_PARTS]
    found = {model_type: page.verdict(alone(model_type)) for model_type in types}
    assert {name: verdict for name, verdict in found.items() if verdict[0] != VERDICTS.get(name)} == {}
