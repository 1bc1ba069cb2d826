"""Plan where a scheme is mounted on a model, as a pure function, and mount it.

The late mount is the reference. The rotary mount gives the same result where it applies, and costs nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch import nn

from rope_patch.attention.forward import StackForwards
from rope_patch.attention.problem import AttentionMode
from rope_patch.errors import InvalidField, NothingToPatch, UnsupportedModel, did_you_mean
from rope_patch.models.arguments import parameters_of
from rope_patch.models.base import AttentionLayer, RotaryTables, Stack
from rope_patch.models.cached_keys import OWN_ROTATION, cache_tag
from rope_patch.models.config import scheme_of_layer_type
from rope_patch.models.module_state import ModuleState
from rope_patch.models.rope_parameters import entry_of, rebuilt_numbers
from rope_patch.mounting.entry import install_entry, install_table
from rope_patch.mounting.hooks import LayerHook, StackHook, TagHook
from rope_patch.mounting.kept_tables import KeptTables
from rope_patch.mounting.layer_state import LayerState, OwnTables, Rotation
from rope_patch.mounting.parameters import install_parameters
from rope_patch.mounting.registration import IMPLEMENTATION, Registration
from rope_patch.mounting.running_stack import StackLink, link_modules, watch_layers
from rope_patch.mounting.scoring import late_attention
from rope_patch.mounting.stack_positions import CountTokens, pass_positions, set_aside
from rope_patch.mounting.undo import Changes
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.compose import Compose
from rope_patch.schemes.reach import spelled
from rope_patch.schemes.rope import NoPE, RoPE
from rope_patch.schemes.target import resolved
from rope_patch.schemes.tools.positions import Identity

Mount = Literal["auto", "late"]

_UNROTATED = "layer without positions"


@dataclass(frozen=True)
class Plan:
    """The changes planned for each layer.

    Attributes:
        scheme: the scheme with its defaults filled in, composed with `nope` if a bias replaces the rotation.
        rotary: the layer types whose tables change (None for the one set of all layers).
        late: indices of the layers whose attention is replaced.
        frequencies: the frequencies that the late layers read: the `model`'s, or the scheme's (`late`).
        left_alone: index and reason of every unchanged layer.
        numbers: the attributes that each layer's attention module computed from `rope_parameters` when it was built,
            with their values under this scheme.
        embedding: the way in which positions are added to tokens: as `rows` of the model's own table, at the `entry`,
            or not at all.
        by_layer: for a scheme by layer, the plan of each group of layers, with a stack of only those layers.
    """

    scheme: Scheme
    rotary: tuple[str | None, ...] = ()
    late: tuple[int, ...] = ()
    rotation: Rotation = "module"
    frequencies: Literal["model", "late"] = "model"
    left_alone: dict[int, str] = field(default_factory=dict)
    numbers: dict[int, dict[str, float]] = field(default_factory=dict)
    embedding: Literal["rows", "entry"] | None = None
    by_layer: tuple[tuple[Stack, Plan], ...] = ()

    def mounts(self) -> str:
        """Name the mounts in one phrase, for `describe`."""
        used = ["rotary"] * bool(self.rotary) + ["late"] * bool(self.late) + ["embedding"] * bool(self.embedding)
        return " + ".join(used) or "none"

    def is_native(self, stack: Stack) -> bool:
        """Whether the scheme is the checkpoint's own."""
        return stack.native is not None and self.scheme == stack.native.resolve(stack.checkpoint)

    def touched(self, stack: Stack) -> list[AttentionLayer]:
        """The layers that change."""
        return [layer for layer in stack.layers if layer.index not in self.left_alone]


def plan_mounts(scheme: Scheme, stack: Stack, mount: Mount = "auto") -> Plan:
    """Derive the mounts of a scheme from its slots.

    Args:
        scheme: the scheme, resolved or not.
        stack: a stack from `read_stacks`.
        mount: `auto`, the default, or `late` to score late even if the rotary module would suffice.

    Raises:
        NothingToPatch: every layer would stay unchanged.
        InvalidField: `mount` is unknown, or a field does not fit the checkpoint.
    """
    if mount not in ("auto", "late"):
        raise InvalidField(f"mount={mount!r}: {did_you_mean(str(mount), ('auto', 'late'))}")
    scheme = resolved(scheme, stack.checkpoint)
    if scheme.by_layer:
        return _plan_by_layer(scheme, stack, mount)
    _check_fit(scheme, stack)
    if stack.absolute is not None:
        return Plan(scheme, embedding="rows")
    left_alone = {layer.index: reason for layer in stack.layers if (reason := _reason_to_leave(layer, stack))}
    _check_change(scheme, stack, left_alone)
    plan = _plan_layers(scheme, stack, mount, left_alone)
    _check_scores(plan, stack)
    return plan


