"""Float32 weights under autocast: queries and keys that were rotated or normed are float32, values are not."""

import pytest
import torch
from transformers import DynamicCache

from rope_patch import get_scheme, patch
from tests.cases import ALL, ROUTES
from tests.families import RUN
from tests.runs import cached_logits, gradients, logits, tokens, usable_length

LONG = 64
"""Beyond what the engine scores in one small dense block in these tests."""


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def relative_error(found, expected):
    assert found.isfinite().all()
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("spec", ALL)
def test_long_texts_and_their_caches(llama, spec):
    patch(llama, spec)
    ids = tokens(LONG)
    expected = logits(llama, ids)
    with autocast():
        assert relative_error(logits(llama, ids), expected) < 0.1
        if not get_scheme(spec).length_dependent:
            assert relative_error(cached_logits(llama, ids, (LONG - 3, 1, 1, 1)), expected) < 0.1


@pytest.mark.parametrize("length", [5, LONG])
def test_a_cache_holds_keys_in_the_dtype_of_its_values(llama, length):
    patch(llama, "rerope", window=6)
    cache = DynamicCache(config=llama.config)
    with autocast(), torch.no_grad():
        llama(tokens(length), past_key_values=cache)
    for layer in cache.layers:
        assert layer.keys.dtype == layer.values.dtype == torch.bfloat16


@pytest.mark.parametrize("spec", ROUTES)
def test_gradients_of_long_texts(llama, spec):
    patch(llama.train(), spec)
    expected = gradients(llama, tokens(LONG))
    with autocast():
        found = gradients(llama, tokens(LONG))
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient) < 0.25, name


@pytest.mark.parametrize("family", RUN)
@pytest.mark.parametrize("spec", ["rerope:window=6+logn:training_length=8"])
def test_families_that_norm_queries_and_keys_or_do_not(model, spec):
    ids = tokens(usable_length(model, spec))
    patch(model, spec)
    with autocast():
        full = logits(model, ids)
        assert relative_error(cached_logits(model, ids, (len(ids[0]) - 2, 1, 1)), full) < 0.1
