"""A long text is scored in blocks. So is a short one here, in small blocks, and it means what the definition means."""

import pytest

from rope_patch import get_scheme
from rope_patch.attention.bias import DiagonalTerm, KeyTerm
from rope_patch.attention.tile_kernels import Dense, FlashCPU
from tests.contract.test_definition import DEFINITIONS, patched
from tests.definition import defined_logits
from tests.families import build
from tests.runs import assert_close, logits, tokens

SEGMENTED = [spec for spec in DEFINITIONS if get_scheme(spec).slots & {"segments", "bias"}]


@pytest.fixture
def small_blocks(monkeypatch):
    for term in (KeyTerm, DiagonalTerm):
        monkeypatch.setattr(term, "rows", 16)
    for kernel in (Dense, FlashCPU):
        monkeypatch.setattr(kernel, "band_rows", lambda self, width: 7)


@pytest.mark.parametrize("spec", SEGMENTED)
@pytest.mark.usefixtures("small_blocks")
def test_logits_in_blocks_equal_the_definition(llama, spec):
    ids = tokens(70)
    with patched(llama, spec, attention="segmented") as learned:
        expected = defined_logits(build(), ids, DEFINITIONS[spec], learned)
        assert_close(logits(llama, ids), expected, 1e-4)