def _plan_by_layer(scheme: Scheme, stack: Stack, mount: Mount) -> Plan:
    """Plan each group of layers under one scheme. A selected layer changes despite its window; a layer without rotation
    stays unchanged only if the scheme would rotate it.
    """
    if stack.absolute is not None:
        raise UnsupportedModel(
            f"{type(stack.module).__name__} adds positions to its input, not in layers; {spelled(scheme)} needs layers"
        )
    schemes = scheme.of_layers({layer.index: layer.kind for layer in stack.layers}, stack.config.num_hidden_layers)
    groups: dict[tuple[Scheme, bool], list[AttentionLayer]] = {}
    left_alone: dict[int, str] = {}
    for layer in stack.layers:
        chosen, rotates = schemes[layer.index], layer.rotates
        if chosen is None:
            left_alone[layer.index] = "selected as none"
        elif not rotates and (chosen := _without_rotation(chosen)) is None:
            left_alone[layer.index] = _UNROTATED
        else:
            groups.setdefault((chosen, rotates), []).append(layer)
    _check_change(scheme, stack, left_alone)
    if not stack.rotary and left_alone:  # layers of T5 share the first one's bias: all are scored here, or none
        native = cast(Scheme, stack.native).resolve(stack.checkpoint)
        left = [layer for layer in stack.layers if layer.index in left_alone]
        groups[native, True] = groups.get((native, True), []) + left
    plans = []
    for (chosen, rotates), layers in groups.items():
        others = tuple(layer for layer in stack.layers if layer not in layers)
        part = dataclasses.replace(stack, layers=tuple(layers), others=others)
        _check_fit(chosen, part)
        if "embedding" in chosen.slots:
            raise InvalidField(f"{spelled(scheme)}: {chosen} adds positions to the input, which all layers share")
        indices = tuple(layer.index for layer in layers)
        plans.append((part, _plan_layers(chosen, part, mount, {}) if rotates else Plan(chosen, late=indices)))
    plan = Plan(
        scheme=scheme,
        rotary=tuple(dict.fromkeys(layer_type for _, plan in plans for layer_type in plan.rotary)),
        late=tuple(sorted(index for _, plan in plans for index in plan.late)),
        left_alone=left_alone,
        by_layer=tuple(plans),
    )
    _check_scores(plan, stack)
    return plan


def _without_rotation(scheme: Scheme) -> Scheme | None:
    """The parts of a scheme that apply to a layer without rotation; None if there are none, or if they would rotate
    it.
    """
    parts = [part for part in scheme.parts() if part != NoPE()]
    if not parts or _rotates(scheme) or _moves_positions(scheme):
        return None
    return parts[0] if len(parts) == 1 else Compose(*parts)


def _check_change(scheme: Scheme, stack: Stack, left_alone: dict[int, str]) -> None:
    if len(left_alone) == len(stack.layers):
        reasons = "; ".join(sorted(set(left_alone.values())))
        raise NothingToPatch(f"{spelled(scheme)} would change no layer of {type(stack.module).__name__}: {reasons}")


