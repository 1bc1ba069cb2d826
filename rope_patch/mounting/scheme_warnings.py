"""Warnings for patches that have no effect, shorten a checkpoint, remove the positions that it was trained with, scale
more than scores, or keep rounded frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rope_patch.models.base import Stack
from rope_patch.models.rounding import rounding_sentence
from rope_patch.mounting.plan import Plan
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.reach import shortened, spelled
from rope_patch.schemes.rope import NoPE, RoPE
from rope_patch.schemes.slots import Region

_SAMPLES = 1025


def scheme_warning(scheme: Scheme, mounted: Sequence[tuple[Stack, Plan]]) -> str:
    """The warning about a patch, a sentence without a full stop, which `describe` shows too; empty if nothing is wrong.
    `mounted` has the parts of a model, as they were read before the patch, each with its plan.
    """
    groups = _by_scheme(mounted)
    names = "+".join(part.name for part in scheme.parts())
    rounded = next(filter(None, (_rounded(stack, plan, names) for stack, plan in groups)), "")
    scaled = next(filter(None, (_scaled_values(stack, plan, names) for stack, plan in groups)), "")
    return "; ".join(filter(None, (_unwanted(scheme, names, mounted), scaled, rounded)))


def _unwanted(scheme: Scheme, names: str, mounted: Sequence[tuple[Stack, Plan]]) -> str:
    groups = _by_scheme(mounted)
    longest = 2 * max(stack.checkpoint.max_length for stack, _ in groups)
    if changes_nothing(mounted, longest):  # a scheme for longer texts acts within them
        return f"{spelled(scheme)} changes nothing in texts of up to {longest} tokens, twice the model's maximum"
    if shorter := next(filter(None, (shortened(plan.scheme, stack.checkpoint) for stack, plan in groups)), ""):
        return shorter
    if lost := next(filter(None, (lost_positions(stack, plan.scheme) for stack, plan in groups)), ""):
        return f"{names} replaces {lost} that the model was trained with: it needs training under {names}"
    for stack, plan in groups:  # a part that acts from the first token on expects weights that were trained under it
        own = stack.native.resolve(stack.checkpoint).parts() if stack.native else ()
        foreign = (part for part in plan.scheme.parts() if part.regime == "from-scratch" and part not in own)
        if not all(part.learns for part in foreign):
            return f"{names} is for training from scratch: a pretrained model needs training under {names}"
    return ""


def scaled_in_vain(mounted: Sequence[tuple[Stack, Plan]]) -> str:
    """The learned positions, such as T5's bias, that a scheme replaces by a scaled rotation which the model never had;
    empty elsewhere. `mounted` is as in `scheme_warning`.
    """
    for stack, plan in _by_scheme(mounted):
        rotations = [part for part in plan.scheme.parts() if "frequencies" in part.slots]
        scales = any(part.regime != "from-scratch" and type(part) is not RoPE for part in rotations)
        learned = stack.native is not None and stack.native.learns and not stack.rotary
        if scales and learned and (lost := lost_positions(stack, plan.scheme)):
            return lost.replace("the", "a learned", 1)
    return ""


def changes_nothing(mounted: Sequence[tuple[Stack, Plan]], longest: int) -> bool:
    """Whether the patched model computes the same as the plain model in texts of up to `longest` tokens; `mounted` is
    as in `scheme_warning`.
    """
    return all(_is_idle(stack, plan, longest) for stack, plan in _by_scheme(mounted))


def _by_scheme(mounted: Sequence[tuple[Stack, Plan]]) -> list[tuple[Stack, Plan]]:
    return [group for stack, plan in mounted for group in plan.by_layer or ((stack, plan),)]


def lost_positions(stack: Stack, scheme: Scheme) -> str:
    """The positions of the checkpoint that a planned scheme removes, in words; empty if it keeps them."""
    if stack.absolute is not None:
        return "" if scheme.keeps_rows else "the table of positions"
    if stack.rotary:
        return "the rotation" if NoPE() in scheme.parts() else ""
    return "" if type(stack.native) in map(type, scheme.parts()) else "the bias"


def _scaled_values(stack: Stack, plan: Plan, names: str) -> str:
    """A warning about a temperature in cos and sin, if values rotate as well; else an empty string."""
    if not plan.rotary or plan.is_native(stack):
        return ""
    specs = dict.fromkeys(layer.spec for layer in plan.touched(stack) if layer.turns_values)
    scales = (float(plan.scheme.frequencies_on(spec).attention_scaling) for spec in specs)
    scale = next((scale for scale in scales if scale != 1), 1.0)
    if scale == 1:
        return ""
    family = type(stack.module).__name__
    return (
        f"{names} multiplies cos and sin by {scale:.4g}, by which {family} rotates its values, too: they grow with the "
        "scores; attention_factor=1 leaves them alone"
    )


def _rounded(stack: Stack, plan: Plan, names: str) -> str:
    """A warning about rounded frequencies of the checkpoint, if layers still rotate by them under a plan; else an empty
    string.
    """
    if plan.frequencies == "late" or (plan.rotary and not plan.is_native(stack)):
        return ""
    found = (layer.rotary.rounding for layer in plan.touched(stack) if layer.rotary is not None)
    rounding = next(filter(None, found), None)
    return "" if rounding is None else rounding_sentence(rounding, stack.checkpoint.max_length, names)


def _is_idle(stack: Stack, plan: Plan, longest: int) -> bool:
    if stack.native is None:
        return False
    scheme, own = plan.scheme, stack.native.resolve(stack.checkpoint)
    if scheme == own:
        return True
    if not stack.rotary or plan.numbers or scheme.learns or scheme.decays:
        return False
    if scheme.slots - {"frequencies", "segments", "query_scale"}:
        return False
    positions = torch.linspace(0, longest - 1, _SAMPLES).long()
    return (
        ("frequencies" not in scheme.slots or _rotate_alike(scheme, own, stack, plan, longest))
        and ("segments" not in scheme.slots or _keep_distances(scheme.at_length(longest).segments(), positions))
        and ("query_scale" not in scheme.slots or bool((scheme.query_scale(positions, 1) == 1).all()))
    )


def _rotate_alike(scheme: Scheme, other: Scheme, stack: Stack, plan: Plan, length: int) -> bool:
    """Whether two schemes have the same frequencies in a text of this length."""
    for spec in {layer.spec for layer in plan.touched(stack)}:
        ours, theirs = (each.frequencies_on(spec, torch.tensor([length])) for each in (scheme, other))
        apart = ours.inv_freq * ours.attention_scaling - theirs.inv_freq * theirs.attention_scaling
        if (apart.abs() > 1e-6 * theirs.inv_freq).any():
            return False
    return True


def _keep_distances(regions: Sequence[Region], positions: torch.Tensor) -> bool:
    """Whether the last position sees all of these `positions` at their true distances."""
    m, kept = positions[-1:], torch.zeros_like(positions, dtype=torch.bool)
    for region in regions:
        moved, distance = region.rotated_distance(m, positions), m - positions
        alike = moved == distance if region.pairs is None else (moved == distance[:, None]).all(dim=-1)
        kept |= region.contains(m, positions) & alike
    return bool(kept.all())
