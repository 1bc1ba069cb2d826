"""What a model does about positions, as a table to print."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rope_patch.models.base import Stack
from rope_patch.models.config import BASE
from rope_patch.models.reading import find_stacks
from rope_patch.mounting.parameters import inventory
from rope_patch.mounting.plan import Plan
from rope_patch.patching import find_handles
from rope_patch.saving.rope_parameters import native_scheme_of
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.rope import NoPE, RoPE


def describe(model: nn.Module) -> str:
    """A table: each scheme with its slots, fields and source, the mount, the layers left alone, and a few positions.

    The position map shows phi_q(m) - phi_k(n), the distance that is rotated, for some pairs (m, n). An encoder and a
    decoder have a table each.

    Args:
        model: patched or not.

    Raises:
        UnsupportedModel: when the model has no stack that schemes could be mounted on.
    """
    mounted = {
        stack.module: _table(model, stack, handle.scheme, plan)
        for handle in find_handles(model)
        for stack, plan in handle.mounted
    }
    return "\n\n".join(
        mounted.get(module) or _table(model, stack := style.read(module), native_scheme_of(stack), None)
        for style, module in find_stacks(model)
    )


def _table(model: nn.Module, stack: Stack, asked: Scheme, plan: Plan | None) -> str:
    part_of = f", {stack.part}" if stack.part else ""
    content = f"{len(stack.layers)} attention layers" if stack.layers else "a table of positions"
    rows = [
        ("model", f"{type(model).__name__}{part_of}, {content}"),
        ("training length", f"{stack.training_length} tokens"),
        ("state", f"patched, mounted {plan.mounts()}" if plan else "not patched; this is its native scheme"),
    ]
    resolved = asked.resolve(stack.checkpoint)
    by_layer = resolved.of_layers({layer.index: layer.kind for layer in stack.layers}, stack.config.num_hidden_layers)
    for part, its_plan in plan.by_layer if plan else ():
        chosen = by_layer[part.layers[0].index] or its_plan.scheme
        rows.append((_numbered(layer.index for layer in part.layers), f"{chosen}, mounted {its_plan.mounts()}"))
        rows += _under(chosen, part, its_plan)
    if not (plan and plan.by_layer):
        rows += _under(resolved, stack, plan)
    if plan:
        rows += [("left alone", line) for line in _left_alone(plan)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in rows)


def _under(scheme: Scheme, stack: Stack, plan: Plan | None) -> Iterable[tuple[str, str]]:
    """The rows of layers under one scheme, whose defaults are filled in."""
    for part in scheme.parts():
        yield "scheme", str(part)
        yield "  slot", ", ".join(sorted(part.slots))
        yield "  equation", part.equation
        yield "  needs", part.regime
        yield "  source", f"{part.source.title} ({part.source.year}) {part.source.link}"
    if plan:
        yield from _own_positions(stack, scheme, plan)
        if plan.embedding != "rows":
            yield from (("learned", line) for line in inventory(plan.scheme, stack, plan.touched(stack)))
    if stack.layers:
        yield "positions", _position_map(scheme, stack.training_length)


def _numbered(indices: Iterable[int]) -> str:
    listed = list(map(str, indices))
    return f"layer{'s' * (len(listed) > 1)} {', '.join(listed)}"


def _own_positions(stack: Stack, asked: Scheme, plan: Plan) -> Iterable[tuple[str, str]]:
    """What becomes of the checkpoint's own positions, where the scheme does not say."""
    added = [part for part in plan.scheme.parts() if part not in asked.parts()]
    if stack.absolute is not None:
        return [("rows", "the checkpoint's own come first" if asked.keeps_rows else "in place of the checkpoint's own")]
    if stack.rotary:
        if asked.refines and added:
            return [("frequencies", f"{part}, the checkpoint's own, refined") for part in added]
        stand_in = "the bias" if "bias" in asked.slots else "positions that join at the input"
        return [("rotation", f"replaced by {stand_in}; list RoPE() beside it to keep both")] if NoPE() in added else []
    if "bias" in plan.scheme.slots:
        return [("bias", f"{part}, the checkpoint's own, stays") for part in added if "bias" in part.slots]
    native = stack.native.name if stack.native else "it"
    if "embedding" in asked.slots:
        return [("bias", f"replaced by positions that join at the input; list {native} beside it to keep both")]
    rotation = f"a rotation of base {BASE:g}" if RoPE() in added else "the rotation"
    return [("bias", f"replaced by {rotation}; list {native} beside it to keep both")]


def _left_alone(plan: Plan) -> Iterable[str]:
    reasons: dict[str, list[int]] = {}
    for index, reason in plan.left_alone.items():
        reasons.setdefault(reason, []).append(index)
    return (f"{_numbered(indices)}: {reason}" for reason, indices in reasons.items())


def _position_map(scheme: Scheme, training_length: int) -> str:
    m = 4 * training_length
    pairs = [(m, m - distance) for distance in (1, training_length // 4, training_length, 2 * training_length, m)]
    return "  ".join(f"({m}, {n}): {rotated_distance(scheme, m, n)}" for m, n in pairs)


def rotated_distance(scheme: Scheme, m: int, n: int) -> str:
    """phi_q(m) - phi_k(n) of the region that holds (m, n), as text; `hidden` where no region does.

    Args:
        scheme: any.
        m, n: positions of the query and of the key.
    """
    if "segments" not in scheme.slots:
        return f"{m - n:g}"
    query, key = torch.tensor([m]), torch.tensor([n])
    for region in scheme.segments():
        if region.contains(query, key):
            return f"{float(region.query_map(query) - region.key_map(key)):g}"
    return "hidden"
