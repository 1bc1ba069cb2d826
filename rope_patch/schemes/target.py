"""Schemes with a target length: the open fields of `yarn:target=8192` follow from the checkpoint."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import COMPOSED, Scheme
from rope_patch.schemes.slots import Checkpoint, Target

LONGEST = 10**15
"""The longest target in tokens."""

_VAST = Checkpoint(LONGEST, num_heads=1, max_length=LONGEST)


@dataclass(frozen=True)
class Reaching(Scheme):
    """A scheme whose open fields follow from a target length and a checkpoint.

    It declares the properties of the scheme that it becomes, and computes nothing before it is resolved.

    Args:
        like: that scheme, as it would be on a checkpoint trained at every length.
        target: the length in tokens.
        given: names of the fields that the user set.
    """

    like: Scheme
    target: int
    given: tuple[str, ...]

    def reach(self, checkpoint: Checkpoint) -> Scheme:
        given = {name: getattr(self.like, name) for name in self.given}
        filled = self.like.fields_for(Target(self.like.name, self.target, checkpoint, given))
        return type(self.like)(**{**filled, **given})

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        return self.reach(checkpoint).resolve(checkpoint)

    def fields(self) -> dict[str, Any]:
        plain = self.like.fields()
        return {"target": self.target, **{name: plain[name] for name in self.given}}


def _declared(name: str) -> property:
    return property(lambda self: getattr(self.like, name))


for _name in ("name", "equation", "source", "methods", "is_table", "learns", *COMPOSED):
    setattr(Reaching, _name, _declared(_name))


def takes_target(kind: type[Scheme]) -> bool:
    """Whether a target length determines fields of a scheme."""
    return kind.fields_for.__func__ is not Scheme.fields_for.__func__  # type: ignore[attr-defined]


def filled_for(kind: type[Scheme], target: Any) -> dict[str, Any]:
    """The fields of a scheme that a target fills, with placeholder values, for a check of the other fields.

    Raises:
        InvalidField: the target is not a length.
    """
    if not isinstance(target, int) or isinstance(target, bool) or not 1 <= target <= LONGEST:
        raise InvalidField(
            f"{kind.name}: target={target!r} is not allowed; target must be a whole number of tokens from 1 to "
            f"{LONGEST:g}, or auto for commands that measure lengths"
        )
    return kind.fields_for(Target(kind.name, target, _VAST, {}))


def reached(scheme: Scheme, checkpoints: Iterable[Checkpoint]) -> Scheme:
    """The scheme with the target's fields filled in, the same for all parts of a model.

    Raises:
        InvalidField: parts trained at different lengths need different fields, or see `Scheme.fields_for`.
    """
    found: Sequence[Scheme] = [scheme.reach(checkpoint) for checkpoint in checkpoints]
    for other in found[1:]:
        if other != found[0]:
            raise InvalidField(
                f"{scheme}: parts of this model need {found[0]} and {other}, because they were trained at different "
                "lengths; set the fields instead of the target"
            )
    return found[0] if found else scheme


def reach_of(scheme: Scheme, checkpoint: Checkpoint) -> int | None:
    """The longest text in tokens that a scheme reaches on a checkpoint, which is the target that its fields are for.

    Returns:
        `LONGEST` where every length is reached; None where no length follows from its fields.
    """
    parts = [part for part in scheme.resolve(checkpoint).parts() if takes_target(type(part))]
    return max((_reach_of_part(part, checkpoint) for part in parts), default=None)


def _reach_of_part(part: Scheme, checkpoint: Checkpoint) -> int:
    own = {name: value for name, value in vars(part).items() if value is not None}
    given = {name: own[name] for name in ("window", "original_max_position_embeddings") if name in own}

    def fields_for(tokens: int) -> dict[str, Any]:
        return part.fields_for(Target(part.name, tokens, checkpoint, given))

    def is_beyond(tokens: int) -> bool:
        try:
            start, wanted = fields_for(checkpoint.training_length), fields_for(tokens)
        except InvalidField:
            return True
        return any(value > own.get(name, value) for name, value in wanted.items() if value != start.get(name))

    lengths = range(checkpoint.training_length, LONGEST + 1)
    return lengths[0] + max(1, bisect.bisect_left(lengths, True, key=is_beyond)) - 1
