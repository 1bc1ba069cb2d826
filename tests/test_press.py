"""A press that evicts cached keys, as SnapKV does, beside a patch: the keys that stay keep their positions.

A small one of these tests, in the form of kvpress: a forward hook on each attention module that looks at the last
queries of the prompt, and keeps in the cache the keys that they look at most.
"""

from __future__ import annotations

import functools
import itertools
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rope_patch import CachedKeys, patch
from rope_patch.models.arguments import cache_in
from tests.definition import Definition, defined_logits
from tests.families import build
from tests.runs import assert_close, positions_of

TINY = Path(__file__).parents[1] / "recipes" / "assets" / "tiny-llama"
FACTOR, WINDOW = 4.0, 20
SPECS = {"yarn": f"yarn:factor={FACTOR}", "rerope": f"rerope:window={WINDOW}"}


def yarn_frequencies(theta, length, trained):
    """What turns 32 times or more within L stays, what turns once or less is divided, with a ramp between."""
    half = len(theta)
    base = theta[1] ** -half if half > 1 else 1.0

    def place(turns):
        return half * np.log(trained / (turns * 2 * np.pi)) / np.log(base)

    low, high = max(np.floor(place(32)), 0), min(np.ceil(place(1)), 2 * half - 1)
    ramp = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0, 1)
    return theta * (1 - ramp) + theta / FACTOR * ramp


def definition_of(name, trained, bias):
    if name == "rerope":
        return Definition(distance=lambda m, n: np.minimum(m - n, WINDOW), bias=bias)
    frequencies = functools.partial(yarn_frequencies, trained=trained)
    return Definition(frequencies=frequencies, temperature=0.1 * np.log(FACTOR) + 1, bias=bias)


@contextmanager
def snap(model, keep, observed=8, kernel=5):
    """Within the block each forward over a prompt leaves `keep` keys of each head in the cache; yields which they were.

    Those of the last `observed` queries always stay; of the others those with the largest sum of attention weights of
    these queries, over the heads that share the keys, after a mean over `kernel` neighbours.
    """
    kept = {}

    def press(module, args, given, output):
        layer, states = cache_in(given).layers[module.layer_idx], given["hidden_states"][:, -observed:]
        keys = layer.keys if not isinstance(layer.keys, CachedKeys) else layer.keys.plain()
        rows, heads, length, width = keys.shape
        queries = module.q_proj(states).view(rows, states.shape[1], -1, width).transpose(1, 2)
        cos, sin = (table[:, -observed:].expand(rows, -1, -1) for table in given["position_embeddings"])
        queries, _ = apply_rotary_pos_emb(queries, queries, cos, sin)
        scores = queries.unflatten(1, (heads, -1)) @ keys[:, :, None].transpose(-1, -2) * module.scaling
        visible = torch.ones(states.shape[1], length).tril(length - states.shape[1]).bool() & seen[:, None, None, None]
        votes = scores.masked_fill(~visible, -torch.inf).softmax(-1).sum((2, 3))
        votes = torch.nn.functional.avg_pool1d(votes, kernel, padding=kernel // 2, stride=1)
        votes = votes.masked_fill(~seen[:, None], -1)  # pads go first
        votes[..., -observed:] = torch.inf
        places = votes.topk(min(keep, length)).indices.sort().values
        kept[module.layer_idx] = places
        places = places[..., None].expand(-1, -1, -1, width)
        layer.keys, layer.values = layer.keys.gather(2, places), layer.values.gather(2, places)

    def remember(module, args, given):
        nonlocal seen
        mask = given.get("attention_mask")
        seen = (torch.ones_like(given["input_ids"]) if mask is None else mask).bool()

    seen = torch.empty(0)
    hooks = [model.register_forward_pre_hook(remember, with_kwargs=True)]
    hooks += [each.self_attn.register_forward_hook(press, with_kwargs=True) for each in model.model.layers]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def pressed(model, ids, mask, prompt, keep):
    """Logits of what follows a prompt whose keys were pressed, five tokens at once, then one by one; what stayed."""
    cache, places = DynamicCache(config=model.config), positions_of(mask)
    with snap(model, keep) as kept:
        given = {"attention_mask": mask[:, :prompt], "position_ids": places[:, :prompt]}
        model(input_ids=ids[:, :prompt], past_key_values=cache, **given)
    found = []
    for part in [range(prompt, prompt + 5), *([i] for i in range(prompt + 5, ids.shape[1]))]:
        part = list(part)
        # pads were evicted first, so what stayed is seen; where all stayed, pads are there still
        seen = mask[:, : part[-1] + 1] if kept[0].shape[-1] == prompt else None
        found.append(
            model(ids[:, part], past_key_values=cache, position_ids=places[:, part], attention_mask=seen).logits
        )
    return torch.cat(found, dim=1), kept


@functools.cache
def models():
    return {"tiny-llama": AutoModelForCausalLM.from_pretrained(TINY), "grouped": build()}


def rows_of(model, *lengths):
    """Random rows with pads on the left, and their mask."""
    generator, longest = torch.Generator().manual_seed(1), max(lengths)
    ids = torch.randint(3, model.config.vocab_size, (len(lengths), longest), generator=generator)
    mask = torch.stack([(torch.arange(longest) >= longest - length).long() for length in lengths])
    return ids, mask


def expected_logits(model, name, ids, kept, prompt, pads):
    """The dense definition of one row in float64, in which later queries do not see what was evicted."""
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    calls = itertools.count()

    def bias(head, m, n):
        layer = next(calls) // heads
        places = kept[layer][head * groups // heads] - pads
        gone = ~np.isin(n, places.numpy()) & (n < prompt) & (m >= prompt)
        return np.where(gone, -np.inf, 0.0)

    return defined_logits(model, ids[None], definition_of(name, model.config.max_position_embeddings, bias))


MODELS = pytest.mark.parametrize("of", ["tiny-llama", "grouped"])
NAMES = pytest.mark.parametrize("name", SPECS)


@MODELS
@NAMES
def test_keys_that_stay_are_scored_where_they_stood(of, name):
    model = models()[of]
    lengths = (56, 49, 41)
    ids, mask = rows_of(model, *lengths)
    prompt, keep = 44, 24
    with patch(model, SPECS[name]):
        found, kept = pressed(model, ids, mask, prompt, keep)
    assert any(not torch.equal(kept[0], places) for places in kept.values())  # each layer keeps its own
    for row, length in enumerate(lengths):
        pads = ids.shape[1] - length
        of_row = {layer: places[row] for layer, places in kept.items()}
        assert all((places >= pads).all() for places in of_row.values())
        expected = expected_logits(model, name, ids[row, pads:], of_row, prompt - pads, pads)
        assert_close(found[row : row + 1], expected[:, prompt - pads :].float(), 2e-4)
    everything = {layer: torch.arange(ids.shape[1])[None].expand(8, -1) for layer in kept}
    dense = expected_logits(model, name, ids[row, pads:], everything, prompt - pads, pads)
    assert (expected - dense).abs().max() > 1e-2  # what was evicted had been looked at


@MODELS
@NAMES
@torch.no_grad()
def test_a_press_that_keeps_everything_changes_nothing(of, name):
    model = models()[of]
    ids, mask = rows_of(model, 56, 49, 41)
    with patch(model, SPECS[name]):
        found, _ = pressed(model, ids, mask, 44, keep=1000)
        expected = model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits[:, 44:]
    assert_close(found, expected, 1e-4)