def _plan_layers(scheme: Scheme, stack: Stack, mount: Mount, left_alone: dict[int, str]) -> Plan:
    scheme = (_on_rotation if stack.rotary else _on_bias)(scheme, stack)
    touched = [layer for layer in stack.layers if layer.index not in left_alone]
    if stack.rotary and scheme.refines:
        scheme = _refining_own(scheme, stack, touched)
    owns_frequencies = "frequencies" in scheme.slots
    # the rotary module can hold frequencies of one table for all rows and layers, without another reader
    left, ours = [x for x in (*stack.layers, *stack.others) if x not in touched], {layer.rotary for layer in touched}
    shared = any(layer.rotates and layer.rotary in ours for layer in left)
    by_tables = owns_frequencies and mount == "auto" and not shared and _is_static(scheme, stack, touched)
    frequencies: Literal["model", "late"] = "late" if owns_frequencies and not by_tables else "model"
    rotation = _rotation(scheme, stack, frequencies, mount, touched)
    scores = scheme.slots - {"frequencies", "embedding"} or scheme.decays
    needs_late = rotation != "module" or not stack.rotary or scores
    return Plan(
        scheme=scheme,
        rotary=tuple(dict.fromkeys(layer.layer_type for layer in touched)) if by_tables else (),
        late=tuple(layer.index for layer in touched) if needs_late else (),
        rotation=rotation,
        frequencies=frequencies,
        left_alone=left_alone,
        numbers=_numbers(scheme, touched) if stack.rotary else {},
        embedding="entry" if "embedding" in scheme.slots else None,
    )


def _numbers(scheme: Scheme, layers: Sequence[AttentionLayer]) -> dict[int, dict[str, float]]:
    """The values of `Plan.numbers` by layer; layers of one class and kind share them."""
    owner = next((part for part in scheme.parts() if "frequencies" in part.slots and not part.refines), None)
    if owner is None:
        return {}
    scaling: dict[str, Any] = {**owner.fields(), "rope_type": owner.rope_type or owner.name}
    scaling["factor"] = scaling.get("factor") or 1.0  # Transformers 5.20 reads it before it knows whether it needs it
    kinds = {(type(layer.module), layer.kind): layer for layer in layers}
    by_kind = {kind: rebuilt_numbers(layer, scaling) for kind, layer in kinds.items()}
    longer = {**scaling, "factor": 2 * scaling["factor"]}
    if owner.rope_type is None and any(
        rebuilt_numbers(layer, longer) != by_kind[kind] for kind, layer in kinds.items()
    ):
        raise UnsupportedModel(
            f"{owner}: {type(layers[0].module).__name__} computes a temperature from mscale_all_dim when it is built, "
            "so the factor must be fixed; leave mscale_all_dim out, or use yarn"
        )
    return {layer.index: numbers for layer in layers if (numbers := by_kind[type(layer.module), layer.kind])}


def _is_static(scheme: Scheme, stack: Stack, touched: Sequence[AttentionLayer]) -> bool:
    """Whether tables like the model's can hold the frequencies of these layers, for every row and head."""
    follows = scheme.length_dependent or scheme.learned_frequencies or scheme.by_head
    is_one = not (follows or _reads_unrotated(scheme)) and all(tables.fixed is None for tables in stack.rotary)
    return (
        bool(stack.rotary)
        and is_one
        # a norm after the rotation undoes an attention scaling
        and all(scheme.frequencies_on(layer.spec).attention_scaling == 1 for layer in touched if layer.normed)
    )


def _rotation(
    scheme: Scheme, stack: Stack, frequencies: str, mount: Mount, touched: Sequence[AttentionLayer]
) -> Rotation:
    if not stack.rotary:
        return "late" if _rotates(scheme) else "module"
    moves, unrotated = _moves_positions(scheme), _reads_unrotated(scheme)
    if moves and not unrotated and mount == "auto" and frequencies == "model":
        return "anchored"
    if not moves and mount == "auto" and frequencies == "late" and _is_static(scheme, stack, touched):
        return "own"
    return "late" if moves or unrotated or mount == "late" or frequencies == "late" else "module"


def _reads_unrotated(scheme: Scheme) -> bool:
    """Whether the scheme has both a content bias and a rotation: the bias reads queries and keys before they rotate."""
    return "content_bias" in scheme.methods and NoPE() not in scheme.parts()


def _rotates(scheme: Scheme) -> bool:
    return any("frequencies" in part.slots and not part.stills for part in scheme.parts())


