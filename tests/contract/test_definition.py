"""Logits equal a float64 model that was written from the definitions alone, by every route through a cache."""

import importlib
import pkgutil

import pytest

from rope_patch import get_scheme, patch
from tests import schemes as oracles
from tests.cases import CASES, fits_rotary
from tests.definition import defined_logits
from tests.families import build
from tests.runs import assert_close, cached_logits, left_padded, logits, positions_of, tokens, usable_length

MODULES = [
    importlib.import_module(f"tests.schemes.{module.name}")
    for module in pkgutil.iter_modules(oracles.__path__)
    if module.name.startswith("test_")
]
DEFINITIONS = {
    spec: definition for module in MODULES for spec, definition in getattr(module, "DEFINITIONS", {}).items()
}


def test_every_registered_scheme_has_a_definition():
    assert {part.name for spec in DEFINITIONS for part in get_scheme(spec).parts()} == {
        name for name, spec in CASES.items() if fits_rotary(spec)
    }


def full(model, ids):
    return logits(model, ids)


def cached_token_by_token(model, ids):
    return cached_logits(model, ids, [1] * ids.shape[1])


def uneven_chunks(model, ids):
    return cached_logits(model, ids, [9, 1, 13, 2, ids.shape[1] - 25])


def left_padded_full(model, ids):
    batch, mask = left_padded([ids, tokens(ids.shape[1] + 5, seed=1)])
    return logits(model, batch, attention_mask=mask, position_ids=positions_of(mask))[:1, 5:]


def left_padded_chunks(model, ids):
    batch, mask = left_padded([ids, tokens(ids.shape[1] + 5, seed=1)])
    return cached_logits(model, batch, [3, 10, 1, ids.shape[1] - 9], mask)[:1, 5:]


PATHS = [full, cached_token_by_token, uneven_chunks, left_padded_full, left_padded_chunks]


@pytest.mark.parametrize("spec", DEFINITIONS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", ["llama", "llama_mha"])
def test_logits_equal_the_definition(model, spec, path):
    scheme = get_scheme(spec)
    ids = tokens(usable_length(scheme)) if path is not full else tokens()
    expected = defined_logits(model, ids, DEFINITIONS[spec])
    with patch(model, scheme):
        assert_close(path(model, ids), expected, 1e-4)


@pytest.mark.parametrize("spec", ["rope", "rerope:window=6", "alibi"])
def test_another_definition_would_be_noticed(spec):
    model = build()
    other = DEFINITIONS["leaky_rerope:window=6,factor=4"]
    with patch(model, spec):
        assert (logits(model, tokens()) - defined_logits(model, tokens(), other)).abs().max() > 1e-2


@pytest.mark.parametrize("attention", ["oracle", "chunked"])
@pytest.mark.parametrize("spec", DEFINITIONS)
def test_the_literal_way_equals_the_definition(llama, spec, attention):
    expected = defined_logits(llama, tokens(), DEFINITIONS[spec])
    with patch(llama, spec, mount="late", attention=attention):
        assert_close(logits(llama, tokens()), expected, 1e-4)
