"""One query against a long cache, without rotating the cache.

The query is rotated once per region. Each region is a run of slots, and only where its rotation differs from the one
the cache already has are keys turned: the near window, a few out of many. `attend` cuts those runs out of the cache;
`attend_in_graph` does the same with shapes that do not depend on the step, for a compiler.
"""

from __future__ import annotations

import math

import torch

from rope_patch.attention.call import Call
from rope_patch.attention.inputs import AttentionInputs, AttentionMode, wide
from rope_patch.attention.kernels import Work, kernel_for
from rope_patch.attention.segmented import merge
from rope_patch.attention.tiles import Tile
from rope_patch.schemes.slots import Region


def applies(inputs: AttentionInputs, call: Call, mode: AttentionMode) -> bool:
    """Whether a call, its branches not yet rotated, is one decoding step of the kind that `attend` computes."""
    return (
        mode in ("auto", "segmented")
        and inputs.q_length == 1
        and not inputs.scattered
        and inputs.fits_kernels
        and (inputs.mask is None or inputs.mask.dtype == torch.bool)
        and not call.differentiable
        and (
            torch.compiler.is_compiling()
            or all(region.translation_invariant for region in call.regions)
            or len(inputs.query_positions) == 1  # or chunks would begin at other slots in other rows
            or bool((inputs.query_positions == inputs.query_positions[0]).all())
        )
    )


def attend(inputs: AttentionInputs, call: Call) -> torch.Tensor:
    """Attention of one query, `(batch, heads, 1, value_dim)`; without gradients.

    Distance is a difference of slots: key positions beside a single query are counted from it.
    """
    value, mask, slot = inputs.value, inputs.mask, int(inputs.query_start)
    bias = _by_slot(inputs, slot)
    invariant = all(region.translation_invariant for region in call.regions)
    position = slot if invariant else int(inputs.query_positions[0, 0])
    kernel = kernel_for(value, value, masked=mask is not None or bias is not None)
    out = lse = None
    for region in call.regions:
        slots = slots_of(region, slot, position)
        if slots.stop <= slots.start:
            continue
        # the heads that share keys are the rows of one product: keys are read once
        rows = call.query(region).unflatten(1, (value.shape[1], -1))[:, :, :, 0]
        keys = call.key(region, slots)
        tile = Tile(0, rows.shape[2], 0, keys.shape[2])
        hidden = _additive(mask, slots, rows)
        if bias is not None:
            term = bias[..., slots].unflatten(1, (value.shape[1], -1))
            hidden = term if hidden is None else term + hidden
        part, part_lse = kernel.forward(Work(rows, keys, value[:, :, slots], tile, inputs.scaling, hidden))
        if out is None or lse is None:
            out, lse = wide(part), part_lse
        else:
            merge(out, lse, part, part_lse)
    assert out is not None  # for the type checker: the query itself is in some region
    return out.to(value.dtype).flatten(1, 2)[:, :, None]


def attend_in_graph(inputs: AttentionInputs, call: Call) -> torch.Tensor:
    """What `attend` computes, in the same shapes, traceable: a narrow region is gathered from the cache, any other is
    all of it, masked.
    """
    value, m = inputs.value, inputs.query_positions[..., None]
    every = torch.arange(inputs.kv_length, device=value.device)
    scores, values = [], []
    for region in call.regions:
        first, width = int(max(0, region.start)), region.stop - max(0, region.start)
        slots, exists = every, every <= inputs.query_start
        if region.translation_invariant and width < inputs.kv_length:
            slots = inputs.query_start - first - torch.arange(int(width), device=value.device)
            exists, slots = slots >= 0, slots.clamp(min=0)
        n = m - (inputs.query_start - slots)
        seen = (exists & region.contains(m, n))[:, :, None]
        if inputs.mask is not None:
            seen = seen & inputs.mask[..., slots]
        rows = wide(call.query(region)).unflatten(1, (value.shape[1], -1))[:, :, :, 0]  # of each kv head
        products = rows @ wide(call.key(region, slots)).mT * inputs.scaling
        if inputs.bias is not None:
            term = inputs.bias.function((m - n)[:, 0]).transpose(0, 1)
            products = products + term.unflatten(1, (value.shape[1], -1))
        if (running := inputs.running_bias) is not None:
            products = products + running[:, :, 0, slots].to(products.dtype).unflatten(1, (value.shape[1], -1))
        scores.append(products.masked_fill(~seen, torch.finfo(products.dtype).min))
        values.append(value[:, :, slots])
    weights = torch.cat(scores, dim=-1).softmax(dim=-1).split([x.shape[-1] for x in scores], dim=-1)
    out = sum(weight @ wide(part) for weight, part in zip(weights, values, strict=True))
    return out.to(value.dtype).flatten(1, 2)[:, :, None]


def _by_slot(inputs: AttentionInputs, slot: int) -> torch.Tensor | None:
    """What is added to the scores of the keys up to the query's `slot`, `(batch or 1, heads, slot + 1)`."""
    bias = None if inputs.bias is None else inputs.bias.values(0, slot + 1).flip(-1)[None]
    if inputs.sums is None:
        return bias
    sums = inputs.sums[..., : slot + 1]
    running = (sums[..., -1:] - sums).to(torch.promote_types(inputs.value.dtype, torch.float32))
    return running if bias is None else bias + running


def slots_of(region: Region, slot: int, position: int) -> slice:
    """The slots of a region for the query at this `slot` and `position`, none of them after the query."""
    behind = slot - position  # slot of a key minus its position
    here = position // region.chunk
    newest = (here - int(max(0, region.start)) + 1) * region.chunk - 1
    oldest = -behind if region.stop == math.inf else (here - int(region.stop) + 1) * region.chunk
    stop = min(newest, position, region.keys_below - 1) + 1
    return slice(max(0, oldest + behind), max(0, int(stop) + behind))


def _additive(mask: torch.Tensor | None, slots: slice, like: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    # the lowest number and not -inf: a region that holds nothing but pads must stay finite to be merged
    hidden = ~mask[..., slots]
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(
        hidden, torch.finfo(like.dtype).min
    )
