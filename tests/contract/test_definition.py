"""Logits equal a float64 model that was written from the definitions alone, by every route through a cache."""

import contextlib
import dataclasses
import importlib
import pkgutil

import pytest
import torch

from rope_patch import get_scheme, list_schemes, patch
from tests import schemes as oracles
from tests.cases import VARIANTS
from tests.definition import defined_logits, learned_arrays
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
    defined = {part.name for spec in DEFINITIONS for part in get_scheme(spec).parts()}
    missing = set(list_schemes()) - defined
    assert not missing, f"add a line of {missing} to DEFINITIONS in the tests/schemes/test_<file>.py of each"
    assert set(VARIANTS) <= DEFINITIONS.keys()


@contextlib.contextmanager
def patched(model, spec, **options):
    """Patch a model and give the arrays that it has learned. They may be alike in all layers, so those of later layers
    are scaled first: a layer that read the arrays of another would be noticed.
    """
    with patch(model, spec, **options):
        with torch.no_grad():
            for index, layer in enumerate(model.model.layers):
                for name, parameter in layer.named_parameters():
                    if ".rope_patch." in name:
                        parameter.mul_(1 + index / 2)
        yield learned_arrays(model)


def cached_token_by_token(model, ids):
    return cached_logits(model, ids, [*[1] * 12, ids.shape[1] - 12])


def uneven_chunks(model, ids):
    return cached_logits(model, ids, [9, 1, 13, 2, ids.shape[1] - 25])


def left_padded_full(model, ids):
    batch, mask = left_padded([ids, tokens(ids.shape[1] + 5, seed=1)])
    return logits(model, batch, attention_mask=mask, position_ids=positions_of(mask))[:1, 5:]


def left_padded_chunks(model, ids):
    batch, mask = left_padded([ids, tokens(ids.shape[1] + 5, seed=1)])
    return cached_logits(model, batch, [3, 10, 1, ids.shape[1] - 9], mask)[:1, 5:]


PATHS = [cached_token_by_token, uneven_chunks, left_padded_full, left_padded_chunks]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", DEFINITIONS)
@pytest.mark.parametrize("family", ["llama", "llama_mha"])
def test_logits_equal_the_definition(model, family, spec):
    plain, definition = build(family), DEFINITIONS[spec]
    ids = tokens(usable_length(model, spec))
    with patched(model, spec) as learned:
        expected = defined_logits(plain, tokens(), definition, learned)
        assert_close(logits(model, tokens()), expected, 1e-4)
        if ids.shape != tokens().shape:
            expected = defined_logits(plain, ids, definition, learned)
        for path in PATHS:
            assert_close(path(model, ids), expected, 1e-4, path.__name__)


@pytest.mark.parametrize(
    "spec", ["rope", "rerope:window=6", "alibi", "shaw:max_distance=6", "urpe:max_distance=12", "sinusoidal"]
)
def test_another_definition_would_be_noticed(llama, spec):
    other = defined_logits(build(), tokens(), DEFINITIONS["leaky_rerope:window=6,factor=4"])
    with patched(llama, spec):
        assert (logits(llama, tokens()) - other).abs().max() > 1e-2


@pytest.mark.parametrize("spec", DEFINITIONS)
def test_every_part_of_a_definition_would_be_missed(llama, spec):
    definition = DEFINITIONS[spec]
    with patched(llama, spec) as learned:
        found = logits(llama, tokens())
    for field in dataclasses.fields(definition):
        if getattr(definition, field.name) != field.default:
            without = dataclasses.replace(definition, **{field.name: field.default})
            other = defined_logits(build(), tokens(), without, learned)
            assert (found - other).abs().max() > 1e-2, field.name


@pytest.mark.parametrize("spec", DEFINITIONS)
def test_every_way_to_score_equals_the_definition(llama, spec):
    with patched(build(), spec) as learned:
        expected = defined_logits(llama, tokens(), DEFINITIONS[spec], learned)
    for attention in ("oracle", "chunked", "segmented"):
        with patched(llama, spec, mount="late", attention=attention):
            assert_close(logits(llama, tokens()), expected, 1e-4, attention)
