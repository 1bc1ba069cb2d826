"""Attention under ReRoPE and ALiBi, defined without knowing how a model rotates.

A model's own attention module runs at constant positions: with the tables of position w for all tokens, and with those
of position 0. Queries of the first and keys of the second run have distance w in every pair, whatever the layout, the
norms and the scales. The dense attention here, in float64, takes far pairs from there and near pairs from a plain run.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

_NAME = "zoo_truth"

Tables = Any
"""cos and sin, or one complex table: `(batch, length, width)`."""


@contextmanager
def rerope(modules: list[nn.Module], window: int) -> Iterator[None]:
    """Attention of these modules with distances min(m - n, w) on both sides."""

    def attend(run: Callable[[Tables], _States], tables: Tables) -> Any:
        near, at_window, at_zero = run(tables), run(_at(tables, window)), run(_at(tables, 0))
        pairs = [(near.query, near.key), (at_window.query, at_zero.key), (at_zero.query, at_window.key)]
        here, after, before = (near.scores(query, key) for query, key in pairs)
        distance = _distance(here.shape[-1])
        return near.attend(torch.where(distance.abs() < window, here, torch.where(distance > 0, after, before)))

    with _defined(modules, attend):
        yield


@contextmanager
def alibi(modules: list[nn.Module]) -> Iterator[None]:
    """Attention of these modules without their rotation, and with a penalty on distance."""

    def attend(run: Callable[[Tables], _States], tables: Tables) -> Any:
        still = run(_identity(tables))
        return still.attend(still.scores(still.query, still.key), -penalty(still.query.shape[1], still.key.shape[2]))

    with _defined(modules, attend):
        yield


def penalty(num_heads: int, length: int) -> torch.Tensor:
    """Slope times distance, `(heads, length, length)`, with the slopes of BLOOM."""
    slopes = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    return slopes.double()[:, None, None] * _distance(length).abs()


def _distance(length: int) -> torch.Tensor:
    return torch.arange(length)[:, None] - torch.arange(length)


def _at(tables: Tables, position: int) -> Tables:
    """The tables of one position for every token."""
    if isinstance(tables, torch.Tensor):
        return tables[:, position : position + 1].expand_as(tables)
    return tuple(_at(table, position) for table in tables)


def _identity(tables: Tables) -> Tables:
    if isinstance(tables, torch.Tensor):  # cos + i sin
        return torch.ones_like(tables)
    return torch.ones_like(tables[0]), torch.zeros_like(tables[1])


class _States:
    """What a module passes to its attention function, in float64."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> None:
        self.dtype, self.kwargs = query.dtype, kwargs
        groups = query.shape[1] // key.shape[1]
        self.query, self.key, self.value = (
            query.double(),
            *(states.double().repeat_interleave(groups, dim=1) for states in (key, value)),
        )
        mask = attention_mask
        self.mask = None if mask is None else mask[..., : key.shape[2]].double()
        scaling = kwargs.get("scaling")
        self.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """`(batch, heads, length, length)`."""
        return query @ key.mT * self.scaling

    def attend(self, scores: torch.Tensor, bias: torch.Tensor | float = 0.0) -> tuple[torch.Tensor, None]:
        """What the attention function returns."""
        if (cap := self.kwargs.get("softcap")) is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores + bias
        if self.mask is not None:
            scores = scores + self.mask
        if (sinks := self.kwargs.get("s_aux")) is not None:
            column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(dim=-1)[..., : self.value.shape[2]]
        return (weights @ self.value).transpose(1, 2).to(self.dtype).contiguous(), None


@contextmanager
def _defined(modules: list[nn.Module], attend: Callable[..., Any]) -> Iterator[None]:
    """Let `attend(run, tables)` compute the attention of modules: `run` gives the states under other tables."""
    configs = {module: module.config for module in modules}
    current: list[Callable[[_States], Any]] = []

    def function(_: nn.Module, *states: Any, **kwargs: Any) -> Any:
        return current[-1](_States(*states, **kwargs))

    def forward_of(module: nn.Module) -> Callable[..., Any]:
        signature, plain = inspect.signature(type(module).forward), type(module).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(module, *args, **kwargs)

            def run_with(tables: Tables, then: Callable[[_States], Any]) -> Any:
                bound.arguments["position_embeddings"] = tables
                current.append(then)
                try:
                    return plain(*bound.args, **bound.kwargs)
                finally:
                    current.pop()

            def run(tables: Tables) -> _States:
                found: list[_States] = []

                def keep(states: _States) -> Any:
                    found.append(states)
                    shape = states.query.shape[0], states.query.shape[2], states.query.shape[1], states.value.shape[-1]
                    return torch.zeros(shape, dtype=states.dtype), None

                run_with(tables, keep)
                (states,) = found
                return states

            tables = bound.arguments["position_embeddings"]
            result = attend(run, tables)
            return run_with(tables, lambda _: result)

        return forward

    ALL_ATTENTION_FUNCTIONS[_NAME] = function
    try:
        for module in modules:
            module.config = copy.copy(module.config)
            module.config._attn_implementation_internal = _NAME
            module.forward = forward_of(module)
        yield
    finally:
        for module, config in configs.items():
            module.config = config
            del module.forward
        del ALL_ATTENTION_FUNCTIONS[_NAME]
