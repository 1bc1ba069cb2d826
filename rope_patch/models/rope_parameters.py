"""Schemes as Transformers' `rope_parameters`, and `rope_parameters` as schemes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import nn

from rope_patch.errors import InvalidField, NotExpressible, NotPatched, UnsupportedModel, did_you_mean
from rope_patch.models.base import AttentionLayer, Stack
from rope_patch.models.config import (
    checkpoint_of_config,
    config_of_layer,
    configs_of_type,
    head_dim,
    length_today,
    scheme_of_layer_type,
    training_length,
)
from rope_patch.models.find_stacks import find_stacks, read_stacks
from rope_patch.models.record import Record, before_patch
from rope_patch.models.rope_entries import (
    SCALING,
    layer_types_of,
    main_layer_type,
    rope_entries,
    rotates_by,
    scheme_of_entry,
)
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.compose import Compose
from rope_patch.schemes.ntk import AdjustedBase
from rope_patch.schemes.per_layer import PerLayer
from rope_patch.schemes.reach import spelled
from rope_patch.schemes.registry import get_scheme, scheme_class
from rope_patch.schemes.target import resolved
from rope_patch.schemes.tools.rotary import periods
from rope_patch.typing import NO_WEIGHTS, RotarySpec, Weights

# types with which Transformers can express a share of the pairs: both are `proportional` with a factor
_SHARE_TYPES = ("default", "linear")
# a query scale that some checkpoints store with their frequencies, and its unit of length
_QUERY_SCALE = ("llama_4_scaling_beta", "original_max_position_embeddings")
_ORIGINAL = "original_max_position_embeddings"

STANDS_STILL = 1e12  # the factor of a pair whose frequency is 0: it turns by less than 1e-6 in a million tokens


def export_rope_parameters(
    scheme: Scheme | str | nn.Module, config: Any = None, as_lists: int | None = None, weights: Weights = NO_WEIGHTS
) -> dict[str, Any]:
    """Express a scheme as the `rope_parameters` with which plain Transformers, and other readers of its configs,
    compute it.

    Args:
        scheme: a scheme, or its spelling, with static frequencies or with Transformers' own length-dependent ones; or a
            patched model, for its scheme and its config.
        config: config of the unpatched checkpoint, or its model; it stays unchanged. If it nests the parameters by
            layer type, the parameters of layers with a window within the training length stay.
        as_lists: the longest context in tokens; the frequencies are then written as `equal_lists` instead of as the
            scheme's own type.
        weights: the parameters that all layers share, if the scheme learns frequencies; learned frequencies can only be
            written as lists.

    Returns:
        a dict for `config.rope_parameters`.

    Raises:
        NotExpressible: Transformers cannot express the scheme; the message names the reason.
        NotPatched: the model carries no scheme.
        InvalidField: a scheme came without a config, or behind it.
    """
    if isinstance(config, (str, Scheme)):
        raise InvalidField(
            f"export_rope_parameters({type(scheme).__name__}, {str(config)!r}): the scheme comes first: "
            f"write export_rope_parameters({str(config)!r}, model.config)"
        )
    if isinstance(scheme, nn.Module):
        scheme, config = _of_model(scheme)
    scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
    if isinstance(config, nn.Module):
        config = before_patch(find_stacks(config)[0][1].config)
    if config is None:
        raise InvalidField("a scheme alone has no base: write export_rope_parameters(scheme, model.config)")
    if not getattr(config, "rope_parameters", None):
        raise NotExpressible(f"{type(config).__name__} has no `rope_parameters`: its positions are not a rotation")
    kinds = set(getattr(config, "layer_types", None) or ())
    mixed = {"full_attention", "sliding_attention"} <= kinds and None in rope_entries(config)
    # a patch leaves layers with a window unchanged
    if not scheme.by_layer and mixed and _has_window("sliding_attention", config):
        window = configs_of_type(config, "sliding_attention")[0].sliding_window
        raise NotExpressible(
            f"{type(config).__name__} has one entry of rope_parameters for full and sliding-window layers; "
            f"the latter, with a window of {window} within the training length, must not be scaled"
        )
    shares = {entry.get("partial_rotary_factor", 1.0) for entry in rope_entries(config).values()}
    pairs = int(head_dim(config_of_layer(config, 0)) * shares.pop()) // 2 if len(shares) == 1 else None
    scheme = resolved(scheme, dataclasses.replace(checkpoint_of_config(config), pairs=pairs))
    exported = copy.deepcopy(config.rope_parameters)
    for layer_type, chosen in _by_entry(scheme, config).items():
        parameters = _exported(scheme, chosen, config, layer_type, as_lists, weights)
        if layer_type is None:
            exported = parameters
        else:
            exported[layer_type] = parameters
    _check_accepted(scheme, exported, config, None if as_lists is None else exported.get(_ORIGINAL))
    return exported


def _exported(
    scheme: Scheme, chosen: Scheme, config: Any, layer_type: str | None, as_lists: int | None, weights: Weights
) -> dict[str, Any]:
    """Express the scheme `chosen` for one entry of a config, a part of the resolved `scheme`; the other arguments are
    those of `export_rope_parameters`.
    """
    entry, name = rope_entries(config)[layer_type], spelled(scheme)
    share = entry.get("partial_rotary_factor", 1.0)
    is_share = entry.get("rope_type") == "proportional"  # a share of the pairs; otherwise of the dimensions
    dim = head_dim(configs_of_type(config, layer_type)[0])
    spec = RotarySpec(dim if is_share else int(dim * share), entry["rope_theta"], training_length(config))
    scaling = SCALING - set(_QUERY_SCALE if _QUERY_SCALE[0] in entry else ())
    unscaled = {key: value for key, value in entry.items() if key not in scaling}
    if as_lists is not None:
        if is_share:
            spec = dataclasses.replace(spec, rotating_pairs=int(share * dim // 2))
            unscaled["partial_rotary_factor"] = 1.0
        parameters = equal_lists(chosen, scheme_of_layer_type(config, layer_type), spec, as_lists, weights)
    else:
        parameters = chosen.rope_parameters(spec)
    if "factor" in parameters:
        parameters["factor"] = float(parameters["factor"])  # vLLM reads an int as a list of factors
    longest = getattr(config, "max_position_embeddings", None)
    if parameters.get("rope_type") == "dynamic" and longest != spec.training_length:
        raise NotExpressible(
            f"{name} grows from the training length of {spec.training_length}; `dynamic` of Transformers grows from "
            f"max_position_embeddings={longest}"
        )
    if as_lists is None and is_share and not chosen.chooses_pairs:
        if parameters.keys() - {"rope_type", "rope_theta", "factor"} or parameters["rope_type"] not in _SHARE_TYPES:
            raise NotExpressible(
                f"{name}: this checkpoint rotates only {share} of its pairs, which Transformers cannot combine with "
                f"the rope_type {parameters['rope_type']!r}"
            )
        parameters["rope_type"] = "proportional"
    elif not is_share and "partial_rotary_factor" in parameters and share != 1:
        raise NotExpressible(
            f"{name} is a share of the whole head in Transformers, but this checkpoint rotates only {share} of it"
        )
    if layer_type is not None and parameters.get("truncate") is False:
        raise NotExpressible(
            f"{name}: Transformers ignores truncate=False in rope_parameters nested by layer type, as in "
            f"{type(config).__name__}"
        )
    parameters = unscaled | parameters
    if getattr(config, "layer_rope_theta", None) and parameters["rope_theta"] != entry["rope_theta"]:
        raise NotExpressible(f"{name}: {type(config).__name__} has a rope_theta of its own for each layer")
    return parameters


def equal_lists(
    scheme: Scheme, native: Scheme | None, rotary: RotarySpec, length: int, weights: Weights = NO_WEIGHTS
) -> dict[str, Any]:
    """Express static frequencies as an entry of the type `longrope` whose lists for short and long texts are equal.

    Readers divide the checkpoint's frequencies by the lists. They agree on the frequencies, but not on the temperature
    a: Transformers reads `attention_factor`, vLLM and SGLang `short_mscale` and `long_mscale`, and others compute
    sqrt(1 + ln(M/o) / ln o) from M = `length` and o = `original_max_position_embeddings`. So o is M^(1/a^2), rounded,
    and not L; equal lists need no L.

    Args:
        scheme: the resolved scheme of one entry.
        native: the entry's own scheme, whose frequencies a scheme that only refines refines.
        rotary: the rotary embedding of the checkpoint.
        length: the longest context in tokens.
        weights: the argument of `export_rope_parameters`.

    Raises:
        NotExpressible: the scheme's frequencies depend on the length, decay, or are learned and no weights are given,
            or it fills other slots.
    """
    if scheme.refines and native is not None:
        scheme = Compose(native, scheme)
    untrained = scheme.learned_frequencies and not weights
    if scheme.slots != {"frequencies"} or scheme.length_dependent or untrained or scheme.decays:
        raise NotExpressible(f"{spelled(scheme)}: lists of factors are static frequencies, and nothing else")
    frequencies = scheme.frequencies_on(rotary, weights=weights)
    period, inv_freq = periods(rotary.dim, rotary.base), frequencies.inv_freq
    factors = 1 / (inv_freq.double() * period.double())
    factors = torch.where(inv_freq == 1 / period, 1.0, factors).clamp(max=STANDS_STILL)
    temperature = float(frequencies.attention_scaling)
    original = max(2, round(length ** (1 / max(temperature, 1.0) ** 2)))
    return {
        "rope_type": "longrope",
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "factor": length / original,
        "attention_factor": temperature,
        "short_mscale": temperature,
        "long_mscale": temperature,
        "original_max_position_embeddings": original,
    }


def entry_of(parameters: dict[str, Any]) -> dict[str, Any]:
    """The entry of full attention; if no entry has that name, the entry that reaches farthest. Some types have no
    entry.
    """
    if "rope_type" in parameters:
        return parameters
    entries = [entry for entry in parameters.values() if entry]
    return parameters.get("full_attention") or max(entries, key=lambda entry: entry.get("factor") or 0)


def stated_length(scheme: Scheme, parameters: dict[str, Any], config: Any) -> int | None:
    """The context of a checkpoint under a scheme, in tokens: its `max_position_embeddings`, factor times L; None if the
    scheme, without a target and as `parameters`, defines no length. The `config` is the config of the unpatched
    checkpoint.
    """
    if parameters == config.rope_parameters:
        return cast(int, config.max_position_embeddings)
    entry = entry_of(parameters)
    factor = entry.get("factor") or getattr(scheme, "factor", 1 if scheme.name == "rope" else None)
    trained = entry.get("original_max_position_embeddings") or training_length(config)
    return None if factor is None else round(factor * trained)


def _of_model(model: nn.Module) -> tuple[Scheme, Any]:
    """The scheme of a patched model, and its config from before the patch."""
    record = Record.find(model)
    if record is None:
        raise NotPatched(
            f"{type(model).__name__} carries no scheme: write export_rope_parameters(scheme, model.config), or patch it"
        )
    return record.scheme, before_patch(find_stacks(model)[0][1].config)


def scheme_of_parameters(parameters: dict[str, Any], config: Any) -> Scheme:
    """The scheme that Transformers computes from other `rope_parameters` on a checkpoint.

    Args:
        parameters: one entry, or one for each layer type, also with `type` for `rope_type`. Fields that an entry leaves
            out come from the checkpoint.
        config: config of the checkpoint, patched or not.

    Raises:
        UnknownScheme: no registered scheme has the `rope_type`.
        InvalidField: a field is unknown, missing or wrong, or belongs to the checkpoint.
        UnsupportedModel: the checkpoint does not rotate.
    """
    config = before_patch(config)
    own = rope_entries(config)
    if not parameters:
        raise InvalidField(
            "rope_parameters={} name no rope_type; write one, such as {'rope_type': 'yarn', 'factor': 4.0}"
        )
    if not all(isinstance(entry, dict) for entry in parameters.values()):
        return _scheme_given(parameters, own[main_layer_type(own)], config, None not in own)
    schemes: dict[str | int, Any] = {kind: None for name in own for kind in layer_types_of(name, config)}
    for layer_type, entry in parameters.items():
        if layer_type not in own:
            allowed = did_you_mean(layer_type, map(str, own)) if None not in own else "it has one entry for all layers"
            raise InvalidField(f"{type(config).__name__} has no rope_parameters of {layer_type!r}; {allowed}")
        scheme, unchanged = (_scheme_given(each, own[layer_type], config, True) for each in (entry, own[layer_type]))
        if scheme != unchanged:
            schemes |= dict.fromkeys(layer_types_of(layer_type, config), scheme)
    return PerLayer(schemes)


def _scheme_given(parameters: dict[str, Any], own: dict[str, Any], config: Any, nested: bool) -> Scheme:
    """Build the scheme of one entry that replaces an entry of the checkpoint."""
    entry = {name: value for name, value in parameters.items() if value is not None or name == "truncate"}
    kind = entry.pop("type", "default")
    cls = scheme_class(entry.setdefault("rope_type", kind))
    if cls.rope_type is None:
        raise InvalidField(f"Transformers has no rope_type={entry['rope_type']!r}; write {cls.name!r} and its fields")
    original = entry.pop(_ORIGINAL, None)
    fields = [each.name for each in dataclasses.fields(cls)]  # type: ignore[arg-type]
    natives = {"partial_rotary_factor": 1.0, **own}
    if natives["partial_rotary_factor"] != 1 and "partial_rotary_factor" in fields:
        raise InvalidField(
            f"rope_type={cls.rope_type!r} is a share of whole heads; this checkpoint rotates a share itself"
        )
    others = {name: value for name, value in entry.items() if name not in fields and value != natives.get(name)}
    others.pop("rope_type", None)
    base = others.pop("rope_theta", None) if cls.rope_type == "default" else None
    if others and not parameters.keys() & {"rope_type", "type"}:
        named = {name: value for name, value in parameters.items() if isinstance(value, str)}
        line = {"name": next(iter(named.values()))} if named else {"rope_type": "yarn"}
        line |= {name: value for name, value in parameters.items() if name not in named}
        raise InvalidField(f"{parameters} names no rope_type; write {line}")
    for name, value in others.items():
        allowed = did_you_mean(str(name), ["rope_type", *fields])
        raise InvalidField(
            f"rope_type={cls.rope_type!r} cannot set {name}={value!r}; here it is {natives.get(name)}; {allowed}"
        )
    if base is not None:
        return AdjustedBase(base=base)
    scheme = cast(Scheme, scheme_of_entry({**entry, "rope_type": cls.rope_type}, nested))
    # Transformers prefers what Phi-3 names beside the entry, and never reads it for `dynamic`
    beside = getattr(config, _ORIGINAL, None) or original or config.max_position_embeddings
    trained = config.max_position_embeddings if cls.rope_type == "dynamic" else beside
    if _ORIGINAL in fields and trained != training_length(config):
        scheme = dataclasses.replace(scheme, **{_ORIGINAL: trained})  # type: ignore[type-var]
    return scheme


def _by_entry(scheme: Scheme, config: Any) -> dict[str | None, Scheme]:
    """The scheme of each entry that changes, by layer type. Entries of layers with a window within L stay, unless
    layers are selected.
    """
    entries = rope_entries(config)
    if not scheme.by_layer:
        return {layer_type: scheme for layer_type in entries if not _has_window(layer_type, config)}
    number = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * number
    by_type: dict[str | None, Scheme] = {}
    schemes = scheme.of_layers(dict(enumerate(kinds)), number)
    for layer_type in entries:
        here = {schemes[index] for index, kind in enumerate(kinds) if rotates_by(kind, layer_type)}
        if len(here) > 1:
            raise NotExpressible(
                f"{spelled(scheme)}: {type(config).__name__} has one entry of rope_parameters for "
                f"{'all layers' if layer_type is None else f'layers of the type {layer_type}'}, which differ here"
            )
        by_type |= {layer_type: chosen for chosen in here if chosen is not None}  # noqa: B035 - one at most
    return by_type


_WINDOWS = {
    **dict.fromkeys(("sliding_attention", "main"), "sliding_window"),
    "chunked_attention": "attention_chunk_size",
}
"""The entries of layers with a window, and the field of the config that holds the window."""


def _has_window(layer_type: str | None, config: Any) -> bool:
    """Whether the layers of a type see no further than the training length, so that a patch leaves them unchanged.
    A type that only some of whose layers have such a window is refused.
    """
    name = _WINDOWS.get(layer_type or "")
    windows = [getattr(layer, name, None) for layer in configs_of_type(config, layer_type)] if name else []
    within = {window is not None and window <= length_today(config) for window in windows} or {False}
    if len(within) > 1:
        raise NotExpressible(f"{type(config).__name__}: windows of {layer_type} within the training length and beyond")
    return within.pop()


def _check_accepted(scheme: Scheme, exported: dict[str, Any], config: Any, beside: int | None) -> None:
    """Check that the config class reads the parameters unchanged; some refuse or convert types of Transformers. Phi-3
    prefers an L `beside` the parameters to the L in them.
    """
    family = type(config).__name__
    length = stated_length(scheme, exported, config) or config.max_position_embeddings
    written = {**config.to_dict(), "rope_parameters": copy.deepcopy(exported), "max_position_embeddings": length}
    if beside is not None:
        written[_ORIGINAL] = beside
    try:
        read = type(config).from_dict(written).rope_parameters
    except Exception as error:  # every config class has errors of its own
        reason = str(error).splitlines()[-1].strip()
        raise NotExpressible(f"{family} does not accept rope_parameters={exported}: {reason}") from error
    if any(read.get(key) != value for key, value in exported.items() if not isinstance(value, dict)):
        raise NotExpressible(f"{family} reads rope_parameters={exported} as {read}")


def stated_parameters(scheme: Scheme, stack: Stack, changed: Collection[str | None]) -> dict[str, Any] | None:
    """The `rope_parameters` that change the tables of the layer types `changed` as the scheme does, and no other
    tables; None if no parameters can.
    """
    if any(getattr(tables.module, "config", stack.config) is not stack.config for tables in stack.rotary):
        return None  # the stack makes a config of its own for this rotary module
    try:
        exported = export_rope_parameters(scheme, stack.config)
    except NotExpressible:
        return None
    stated = _by_entry(resolved(scheme, stack.checkpoint), stack.config).keys()
    return exported if {layer.layer_type for layer in stack.layers if layer.rotates} & stated == set(changed) else None


def native_scheme(model: nn.Module) -> Scheme:
    """The scheme that the checkpoint itself uses, read from the config of the `model`. Applying it changes nothing.

    Raises:
        UnsupportedModel: the model has no supported stack, or its rope_type is unknown.
    """
    return native_scheme_of(read_stacks(model)[0])


def native_scheme_of(stack: Stack) -> Scheme:
    """The scheme of one stack of a checkpoint.

    Raises:
        UnsupportedModel: the stack's rope_type is unknown.
    """
    if stack.native is None:
        kind = entry_of(stack.config.rope_parameters)["rope_type"]
        raise UnsupportedModel(f"no scheme here has the rope_type {kind!r} of this checkpoint")
    return stack.native


def rebuilt_numbers(layer: AttentionLayer, scaling: dict[str, Any]) -> dict[str, float]:
    """The numbers that the layer's attention module would have with another scaling in its config, by attribute,
    without the unchanged ones. Latent attention multiplies its softmax scale by the square of YaRN's temperature when
    it is built; a scheme that replaces the checkpoint's frequencies replaces this factor, too.

    Args:
        scaling: an entry of `rope_parameters`, without the fields that the checkpoint keeps, such as its base.
    """
    config = getattr(layer.module, "config", None)
    entries = {} if config is None else rope_entries(config)
    if layer.layer_type not in entries:
        return {}
    unscaled = {key: value for key, value in entries[layer.layer_type].items() if key not in SCALING}
    changed: dict[Any, Any] = {**entries, layer.layer_type: {**scaling, **unscaled}}
    try:
        before, after = _float_attributes(layer, entries), _float_attributes(layer, changed)
    except Exception:  # a class that needs more than its config reads no rotary parameters
        return {}
    return {name: value for name, value in after.items() if value != before.get(name)}


def _float_attributes(layer: AttentionLayer, entries: dict[Any, Any]) -> dict[str, float]:
    """The numbers that a new module of the layer's class computes, built without weights."""
    module = layer.module
    config = copy.copy(cast(Any, module.config))
    vars(config)["rope_parameters"] = entries.get(None, entries)
    needed = inspect.signature(type(module)).parameters.values()
    arguments = {each.name: getattr(module, each.name) for each in needed if each.default is each.empty}
    with torch.device("meta"):
        rebuilt = type(module)(**{**arguments, "config": config})
    return {name: value for name, value in vars(rebuilt).items() if isinstance(value, float)}
