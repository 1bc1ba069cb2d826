"""Schemes made of schemes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch

from rope_patch.errors import InvalidField, SlotConflict
from rope_patch.schemes.base import COMPOSED, SLOTS, Composed, Scheme, Source
from rope_patch.schemes.slots import Checkpoint, ModelShape
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, RotarySpec, Slot, Weights

_SHARED: frozenset[Slot] = frozenset({"query_scale", "bias"})


class Combined(Scheme):
    """A scheme made of other schemes, `inner`. They also determine its class attributes, see `Composed`."""

    inner: tuple[Scheme, ...]

    @property
    def methods(self) -> frozenset[str]:
        return frozenset().union(*(scheme.methods for scheme in self.inner))

    @property
    def frequency_owner(self) -> Scheme | None:
        return next(filter(None, (scheme.frequency_owner for scheme in self.inner)), None)

    @property
    def is_table(self) -> bool:
        return all(scheme.is_table for scheme in self.inner if "embedding" in scheme.methods)

    @property
    def learns(self) -> bool:
        return any(scheme.learns for scheme in self.inner)


def _of_the_inner(name: str, rule: Composed) -> property:
    return property(lambda self: rule.of(name, self.inner))


for _name, _rule in COMPOSED.items():
    setattr(Combined, _name, _of_the_inner(_name, _rule))


class Compose(Combined):
    """Several schemes side by side: each slot has one owner, except that query scales multiply, biases add, and schemes
    that refine frequencies receive the frequencies of their owner, in the order listed.

    Args:
        *schemes: two or more schemes; nested compositions are flattened.

    Raises:
        SlotConflict: two of them fill the same slot; the message names both.
        InvalidField: an argument is not a scheme, or there is none.
    """

    name = "compose"
    summary = "several schemes side by side"
    aliases = ()
    title = "composition"  # errors and tables name its parts one by one
    equation = "each slot from its owner; query scales multiply, biases add, frequencies are refined in turn"
    source = Source("the one equation of this project", 2026, "")
    rope_type = None  # the parts give it, see `rope_parameters`
    sweep = None  # a search tries plain schemes

    def __init__(self, *schemes: Scheme) -> None:
        for scheme in schemes:
            if not isinstance(scheme, Scheme):
                raise InvalidField(
                    f"Compose: {scheme!r} is not a scheme; pass scheme objects such as ReRoPE(window=512), or write "
                    "all of it as text: patch(model, 'rerope:window=512+logn')"
                )
        if not schemes:
            raise InvalidField("Compose: no scheme was given; pass at least one")
        self.inner = tuple(part for scheme in schemes for part in scheme.parts())
        owners: dict[Slot, Scheme] = {}
        for part in self.inner:
            for slot in () if part.by_layer else part.slots - _SHARED - ({"frequencies"} if part.refines else set()):
                if slot in owners:
                    raise SlotConflict(f"{owners[slot]} and {part} both own the slot {slot!r}; keep one of them")
                owners[slot] = part
        self._owners = owners

    def parts(self) -> tuple[Scheme, ...]:
        return self.inner

    def reach(self, checkpoint: Checkpoint) -> Scheme:
        return Compose(*(part.reach(checkpoint) for part in self.inner))

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        return Compose(*(part.resolve(checkpoint) for part in self.inner))

    def at_length(self, length: int) -> Scheme:
        return Compose(*(part.at_length(length) for part in self.inner))

    def of_layers(self, kinds: Mapping[int, str], num_layers: int) -> dict[int, Scheme | None]:
        by_part = [part.of_layers(kinds, num_layers) for part in self.inner]
        by_layer: dict[int, Scheme | None] = {}
        for index in kinds:
            here = [scheme for schemes in by_part if (scheme := schemes[index]) is not None]
            by_layer[index] = Compose(*here) if len(here) > 1 else next(iter(here), None)
        return by_layer

    def frequencies(self, rotary: RotarySpec, length: Lengths = None, weights: Weights = NO_WEIGHTS) -> Frequencies:
        if (owner := self._owners.get("frequencies")) is None:
            return super().frequencies(rotary, length, weights)
        return self.refine(owner.frequencies(rotary, length, weights), rotary, weights)

    def refine(self, frequencies: Frequencies, rotary: RotarySpec, weights: Weights = NO_WEIGHTS) -> Frequencies:
        return reduce(lambda refined, part: part.refine(refined, rotary, weights), self.inner, frequencies)

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        parameters: dict[str, torch.Tensor] = {}
        for part in self.inner:
            for name, value in part.parameters(shape, random).items():
                if name in parameters:
                    raise SlotConflict(f"two schemes of {self} learn parameters called {name!r}; keep one of them")
                parameters[name] = value
        return parameters

    def rope_parameters(self, rotary: RotarySpec) -> dict[str, Any]:
        for part in self.inner:
            part.rope_parameters(rotary)  # names the first part that Transformers has no words for
        return self._owners["frequencies"].rope_parameters(rotary)

    def fields(self) -> dict[str, Any]:
        return {"schemes": [part.to_dict() for part in self.inner]}

    def __str__(self) -> str:
        return "+".join(map(str, self.inner))

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.inner))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compose) and self.inner == other.inner

    def __hash__(self) -> int:
        return hash(self.inner)


def _of_the_owner(method: str, slot: Slot) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self._owners[slot], method)(*args, **kwargs)


def _joined(method: str, join: Callable[..., Any]) -> Callable[..., Any]:
    def of_all(self: Compose, *args: Any, **kwargs: Any) -> Any:
        return reduce(join, (getattr(part, method)(*args, **kwargs) for part in self.inner if method in part.methods))

    return of_all


Scheme.composition = Compose
Compose.query_scale = _joined("query_scale", operator.mul)  # type: ignore[method-assign]
for _name in ("bias", "content_bias", "running_bias"):
    setattr(Compose, _name, _joined(_name, operator.add))
for _name, _slot in {**SLOTS, "advance": SLOTS["embedding"], "rows": SLOTS["embedding"]}.items():
    if _name not in vars(Compose):
        setattr(Compose, _name, _of_the_owner(_name, _slot))
