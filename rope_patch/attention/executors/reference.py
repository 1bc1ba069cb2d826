"""The definition: dense attention over regions, with all scores in memory. Every other executor must equal it."""

from __future__ import annotations

import torch

from rope_patch.attention.masks import attended
from rope_patch.attention.problem import Problem
from rope_patch.attention.table import Executor, Needs
from rope_patch.attention.terms import DistanceBias, upcast
from rope_patch.errors import UnsupportedPositions

supports = Needs()
"""The definition computes every call."""


def attend(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """o_m = sum_n c(m, n) softmax_n(s(m, n)) (v_n + u(m, n)), in float32 or wider, with all scores in memory.

    A bias of -inf hides a pair. A query that sees no key (a pad before the text, or a token all of whose keys a bias
    hides) gets zeros, as in PyTorch's attention; one whose keys an additive mask hides gets the mean of all values, as
    in Transformers' eager attention. Other executors equal this on queries that see a key. Where a query sees none,
    their output only has to be finite, because no token reads a pad.

    Returns:
        output `(batch, heads, q_len, value_dim)` in the dtype of the values, and the attention weights
        `(batch, heads, q_len, kv_len)`.

    Raises:
        UnsupportedPositions: heads keep different keys under a scheme that depends on content.
    """
    problem = problem.turned()
    distance = (problem.m - problem.n)[:, 0]
    if problem.by_head and problem.content is not None:
        raise UnsupportedPositions(
            f"heads keep different keys in past_key_values, but {problem.content.scheme} needs the same keys in all "
            "heads; keep the same keys for all heads of a layer"
        )
    scores, sees = _scores(problem)
    if problem.sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sinks = problem.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    if sees is not None:
        weights = weights * sees
    weights = torch.nn.functional.dropout(weights, p=problem.dropout)
    content = problem.content
    if content is not None and (factor := content.factor(distance)) is not None:
        weights = weights * factor.to(weights.dtype)
    value = problem.value.to(weights.dtype)
    grouped = _per_kv_head(weights, value.shape[1])
    output = (grouped.flatten(2, 3) @ value).unflatten(2, grouped.shape[2:4]).flatten(1, 2)
    if content is not None and (relative := content.values(weights, distance)) is not None:
        output = output + relative.to(output.dtype)
    return output.to(problem.value.dtype), weights


def _scores(problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scores s(m, n), with hidden pairs at the lowest number, `(batch, heads, q_len, kv_len)`; and a boolean that
    broadcasts to them, true for queries that see a key or whose additive mask hides all keys, or None if every query
    does.
    """
    scores, covered = None, None
    for branch in problem.branches:
        products = torch.nn.functional.pad(_products(branch.query, branch.key) * problem.scaling, (branch.first, 0))
        if branch.region is None:
            scores = products
            continue
        inside = branch.region.contains(problem.m, problem.n)
        scores = products if scores is None else torch.where(inside, products, scores)
        covered = inside if covered is None else covered | inside
    assert scores is not None  # for the type checker: there is at least one branch
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)

    seen = problem.visible()
    added = None
    if seen is not None and seen.dtype != torch.bool:
        added, seen = seen, attended(seen)
    if covered is not None:
        seen = covered if seen is None else seen & covered
    total = scores
    if problem.content is not None:
        positions = problem.query_positions, problem.key_positions
        bias = problem.content.bias(*positions, problem.scaling, scores, seen)
        total = total if bias is None else total + bias.to(total.dtype)
    if problem.bias is not None:
        total = total + _bias(problem.bias, problem).to(total.dtype)
    if (running := problem.running_bias_of_pairs) is not None:
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


def _bias(bias: DistanceBias, problem: Problem) -> torch.Tensor:
    """The bias b(m - n) for every pair, `(batch or 1, heads, q_len, kv_len)`."""
    distance = problem.m - problem.n
    if not problem.by_head:
        return bias.function(distance[:, 0]).transpose(0, 1)
    return torch.stack([bias.function(distance[:, head])[head] for head in range(distance.shape[1])], dim=1)


def _products(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The products <q_m, k_n>, with the queries that share keys as rows of one matrix."""
    grouped = _per_kv_head(upcast(query), key.shape[1])
    products = grouped.flatten(2, 3) @ upcast(key).mT
    return products.unflatten(2, grouped.shape[2:4]).flatten(1, 2)


def _per_kv_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Split `(batch, heads, ...)` into `(batch, kv_heads, heads per kv head, ...)`."""
    return x.unflatten(1, (kv_heads, -1))


EXECUTOR = Executor("reference", "the definition, with all scores in memory", supports, attend)
