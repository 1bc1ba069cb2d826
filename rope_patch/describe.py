"""What a model does about positions, as a table to print."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rope_patch.export import scheme_of_config
from rope_patch.models.base import read_stack
from rope_patch.mounts import Plan
from rope_patch.patch import find_handle
from rope_patch.schemes.base import Scheme


def describe(model: nn.Module) -> str:
    """A table: each scheme with its slots, fields and source, the mount, the layers left alone, and a few positions.

    The position map shows phi_q(m) - phi_k(n), the distance that is rotated, for some pairs (m, n).

    Raises:
        UnsupportedModel: when the model has no rotary stack.
    """
    handle = find_handle(model)
    stack = handle.stack if handle else read_stack(model)
    scheme = handle.scheme if handle else scheme_of_config(stack.config)
    rows = [
        ("model", f"{type(model).__name__}, {len(stack.layers)} attention layers"),
        ("training length", f"{stack.training_length} tokens"),
        ("state", f"patched, mounted {handle.plan.mounts()}" if handle else "not patched; this is its native scheme"),
    ]
    resolved = scheme.resolve(stack.checkpoint)
    for part in resolved.parts():
        rows.append(("scheme", str(part)))
        rows.append(("  slot", ", ".join(sorted(part.slots))))
        rows.append(("  equation", part.equation))
        rows.append(("  needs", part.regime))
        rows.append(("  source", f"{part.source.title} ({part.source.year}) {part.source.link}"))
    if handle:
        rows += [("left alone", line) for line in _left_alone(handle.plan)]
        if "nope" in (part.name for part in handle.plan.scheme.parts()) and "bias" in scheme.slots:
            rows.append(("rotation", "replaced by the bias; list RoPE() beside it to keep both"))
    rows.append(("positions", _position_map(resolved, stack.training_length)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _left_alone(plan: Plan) -> Iterable[str]:
    reasons: dict[str, list[int]] = {}
    for index, reason in plan.left_alone.items():
        reasons.setdefault(reason, []).append(index)
    return (f"layers {', '.join(map(str, indices))}: {reason}" for reason, indices in reasons.items())


def _position_map(scheme: Scheme, training_length: int) -> str:
    m = 4 * training_length
    pairs = [(m, m - distance) for distance in (1, training_length // 4, training_length, 2 * training_length, m)]
    return "  ".join(f"({m}, {n}): {rotated_distance(scheme, m, n)}" for m, n in pairs)


def rotated_distance(scheme: Scheme, m: int, n: int) -> str:
    """phi_q(m) - phi_k(n) of the region that holds (m, n), as text; `hidden` where no region does."""
    if "segments" not in scheme.slots:
        return f"{m - n:g}"
    query, key = torch.tensor([m]), torch.tensor([n])
    for region in scheme.segments():
        if region.contains(query, key):
            return f"{float(region.query_map(query) - region.key_map(key)):g}"
    return "hidden"
