"""Ways to run a model that must all give the same logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache

from rope_patch import Scheme, get_scheme, plan_mounts
from rope_patch.models.find_stacks import read_stack
from tests.families import FOLLOW_THE_LENGTH, TRAINING_LENGTH, VOCABULARY, build, rope_types

LENGTH = TRAINING_LENGTH + 8
"""Tokens of a usual text here: beyond the training length, and beyond every window."""


def tokens(length: int = LENGTH, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids, `(rows, length)`, none of which is the pad."""
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def usable_length(model: nn.Module, scheme: str | Scheme) -> int:
    """The longest text for which a cache may be compared with a full forward: frequencies that follow the length make
    other hidden states at every length beyond the one that was trained at.
    """
    return TRAINING_LENGTH if follows_the_length(model, scheme) else LENGTH


def follows_the_length(model: nn.Module, scheme: str | Scheme) -> bool:
    """Whether frequencies follow the length of a text under a scheme: its own, or those of the checkpoint where it
    leaves them.
    """
    scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
    if not rope_types(model.config.rope_parameters) & FOLLOW_THE_LENGTH:
        return scheme.length_dependent
    scheme = plan_mounts(scheme, read_stack(model)).scheme  # with `nope` where a bias replaces the rotation
    return scheme.length_dependent or "frequencies" not in scheme.slots


def scales_tables(scheme: Scheme) -> bool:
    """Whether static frequencies come with a factor on cos and sin, as YaRN's temperature."""
    stack = read_stack(build("llama"))
    return scheme.resolve(stack.checkpoint).frequencies(stack.layers[0].spec).attention_scaling != 1


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """One full forward without a cache, `(rows, length, vocabulary)`."""
    return model(ids, use_cache=False, **inputs).logits


@torch.no_grad()
def cached_logits(
    model: nn.Module,
    ids: torch.Tensor,
    sizes: Iterable[int],
    mask: torch.Tensor | None = None,
    cache: Cache | None = None,
) -> torch.Tensor:
    """Forwards of `sizes` tokens each, one after the other, that share a cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    positions = None if mask is None else positions_of(mask)
    found, start = [], 0
    for size in sizes:
        stop = start + size
        inputs = {}
        if mask is not None:
            inputs = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        found.append(model(ids[:, start:stop], past_key_values=cache, use_cache=True, **inputs).logits)
        start = stop
    assert start == ids.shape[1]
    return torch.cat(found, dim=1)


def left_padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths as one batch: ids and mask, `(rows, longest)`, with pads on the left."""
    longest = max(row.shape[-1] for row in rows)
    ids = torch.stack([nn.functional.pad(row.flatten(), (longest - row.shape[-1], 0)) for row in rows])
    return ids, (ids != 0).long()


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Positions that count the tokens that are no pads, as `generate` makes them."""
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


def generated(model: nn.Module, ids: torch.Tensor, new_tokens: int = 3, **options: Any) -> torch.Tensor:
    """The new tokens of greedy decoding, or whatever else the options say, `(rows, new_tokens)`."""
    options.setdefault("attention_mask", torch.ones_like(ids))
    found = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, **options)
    return found[:, ids.shape[1] :]


def greedy(model: nn.Module, ids: torch.Tensor, new_tokens: int = 3) -> torch.Tensor:
    """Greedy decoding the slow way: a full forward for every token."""
    start = ids.shape[1]
    for _ in range(new_tokens):
        ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], dim=1)
    return ids[:, start:]


def gradients(model: nn.Module, *texts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the summed loss of all texts: every forward first, then one backward."""
    model.zero_grad(set_to_none=True)
    sum(model(ids, labels=ids, use_cache=False).loss for ids in texts).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5, by: str = "") -> None:
    """Equal up to float32 rounding, or up to a tolerance; `by` names the way, where a test tries several."""
    assert found.shape == expected.shape, by
    difference = (found - expected).abs().max().item()
    assert difference <= tolerance, f"{by}: the largest difference is {difference:g}, allowed {tolerance:g}"


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], by: str = "") -> None:
    """Equal to 1e-4 of each gradient's norm, or to 1e-7 where that is lost in rounding."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-3)
        assert error < 1e-4, f"{by}: {name}: relative error {error:g}"
