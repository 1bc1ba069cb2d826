"""Dense attention over regions: the meaning. Every other path has to equal it."""

from __future__ import annotations

import torch

from rope_patch.attention.inputs import AttentionInputs, wide


def attend(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """o_m = sum_n c(m, n) softmax_n(s(m, n)) (v_n + u(m, n)), in float32 at least, with all scores in memory.

    A query that sees no key at all (a pad) gets the mean of all values: finite, and read by nobody.

    Returns:
        output `(batch, heads, q_len, value_dim)` in the dtype of the values, and the attention weights
        `(batch, heads, q_len, kv_len)`.
    """
    distance = inputs.query_positions[:, :, None] - inputs.key_positions[:, None, :]
    scores = _scores(inputs, distance)
    if inputs.sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sinks = inputs.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    weights = torch.nn.functional.dropout(weights, p=inputs.dropout)
    content = inputs.content
    if content is not None and (factor := content.factor(distance)) is not None:
        weights = weights * factor.to(weights.dtype)
    value = inputs.value.to(weights.dtype)
    output = (_per_kv_head(weights, value.shape[1]) @ value[:, :, None]).flatten(1, 2)
    if content is not None and (relative := content.values(weights, distance)) is not None:
        output = output + relative.to(output.dtype)
    return output.to(inputs.value.dtype), weights


def _scores(inputs: AttentionInputs, distance: torch.Tensor) -> torch.Tensor:
    """s(m, n) with hidden pairs at the lowest number, `(batch, heads, q_len, kv_len)`."""
    m, n = inputs.query_positions[:, None, :, None], inputs.key_positions[:, None, None, :]
    scores, covered = None, None
    for branch in inputs.branches:
        products = _products(branch.query, branch.key) * inputs.scaling
        if branch.region is None:
            scores = products
            continue
        inside = branch.region.contains(m, n)
        scores = products if scores is None else torch.where(inside, products, scores)
        covered = inside if covered is None else covered | inside
    assert scores is not None  # for the type checker: there is at least one branch
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)

    seen = inputs.visible() if inputs.mask is None else inputs.mask
    added = None
    if seen is not None and seen.dtype != torch.bool:
        added, seen = seen, seen > torch.finfo(seen.dtype).min / 2
    if covered is not None:
        seen = covered if seen is None else seen & covered
    total = scores
    if inputs.content is not None and (bias := inputs.content.bias(inputs, scores, seen)) is not None:
        total = total + bias.to(total.dtype)
    if inputs.bias is not None:
        total = total + inputs.bias.function(distance).transpose(0, 1).to(total.dtype)
    if added is not None:
        total = total + added.to(total.dtype)
    return total if seen is None else total.masked_fill(~seen, torch.finfo(total.dtype).min)


def _products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """<q_m, k_n>, each key head serving its group of query heads without being repeated."""
    grouped = _per_kv_head(wide(query), key.shape[1])
    return (grouped @ wide(key)[:, :, None].transpose(-1, -2)).flatten(1, 2)


def _per_kv_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`(batch, heads, ...)` to `(batch, kv_heads, heads per kv head, ...)`."""
    return x.unflatten(1, (kv_heads, -1))