def _check_fit(scheme: Scheme, stack: Stack) -> None:
    family, heads = type(stack.module).__name__, stack.checkpoint.num_heads
    if stack.absolute is not None and not (scheme.slots == {"embedding"} and scheme.is_table):
        raise UnsupportedModel(
            f"{family} adds learned positions to its input; {spelled(scheme)} fills {', '.join(sorted(scheme.slots))}, "
            "but only the rows of that table can be replaced; 'hierarchical' does, and reaches L^2 tokens"
        )
    if "embedding" in scheme.slots and not scheme.every_block:
        accepted = inspect.signature(stack.module.forward).parameters
        if "inputs_embeds" not in accepted or "per_layer_inputs" in accepted:
            raise UnsupportedModel(f"{family} does not read vectors instead of tokens, as {spelled(scheme)} needs")
    if stack.rotary and stack.native is None and scheme.frequency_owner is not None:
        kind = entry_of(stack.config.rope_parameters).get("rope_type")
        raise UnsupportedModel(
            f"{family}: rope_type={kind!r} is not known here, so {spelled(scheme)} cannot be derived from it; use a "
            "scheme without its own frequencies, which keeps the model's"
        )
    undeclared = [tables for tables in stack.rotary if not tables.as_declared]
    if undeclared and _rotates(scheme):
        sizes = "; ".join(f"{len(each.inv_freq)} pairs of {each.layer_type or 'all layers'}" for each in undeclared)
        raise UnsupportedModel(
            f"{family} rotates with other frequencies than its config describes ({sizes}), so {spelled(scheme)} "
            "cannot be derived from it; use a scheme without its own frequencies, which keeps the model's"
        )
    if scheme.causal_only and stack.checkpoint.bidirectional:
        raise UnsupportedModel(
            f"{family} sees both directions, but {spelled(scheme)} is undefined for keys after the query"
        )
    if scheme.by_head and (other := next((each for each in stack.layers if each.heads.num != heads), None)):
        raise UnsupportedModel(
            f"{family}: {other.name} has {other.heads.num} heads, but {spelled(scheme)} has factors for {heads} heads"
        )
    by_head = scheme.by_head or scheme.brings_bias or "values" in scheme.slots
    by_head = by_head or (scheme.learns and scheme.slots != {"embedding"})
    weights = [weight for layer in stack.layers for weight in layer.module.parameters()] if by_head else []
    meshes = {mesh for weight in weights if (mesh := getattr(weight, "device_mesh", None)) is not None}
    if any("tp" in (mesh.mesh_dim_names or ()) and mesh["tp"].size() > 1 for mesh in meshes):
        raise UnsupportedModel(
            f"{family} is under tensor parallelism, so each process has some of the heads, but {spelled(scheme)} has "
            "values, factors or learned parameters of all of them; use data or context parallelism"
        )


def _check_scores(plan: Plan, stack: Stack) -> None:
    family = type(stack.module).__name__
    late = (layer for layer in stack.layers if layer.index in plan.late)
    if (layer := next((layer for layer in late if layer.unscored), None)) is None:
        return
    parts = plan.by_layer or ((stack, plan),)
    if any(layer in part.layers and its_plan.rotation == "own" for part, its_plan in parts):
        raise UnsupportedModel(
            f"{family}: {plan.scheme} rotates {layer.name} otherwise than layers with the same tables, which is not "
            f"supported: {layer.unscored}; give all layers of these tables one scheme of static frequencies"
        )
    raise UnsupportedModel(
        f"{family}: {plan.scheme} scores {layer.name} here, which is not supported: {layer.unscored}; schemes of "
        "static frequencies (pi, ntk, abf) only replace the model's tables"
    )


def _on_rotation(scheme: Scheme, stack: Stack) -> Scheme:
    """Complete the scheme on a checkpoint with a rotation: a bias or an input embedding replaces that rotation, unless
    another part of the scheme moves the rotated positions.
    """
    if "frequencies" in scheme.slots:
        return scheme
    if (scheme.brings_bias or "embedding" in scheme.slots) and not _moves_positions(scheme):
        return Compose(scheme, NoPE())
    native, is_fixed = stack.native, any(tables.fixed for tables in stack.rotary)
    if "segments" in scheme.slots and native is not None and native.length_dependent and not is_fixed:
        # the model's own tables depend on the longest row that it ever saw
        return Compose(scheme, native.resolve(stack.checkpoint))
    return scheme


def _refining_own(scheme: Scheme, stack: Stack, touched: Sequence[AttentionLayer]) -> Scheme:
    """Compose a scheme that refines frequencies with the checkpoint's own scheme."""
    natives = {scheme_of_layer_type(stack.config, layer.layer_type) for layer in touched}
    native = natives.pop()
    if native is None or natives:
        raise UnsupportedModel(
            f"{type(stack.module).__name__} has layers with different rope_parameters, or with an unknown rope_type; "
            f"list the scheme whose frequencies {spelled(scheme)} should refine"
        )
    return scheme if native == RoPE() else Compose(native.resolve(stack.checkpoint), scheme)


