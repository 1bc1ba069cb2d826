"""Pads between tokens, as after right-padded prompts that were continued or where a mask has holes, change nothing."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from rope_patch import patch
from tests.cases import CASES, ROUTES
from tests.runs import assert_close, logits, positions_of, tokens

PROMPTS, LATER = (9, 6, 3), 5
FOX = CASES["fox"]
SPECS = [*ROUTES, FOX, f"rope+{FOX}", f"rerope:window=6+{FOX}", "rnn", "rope+rnn", f"rnn+{FOX}", CASES["cope"]]


def right_padded():
    """Prompts of several lengths, the pads behind them and the tokens that continue each; and the mask of all."""
    ids = torch.zeros(len(PROMPTS), max(PROMPTS) + LATER, dtype=torch.long)
    for row, size in enumerate(PROMPTS):
        ids[row, :size] = tokens(size, seed=size)
    ids[:, max(PROMPTS) :] = tokens(LATER, rows=len(PROMPTS))
    return ids, (ids != 0).long()


def alone(model, ids, mask):
    return [logits(model, row[seen > 0][None])[0] for row, seen in zip(ids, mask, strict=True)]


def assert_rows(found, mask, expected):
    for row, wanted in enumerate(expected):
        assert_close(found[row][mask[row] > 0], wanted)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_holes_in_a_mask(llama, spec, implementation):
    ids, mask = right_padded()
    llama.set_attn_implementation(implementation)
    with patch(llama, spec):
        found = logits(llama, ids, attention_mask=mask, position_ids=positions_of(mask))
        assert_rows(found, mask, alone(llama, ids, mask))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sizes", [[9, 5], [9, 1, 1, 3], [4, 1, 6, 3]])
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_right_padded_prompts_go_on_with_a_cache(llama, spec, sizes, static):
    ids, mask = right_padded()
    positions = positions_of(mask)
    with patch(llama, spec):
        options = {"max_cache_len": 16} if static else {}
        cache = (StaticCache if static else DynamicCache)(config=llama.config, **options)
        found, start = [], 0
        for size in sizes:
            part = slice(start, start + size)
            given = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part]}
            found.append(llama(ids[:, part], past_key_values=cache, **given).logits)
            start += size
        assert_rows(torch.cat(found, dim=1), mask, alone(llama, ids, mask))
