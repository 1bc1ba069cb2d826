"""The longest text that a model reads under a scheme, for programs that need a limit, such as a server or a harness."""

from __future__ import annotations

import bisect
from typing import Any

from rope_patch.errors import InvalidField
from rope_patch.mounting.handle import PatchHandle
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Checkpoint, Target
from rope_patch.schemes.target import LONGEST, filled_for, takes_target


def longest_text(handle: PatchHandle | None, checkpoint: Checkpoint) -> int:
    """The longest text that a model reads, in tokens: its maximum, or the length that the scheme's fields give; 4 L if
    they set no limit.

    Args:
        handle: handle of the patched model; None without a scheme.
        checkpoint: the model without a scheme.
    """
    if handle is None:
        return int(checkpoint.max_length)
    reaches = []
    groups = [group for stack, plan in handle.mounted for group in plan.by_layer or ((stack, plan),)]
    for stack, plan in groups:
        counted = stack.checkpoint.under(plan.scheme)
        parts = [part for part in plan.scheme.resolve(counted).parts() if takes_target(type(part))]
        # a field that was set limits the length, and not only what a scheme could do at most
        if any(getattr(part, name) is not None for part in parts for name in filled_for(type(part), "auto")):
            reaches.append(max(_reach_of(part, counted) for part in parts))
    longest = min(reaches, default=LONGEST)
    return longest if longest < LONGEST else 4 * int(checkpoint.max_length)


def _reach_of(part: Scheme, checkpoint: Checkpoint) -> int:
    """The longest text in tokens that a scheme reaches on a checkpoint: the largest target for which its fields
    suffice.
    """
    own = {name: value for name, value in vars(part).items() if value is not None}
    given: dict[str, Any] = {name: own[name] for name in ("window", "original_max_position_embeddings") if name in own}

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
