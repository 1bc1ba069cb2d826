"""The families in `rope-patch list` are those that the mounts support."""

from __future__ import annotations

import json

import pytest

from rope_patch import RopePatchError, patch
from rope_patch.cli import main
from tests import families
from tests.cases import CASES
from tests.models import absolute_families, t5_families

STYLES = {
    "Llama": families.build,
    "Baichuan": lambda: families.build("baichuan_alibi"),
    "T5": t5_families.build,
    "BERT": lambda: absolute_families.build("bert"),
}


def takes(model, spec):
    try:
        patch(model, spec).remove()
    except RopePatchError:
        return False
    return True


@pytest.mark.parametrize("style", STYLES)
def test_the_families_of_the_table_are_those_that_take_the_scheme(style, capsys):
    assert main(["list", "--json"]) == 0
    said = {entry["name"] for entry in json.loads(capsys.readouterr().out) if style in entry["families"]}
    model = STYLES[style]()
    assert said == {name for name, spec in CASES.items() if takes(model, spec)}