def _on_bias(scheme: Scheme, stack: Stack) -> Scheme:
    """Complete the scheme on a checkpoint with a bias: a rotation, a bias or an input embedding replaces that bias, and
    any other scheme keeps it.
    """
    if "frequencies" in scheme.slots:
        return scheme
    if _moves_positions(scheme):
        return Compose(scheme, RoPE())
    if scheme.brings_bias:
        return scheme
    if "embedding" in scheme.slots:
        return Compose(scheme, NoPE())
    return Compose(scheme, cast(Scheme, stack.native).resolve(stack.checkpoint))


def _moves_positions(scheme: Scheme) -> bool:
    if "segments" not in scheme.slots or scheme.regions_by_length:
        return "segments" in scheme.slots
    return any(
        not (isinstance(region.query_map, Identity) and isinstance(region.key_map, Identity))
        for region in scheme.segments()
    )


def _reason_to_leave(layer: AttentionLayer, stack: Stack) -> str:
    if not layer.rotates:
        return _UNROTATED
    if layer.sliding_window is not None and layer.sliding_window <= stack.max_length:
        return f"sliding window of {layer.sliding_window} within the training length of {stack.max_length}"
    return ""


def install(plan: Plan, stack: Stack, attention: AttentionMode, changes: Changes) -> tuple[LayerState, ...]:
    """Carry out a plan and return the state of each layer that changes. On an error the caller undoes `changes`."""
    if stack.absolute is not None:
        install_table(plan.scheme, stack.absolute, changes)
        if stack.absolute.first is not None:
            changes.hook(stack.module, CountTokens(stack.absolute.first))
        return ()
    kept = {}
    for module in {module: None for rotary in stack.rotary for module in rotary.modules}:
        changes.log(module, ModuleState(module))  # its forward changes these
        kept[module] = KeptTables(module, plan.scheme, stack.checkpoint.max_length)
        changes.log(module, kept[module])
    for module, name, value in stack.replacements if plan.late else ():
        changes.set(module, name, value)
    changes.hook(stack.module, CountTokens(0 if stack.has_positions or plan.embedding else None))
    installed = [
        (its_plan, _install_layers(its_plan, part, attention, kept, changes))
        for part, its_plan in plan.by_layer or ((stack, plan),)
    ]
    for tables in kept.values():
        tables.install(changes)
    states = tuple(state for _, its_states in installed for state in its_states)
    late = [state for its_plan, its_states in installed if its_plan.late for state in its_states]
    # one cache holds the keys of all layers
    rotations = dict.fromkeys(state.kept for state in late) or (OWN_ROTATION,)
    tag = cache_tag(plan.scheme, ", or ".join(rotations))
    for state in states:
        state.cache_tag = tag
    if late or plan.embedding or any(its_plan.numbers for its_plan, _ in installed):
        link_modules((state.layer.module for state in states), stack, changes)
        watch_layers(plan.scheme, stack, changes)
    if late:
        _install_hooks(stack, late, changes)
    else:
        first = plan.touched(stack)[0]
        changes.hook(first.module, TagHook(StackLink(stack.module), first, tag, accepts_plain=plan.is_native(stack)))
    if stack.rotary and "position_ids" not in parameters_of(stack.module):
        changes.hook(stack.module, set_aside)
    return states


def _install_hooks(stack: Stack, states: Sequence[LayerState], changes: Changes) -> None:
    """Hook a stack, and the layers in it that are scored late."""
    # an unchanged or sliding layer needs the mask of all pairs; if all layers delegate, nothing here needs groups
    reads_groups = len(states) == stack.config.num_hidden_layers and all(state.reads_groups for state in states)
    scorers = tuple(state.layer.module for state in states)
    if not (reads_groups and any(state.scores for state in states)) or others_take_masks(stack.module, scorers):
        scorers = ()
    forwards = {id(state.forwards): state.forwards for state in states}
    changes.hook(stack.module, StackHook(tuple(forwards.values()), scorers, not stack.has_positions))
    registration = Registration(IMPLEMENTATION, late_attention)
    changes.log(stack.module, registration)
    for state in states:
        changes.hook(state.layer.module, LayerHook(state, registration))


