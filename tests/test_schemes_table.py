"""The families in `rope-patch list` are those that the mounts support."""

from __future__ import annotations

import json

import pytest

from rope_patch import RopePatchError, list_schemes, patch
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
        patch(model, spec, allow_untrained=True).remove()
    except RopePatchError:
        return False
    return True


@pytest.mark.parametrize("name", list_schemes())
def test_the_families_of_the_table_are_those_that_take_the_scheme(name, capsys):
    assert main(["list", name, "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["families"] == [style for style, build in STYLES.items() if takes(build(), CASES[name])]
