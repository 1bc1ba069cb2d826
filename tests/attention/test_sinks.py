"""Sinks take their part in the softmax, as gpt-oss defines them."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from rope_patch import patch
from rope_patch.attention.executors import chunked, reference
from tests.attention.test_segmented import inputs_of
from tests.families import build
from tests.runs import LENGTH, assert_close, cached_logits, logits, tokens

SINKS = torch.tensor([-1.0, 0.5, 2.0, 4.0], dtype=torch.float64)


def call(spec):
    """A call of 20 tokens with sinks, whose keys two heads share."""
    inputs, _ = inputs_of(spec, [[0] * 20] * 2, 20, 20)
    return dataclasses.replace(inputs, sinks=SINKS, groups=None)


@pytest.mark.parametrize("executor", [reference, chunked], ids=["reference", "chunked"])
def test_attention_with_sinks_is_that_of_transformers(executor, monkeypatch):
    monkeypatch.setattr(chunked, "SCORES_PER_BLOCK", 300)
    inputs = call(None)
    (branch,), hidden = inputs.branches, torch.ones(20, 20, dtype=torch.bool).triu(1)
    module = SimpleNamespace(sinks=SINKS, num_key_value_groups=2, training=False)
    mask = torch.zeros(20, 20, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    theirs, _ = eager_attention_forward(module, branch.query, branch.key, inputs.value, mask, inputs.scaling)
    torch.testing.assert_close(executor.attend(inputs)[0].transpose(1, 2), theirs)


def test_every_region_shares_the_softmax_with_the_sink():
    inputs = call("rerope:window=6")
    near, far = (
        [x.numpy() for x in (branch.query, branch.key.repeat_interleave(2, dim=1))] for branch in inputs.branches
    )
    m, n = np.arange(20)[:, None], np.arange(20)[None]
    products = [query @ key.swapaxes(-1, -2) for query, key in (near, far)]
    scores = np.exp(inputs.scaling * np.where(m - n < 6, *products)) * (m >= n)
    weights = scores / (scores.sum(-1, keepdims=True) + np.exp(SINKS.numpy())[:, None, None])
    np.testing.assert_allclose(reference.attend(inputs)[1].numpy(), weights, atol=1e-12)


@pytest.mark.parametrize("attention", ["auto", "oracle", "chunked", "segmented"])
def test_a_model_with_sinks_keeps_them(attention):
    model = build("gpt_oss")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=1.0)
    expected = logits(model, tokens())
    with patch(model, "rerope", window=LENGTH, attention=attention):
        assert_close(logits(model, tokens()), expected)
        assert_close(cached_logits(model, tokens(), [17, 1, LENGTH - 18]), expected)