def others_take_masks(stack: nn.Module, scorers: Sequence[nn.Module]) -> bool:
    """Whether the mask of a stack also reaches modules that are not among these attention modules or around them: a
    convolution or a state, which pads must not enter (Falcon-H1, Zaya), or an indexer. Cross-attention has its own
    mask.
    """
    ours = set(scorers)
    inner = (module for module in stack.modules() if module not in ours and ours.isdisjoint(module.modules()))
    taken = (inspect.signature(forward).parameters for forward in {type(module).forward for module in inner})
    crossing = {"key_value_states", "encoder_hidden_states"}
    return any(any("mask" in name for name in names) and crossing.isdisjoint(names) for names in taken)


def _install_layers(
    plan: Plan, stack: Stack, attention: AttentionMode, kept: Mapping[nn.Module, KeptTables], changes: Changes
) -> list[LayerState]:
    """Carry out a plan for layers under one scheme, without the hooks on their attention."""
    touched = plan.touched(stack)
    weights = install_parameters(plan.scheme, stack, touched, changes)
    if plan.late or plan.embedding:
        counts = plan.rotation == "module" and plan.scheme.slots <= {"frequencies", "query_scale"}
        pass_positions(plan.scheme, stack, counts, changes)
    if plan.embedding == "entry":
        install_entry(plan.scheme, stack, touched, weights, changes)
    for rotary in dict.fromkeys(layer.rotary for layer in touched if layer.rotary is not None):
        if plan.rotary:
            _install_rotary(plan, rotary, stack, kept, changes)
        elif plan.frequencies == "model":
            kept[rotary.module].read(rotary)
    for layer in touched:
        for name, value in plan.numbers.get(layer.index, {}).items():
            changes.set(layer.module, name, value)
    forwards, states, lives = StackForwards(), [], dict[int, Any]()
    own = _own_tables(plan, stack, touched) if plan.rotation == "own" else {}
    for layer in touched:
        config = cast(Any, getattr(layer.module, "config", stack.config))  # tables alone need none of the layer
        if plan.late:  # layers with one config still have one
            if id(config) not in lives:
                lives[id(config)] = copy.copy(config)
                lives[id(config)]._attn_implementation_internal = IMPLEMENTATION
            changes.set(layer.module, "config", lives[id(config)])
        states.append(
            LayerState(
                scheme=plan.scheme,
                layer=layer,
                rotation=plan.rotation,
                frequencies=plan.frequencies,
                learned=weights[layer.name],
                attention=attention,
                forwards=forwards,
                config=config,
                num_layers=max(each.index for each in (*stack.layers, *stack.others)) + 1,
                own_tables=own.get(layer.rotary),
            )
        )
    return states


def _own_tables(plan: Plan, stack: Stack, layers: Sequence[AttentionLayer]) -> dict[RotaryTables | None, OwnTables]:
    """Copy the rotary modules of layers that share the model's with others, and write the scheme's tables into the
    copies.
    """
    copies = {}
    for rotary in {cast(RotaryTables, layer.rotary) for layer in layers}:
        copied = dataclasses.replace(rotary, module=copy.deepcopy(rotary.module), copies=())
        tables = KeptTables(copied.module, plan.scheme, stack.checkpoint.max_length)
        _install_rotary(plan, copied, stack, {copied.module: tables}, Changes())
        copies[rotary] = OwnTables(copied)
    return cast("dict[RotaryTables | None, OwnTables]", copies)


def _install_rotary(
    plan: Plan, rotary: RotaryTables, stack: Stack, kept: Mapping[nn.Module, KeptTables], changes: Changes
) -> None:
    frequencies = plan.scheme.frequencies_on(rotary.spec(stack.training_length))
    for module in rotary.modules:
        kept[module].write(rotary, frequencies.inv_freq, plan.is_native(stack))
        changes.set(module, rotary.attribute("attention_scaling"), frequencies.attention_scaling)
        # the tables are static now: Transformers must not recompute them by length
        by_type = None if rotary.layer_type is None else {**cast(Any, module.rope_type), rotary.layer_type: "default"}
        changes.set(module, "rope_type", by_type or "default")
