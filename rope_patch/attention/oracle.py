"""Dense attention over regions: the reference that every other path must equal."""

from __future__ import annotations

import torch

from rope_patch.attention.inputs import AttentionInputs, DistanceBias, wide
from rope_patch.attention.masks import attended
from rope_patch.errors import UnsupportedPositions


def attend(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """o_m = sum_n c(m, n) softmax_n(s(m, n)) (v_n + u(m, n)), in float32 or wider, with all scores in memory.

    A bias of -inf hides a pair. A query that sees no key (a pad before the text, or a token all of whose keys a bias
    hides) gets zeros, as in PyTorch's attention; one whose keys an additive mask hides gets the mean of all values, as
    in Transformers' eager attention.

    Returns:
        output `(batch, heads, q_len, value_dim)` in the dtype of the values, and the attention weights
        `(batch, heads, q_len, kv_len)`.

    Raises:
        UnsupportedPositions: heads keep different keys under a scheme that depends on content.
    """
    distance = (inputs.m - inputs.n)[:, 0]
    if inputs.by_head and inputs.content is not None:
        raise UnsupportedPositions(
            f"heads keep different keys in past_key_values, but {inputs.content.scheme} needs the same keys in all "
            "heads; keep the same keys for all heads of a layer"
        )
    scores, sees = _scores(inputs)
    if inputs.sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sinks = inputs.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    if sees is not None:
        weights = weights * sees
    weights = torch.nn.functional.dropout(weights, p=inputs.dropout)
    content = inputs.content
    if content is not None and (factor := content.factor(distance)) is not None:
        weights = weights * factor.to(weights.dtype)
    value = inputs.value.to(weights.dtype)
    grouped = _per_kv_head(weights, value.shape[1])
    output = (grouped.flatten(2, 3) @ value).unflatten(2, grouped.shape[2:4]).flatten(1, 2)
    if content is not None and (relative := content.values(weights, distance)) is not None:
        output = output + relative.to(output.dtype)
    return output.to(inputs.value.dtype), weights


def _scores(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """s(m, n) with hidden pairs at the lowest number, `(batch, heads, q_len, kv_len)`, and which queries see a key, or
    have an additive mask that hides all, boolean, broadcasting to it; None for all.
    """
    scores, covered = None, None
    for branch in inputs.branches:
        products = torch.nn.functional.pad(_products(branch.query, branch.key) * inputs.scaling, (branch.first, 0))
        if branch.region is None:
            scores = products
            continue
        inside = branch.region.contains(inputs.m, inputs.n)
        scores = products if scores is None else torch.where(inside, products, scores)
        covered = inside if covered is None else covered | inside
    assert scores is not None  # for the type checker: there is at least one branch
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)

    seen = inputs.visible()
    added = None
    if seen is not None and seen.dtype != torch.bool:
        added, seen = seen, attended(seen)
    if covered is not None:
        seen = covered if seen is None else seen & covered
    total = scores
    if inputs.content is not None and (bias := inputs.content.bias(inputs, scores, seen)) is not None:
        total = total + bias.to(total.dtype)
    if inputs.bias is not None:
        total = total + _bias(inputs.bias, inputs).to(total.dtype)
    if (running := inputs.running_bias_of_pairs) is not None:
        total = total + running.to(total.dtype)
    by_mask = None if added is None or seen is None else ~seen.any(dim=-1, keepdim=True)
    if total is not scores:
        visible = total != -torch.inf
        seen = visible if seen is None else seen & visible
    if added is not None:
        total = total + added.to(total.dtype)
    if seen is None:
        return total, None
    sees = seen.any(dim=-1, keepdim=True)
    return total.masked_fill(~seen, torch.finfo(total.dtype).min), sees if by_mask is None else sees | by_mask


def _bias(bias: DistanceBias, inputs: AttentionInputs) -> torch.Tensor:
    """b(m - n), `(batch or 1, heads, q_len, kv_len)`."""
    distance = inputs.m - inputs.n
    if not inputs.by_head:
        return bias.function(distance[:, 0]).transpose(0, 1)
    return torch.stack([bias.function(distance[:, head])[head] for head in range(distance.shape[1])], dim=1)


def _products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """<q_m, k_n>; queries that share keys are rows of one product."""
    grouped = _per_kv_head(wide(query), key.shape[1])
    products = grouped.flatten(2, 3) @ wide(key).mT
    return products.unflatten(2, grouped.shape[2:4]).flatten(1, 2)


def _per_kv_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`(batch, heads, ...)` to `(batch, kv_heads, heads per kv head, ...)`."""
    return x.unflatten(1, (kv_heads, -1))
