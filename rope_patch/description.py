"""A description of a model's positions, as a table to print."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from rope_patch.errors import InvalidField, RopePatchError, counted
from rope_patch.models.base import AttentionLayer, Stack
from rope_patch.models.config import BASE
from rope_patch.models.find_stacks import find_stacks
from rope_patch.models.record import Record
from rope_patch.models.rope_parameters import native_scheme_of
from rope_patch.mounting.layer_state import LayerState
from rope_patch.mounting.parameters import LearnedWeights, inventory, path_of_table
from rope_patch.mounting.plan import Plan
from rope_patch.mounting.registration import asks_by_name
from rope_patch.mounting.scheme_warnings import lost_positions, scheme_warning
from rope_patch.patching import PatchHandle, find_handles, loaded
from rope_patch.schemes.base import TRAINING, Scheme
from rope_patch.schemes.reach import scaling_of, spelled
from rope_patch.schemes.rope import NoPE, RoPE
from rope_patch.schemes.rules import rules_of
from rope_patch.schemes.slots import Tokens
from rope_patch.schemes.target import resolved
from rope_patch.typing import RotarySpec, Weights

Rows = Sequence[tuple[str, str]]


class Description(str):
    """A text of tables. A notebook shows the tables as HTML if the description is the last line of a cell.

    Attributes:
        tables: the rows of each part of a model; a row is a name and a value.
    """

    tables: Sequence[Rows]

    @classmethod
    def from_tables(cls, tables: Sequence[Rows]) -> Description:
        """Format some tables as text, and keep the tables with it."""
        description = cls("\n\n".join(map(_as_text, tables)))
        description.tables = tables
        return description

    __repr__ = str.__str__

    def _repr_html_(self) -> str:
        cell = "<td style='text-align: left'>{}</td>".format
        rows = [
            "".join(f"<tr>{cell(name)}{cell(html.escape(value))}</tr>" for name, value in each) for each in self.tables
        ]
        return "".join(f"<table>{each}</table>" for each in rows)


def _as_text(rows: Rows) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in rows)


def describe(model: nn.Module | PatchHandle) -> Description:
    """Describe a model in a table: each scheme with its slots, fields and source, the mount, the layers left alone, and
    some numbers.

    The numbers are the ones that a scheme changes: frequencies and wavelengths of a few pairs, slopes or biases, query
    scales at a few positions, and the position map phi_q(m) - phi_k(n), the distance that is rotated, for some pairs
    (m, n). An encoder and a decoder have a table each.

    Args:
        model: a model, patched or not, or a handle.

    Raises:
        UnsupportedModel: the model has no stack that a scheme can be mounted on.
    """
    model = loaded(model)
    mounted = {
        stack.module: _table(model, stack, handle.scheme, plan, handle.layer_states)
        for handle in find_handles(model)
        for stack, plan in handle.mounted
    }
    return Description.from_tables(
        [
            mounted.get(module) or _table(model, stack := style.read(module), native_scheme_of(stack), None, ())
            for style, module in find_stacks(model)
        ]
    )


def _table(model: nn.Module, stack: Stack, asked: Scheme, plan: Plan | None, states: Sequence[LayerState]) -> Rows:
    part_of = f", {stack.part}" if stack.part else ""
    content = counted(len(stack.layers), "attention layer") if stack.layers else "a table of positions"
    rows = [
        ("model", f"{type(model).__name__}{part_of}, {content}"),
        ("training length", _lengths(stack)),
        ("state", f"patched, mounted {plan.mounts()}" if plan else _unpatched(model, stack)),
    ]
    if plan and (words := scheme_warning(asked, [(stack, plan)])):
        rows.append(("warning", words))
    filled = resolved(asked, stack.checkpoint)
    by_layer = filled.of_layers({layer.index: layer.kind for layer in stack.layers}, stack.config.num_hidden_layers)
    for part, its_plan in plan.by_layer if plan else ():
        chosen = by_layer[part.layers[0].index] or its_plan.scheme
        rows.append((_numbered(layer.index for layer in part.layers), f"{chosen}, mounted {its_plan.mounts()}"))
        rows += _under(chosen, part, its_plan, states)
    if not (plan and plan.by_layer):
        rows += _under(filled, stack, plan, states)
    if plan:
        rows += [("left alone", line) for line in _by_reason(plan.left_alone)]
    unscored = {layer.index: layer.unscored for layer in stack.layers if layer.unscored}
    return [*rows, *(("frequencies only", line) for line in _by_reason(unscored))]


def _lengths(stack: Stack) -> str:
    """Name the training length; for a checkpoint that was extended before, both of its lengths."""
    if stack.max_length == stack.training_length:
        return f"{stack.max_length} tokens"
    return (
        f"{stack.max_length} tokens today ({scaling_of(stack.checkpoint)}), {stack.training_length} before that scaling"
    )


def _unpatched(model: nn.Module, stack: Stack) -> str:
    """Describe the state of a model that carries no scheme; its config may record one."""
    try:
        record = Record.find(model)
    except RopePatchError as error:
        return f"not patched; its config records a scheme that cannot be read: {error}"
    if record is None:
        return "not patched; this is its native scheme"
    if record.positions is not None:
        return f"not patched; its table has the rows of {spelled(record.scheme)}, which repatch(model) applies"
    records = f"not patched; its config records {spelled(record.scheme)}, which"
    if record.is_stated(stack.config):
        return f"{records} Transformers applies by itself"
    if asks_by_name(model):
        return f"{records} its first call mounts"
    return f"{records} is not applied: use repatch(model)"


def _under(scheme: Scheme, stack: Stack, plan: Plan | None, states: Sequence[LayerState]) -> Iterable[tuple[str, str]]:
    """The rows on layers under one scheme, whose defaults are filled in; `states` has all patched layers."""
    own = set(map(id, stack.layers))
    states = [state for state in states if id(state.layer) in own]
    lost = plan is not None and lost_positions(stack, plan.scheme)
    for part in scheme.parts():
        training = "needed on this model, see the warning" if lost and part.regime == "training-free" else None
        yield "scheme", f"{part} ({type(part).__name__})"
        rules = rules_of(type(part))
        changed = (field.name for field in dataclasses.fields(part) if getattr(part, field.name) != field.default)  # type: ignore[arg-type]
        if fields := "; ".join(f"{name}: {rules[name].allowed()}" for name in changed if name in rules):
            yield "  fields", fields
        yield "  slot", ", ".join(sorted(part.slots))
        yield "  equation", part.equation
        yield "  training", training or TRAINING[part.regime]
        yield "  source", f"{part.source.title} ({part.source.year}) {part.source.link}"
    if plan and stack.max_length != stack.training_length:
        counted_from = stack.checkpoint.under(scheme).training_length
        keeps = counted_from == stack.max_length
        yield (
            "counts from",
            f"{counted_from} tokens: {'keeps' if keeps else 'replaces'} the checkpoint's own frequencies",
        )
    if plan:
        yield from _own_positions(stack, scheme, plan)
        if states:
            layers = [state.layer for state in states]
            yield from (("learned", line) for line in inventory(plan.scheme, stack, layers))
    if stack.absolute:
        yield "table", counted(stack.absolute.capacity, "position")
    if stack.layers:
        full = [layer for layer in stack.layers if layer.kind == "full_attention"] or stack.layers
        with suppress(InvalidField):  # the first text names the fields that do not fit these heads
            if states:
                yield from _numbers(
                    states[0].scheme,
                    stack,
                    states[0].layer,
                    states[0].learned.at_rest(states[0].layer.module, stack.module),
                )
            else:
                weights = LearnedWeights(table=path_of_table(stack, full[0]))
                yield from _numbers(scheme, stack, full[0], weights.at_rest(full[0].module, stack.module))
        m = 4 * stack.max_length
        pairs = [(m, m - distance) for distance in (1, m // 16, m // 4, m // 2, m)]
        yield "positions", "  ".join(f"({m}, {n}): {rotated_distance(scheme, m, n)}" for m, n in pairs)


@torch.no_grad()
def _numbers(scheme: Scheme, stack: Stack, layer: AttentionLayer, weights: Weights) -> Iterable[tuple[str, str]]:
    """The rows on the numbers of a scheme in a layer, at a few pairs, heads, distances and positions."""
    trained = stack.max_length
    if any(value.is_meta for value in weights.values()):
        return
    places = torch.tensor([1, trained // 4, trained, 4 * trained])
    if "frequencies" in scheme.slots:
        yield from _frequencies(scheme, layer.spec, weights)
    if "query_scale" in scheme.methods:
        yield "query scale", _listed("position", places, scheme.query_scale(places, layer.heads.num, weights)[0])
    if "bias" in scheme.methods:
        biases = scheme.bias(places, layer.heads.num, weights)
        if scheme.linear:
            yield "slopes", _listed("head", range(len(biases)), -biases[:, 0])
        else:
            yield "bias, head 0", _listed("distance", places, biases[0])
    if "embedding" in scheme.methods and not (scheme.learns or scheme.stateful):
        states = torch.zeros(1, len(places), stack.config.hidden_size)
        added = scheme.embedding(Tokens(states, places[None]))[0, :, 0]
        yield "added", _listed("to the first dimension at position", places, added)


def _frequencies(scheme: Scheme, spec: RotarySpec, weights: Weights) -> Iterable[tuple[str, str]]:
    length = 4 * spec.training_length
    frequencies = scheme.frequencies_on(spec, torch.tensor([length]) if scheme.length_dependent else None, weights)
    by_head = frequencies.inv_freq.reshape(-1, frequencies.inv_freq.shape[-1])
    inv_freq, scaling = by_head[0], torch.as_tensor(frequencies.attention_scaling).flatten()[0]
    if not inv_freq.any():
        yield "frequencies", "all 0: nothing rotates"
        return
    last, where = len(inv_freq) - 1, f"; in a text of {length} tokens" if scheme.length_dependent else ""
    pairs = sorted({last * part // 4 for part in range(5)})
    heads = f", head 0 of {len(by_head)}" if scheme.by_head else ""
    yield "frequencies" + heads, _listed("pair", pairs, inv_freq[pairs]) + where
    yield "wavelengths", _listed("pair", pairs, 2 * torch.pi / inv_freq[pairs]) + " tokens"
    if frequencies.decay is not None:
        yield "decay", _listed("pair", pairs, frequencies.decay[pairs]) + " per token"
    if scaling != 1:
        yield "scaling", f"cos and sin times {scaling:.4g}"


def _listed(what: str, places: Iterable[Any], values: torch.Tensor) -> str:
    return f"{what} " + ", ".join(f"{place}: {value:.4g}" for place, value in zip(places, values.tolist(), strict=True))


def _numbered(indices: Iterable[int]) -> str:
    listed = list(map(str, indices))
    return f"layer{'s' * (len(listed) > 1)} {', '.join(listed)}"


def _own_positions(stack: Stack, asked: Scheme, plan: Plan) -> Iterable[tuple[str, str]]:
    """The rows on the checkpoint's own positions: replaced, refined or kept."""
    added = [part for part in plan.scheme.parts() if part not in asked.parts()]
    if stack.absolute is not None:
        return [("rows", "the checkpoint's own come first" if asked.keeps_rows else "instead of the checkpoint's own")]
    if stack.rotary:
        if asked.refines and added:
            return [("frequencies", f"{part}, the checkpoint's own, refined") for part in added]
        stand_in = "the bias" if asked.brings_bias else "positions added at the input"
        return [("rotation", f"replaced by {stand_in}; list RoPE() as well to keep both")] if NoPE() in added else []
    if plan.scheme.brings_bias:
        return [("bias", f"{part}, the checkpoint's own, stays") for part in added if "bias" in part.slots]
    native = stack.native.name if stack.native else "it"
    if "embedding" in asked.slots:
        return [("bias", f"replaced by positions added at the input; list {native} as well to keep both")]
    rotation = f"a rotation of base {BASE:g}" if RoPE() in added else "the rotation"
    return [("bias", f"replaced by {rotation}; list {native} as well to keep both")]


def _by_reason(reasons: dict[int, str]) -> Iterable[str]:
    """Group layers by their reason, a line for each reason."""
    layers: dict[str, list[int]] = {}
    for index, reason in reasons.items():
        layers.setdefault(reason, []).append(index)
    return (f"{_numbered(indices)}: {reason}" for reason, indices in layers.items())


def rotated_distance(scheme: Scheme, m: int, n: int) -> str:
    """The rotated distance phi_q(m) - phi_k(n) of the region that holds (m, n), as text: a range if pairs of dimensions
    differ, `hidden` if no region holds it, or if a mask hides the pair from all heads.

    Args:
        scheme: a scheme.
        m, n: the positions of the query, which is the last token of a text, and of the key.
    """
    query, key = torch.tensor([m]), torch.tensor([n])
    if scheme.only_masks and "bias" in scheme.methods and scheme.bias(query - key, 1).isneginf().all():
        return "hidden"
    if "segments" not in scheme.slots:
        return f"{m - n:g}"
    for region in scheme.at_length(m + 1).segments():
        if region.contains(query, key):
            least, most = region.rotated_distance(query, key).aminmax()
            return f"{float(least):g}" if least == most else f"{float(least):g} to {float(most):g}"
    return "hidden"
