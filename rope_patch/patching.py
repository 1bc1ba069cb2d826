"""Patch a loaded model in place, and undo the patch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch.attention.problem import AttentionMode
from rope_patch.attention.table import asked_attention
from rope_patch.context_parallel.support import reason_not_to_share
from rope_patch.errors import (
    AlreadyPatched,
    InvalidField,
    MissingField,
    NotPatched,
    UnsupportedModel,
    outside,
    warn,
)
from rope_patch.models.find_stacks import check_loaded, find_around, find_enclosing, find_stacks, read_stacks
from rope_patch.models.paged import forget_managers
from rope_patch.models.record import Record
from rope_patch.models.rope_parameters import scheme_of_parameters, stated_length, stated_parameters
from rope_patch.mounting.handle import CHANGING, HANDLE, Mounted, PatchHandle, find_handle, find_handles
from rope_patch.mounting.parameters import learned_parameters
from rope_patch.mounting.plan import Mount, install, plan_mounts
from rope_patch.mounting.registration import asks_by_name, own_attention
from rope_patch.mounting.saved import Notice, install_saving
from rope_patch.mounting.scheme_warnings import scaled_in_vain, scheme_warning
from rope_patch.mounting.undo import Changes
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.reach import spelled
from rope_patch.schemes.registry import as_scheme, find_name, scheme_from_dict
from rope_patch.schemes.target import advise, reached


def patch(
    model: nn.Module | PatchHandle,
    *schemes: str | Scheme | dict[str, Any] | Sequence[Any],
    mount: Mount = "auto",
    attention: AttentionMode = "auto",
    replace: bool = False,
    allow_untrained: bool = False,
    **fields: Any,
) -> PatchHandle:
    """Let a loaded model use another position scheme. Nothing but this model object changes.

    Args:
        model: a Transformers model, also inside PEFT or another wrapper.
        *schemes: names (`"yarn"`, `"rerope:window=512+logn"`), scheme objects, or `rope_parameters` of Transformers
            (`{"rope_type": "yarn", "factor": 4.0}`, also as the argument `rope_scaling` or `rope_parameters`, or behind
            two stars); several schemes, or a list, are composed. You may pass one as `scheme=`.
        mount: `"auto"`, or `"late"` to rotate inside attention under every scheme, which is slow and follows the
            definition literally.
        attention: `"auto"` for the fastest exact executor; `"oracle"`, `"chunked"`, `"segmented"` or `"fused"` to
            prefer the dense definition, the definition in blocks, flash per region, or Triton's kernel; or the name of
            an executor (`"merged"`, `"joined"`, ...), which is forced: a call that it cannot compute raises an error
            with the reason. The environment variable `ROPE_PATCH_ATTENTION` replaces `"auto"`. `explain` shows the
            executor of each layer.
        replace: remove the scheme that the model carries, with its learned parameters, and mount this one instead.
        allow_untrained: accept a scheme that scales a rotation (`yarn`, `pi`, `ntk` ...) on a model that was trained
            with a learned bias instead, as T5 was. Use it if you will train the model.
        **fields: the scheme's fields, with exactly one name. `target`, a length in tokens or a multiple of the length
            that the model reads today (`"4x"`), may be given with several names: it fills the open fields, so that the
            scheme reaches that length on this model. `"auto"` fills the fields that follow from the model alone.

    Returns:
        a handle with `remove()`, which you can use in a `with` statement. If the model carries exactly this scheme
        already, you get its handle. If `patch` raises an error, the model stays unchanged.

    Raises:
        UnknownScheme, InvalidField, SlotConflict: the scheme is invalid.
        UnsupportedModel: the model has no place where the scheme can be mounted, or no rotation that it could scale.
        NothingToPatch: no layer would change.
        AlreadyPatched: the model carries another scheme, and `replace` is false.

    Warns:
        RopePatchWarning: the scheme would change nothing, or a pretrained model needs training under it.

    Example:
        >>> with patch(model, "rerope", window=512):
        ...     model.generate(**inputs)
    """
    if any(isinstance(scheme, nn.Module) for scheme in schemes):
        others = [f"'{each}'" for each in (model, *schemes) if not isinstance(each, nn.Module)] or ["SCHEME"]
        others += [f"{name}={value!r}" for name, value in fields.items()]
        raise UnsupportedModel(f"the model comes first: write patch(model, {', '.join(others)})")
    attention = asked_attention(attention)
    model = loaded(model)
    # on the CPU, whatever the default is, as within `with torch.device("meta")`
    with CHANGING, torch.device("cpu"), own_attention(model):
        scheme = _requested(model, schemes, fields)
        if (same := _same_patch(model, scheme, (mount, attention))) is not None:
            return same
        if replace and find_handle(model) is not None:
            with _taken_off(model) as restore:
                handle = patch(model, scheme, mount=mount, attention=attention, allow_untrained=allow_untrained)
                handle._restore = restore
                return handle
        scheme, mounted = _planned(model, scheme, mount, Record.find(model))
        if not allow_untrained and (lost := scaled_in_vain(mounted)):
            typed = spelled(scheme)
            raise UnsupportedModel(
                f"{typed} scales a rotation, and {type(model).__name__} has none: it was trained with {lost}. Without "
                "that its answers are noise until it is trained again. 't5' with interpolation=4, 'logn' and 'window' "
                f"keep that. To train it under {typed}, write patch(model, {typed!r}, allow_untrained=True)"
            )
        if warning := scheme_warning(scheme, mounted):
            warn(warning, stacklevel=outside())
        return _mount(model, scheme, mounted, mount, attention)


@contextmanager
def _taken_off(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Remove the scheme of a model within the block, which receives the function that restores it. If the block raises
    an error, the scheme is restored at once.
    """
    carried = find_handles(model)
    learned = {name: value.detach().clone() for name, value in learned_parameters(model).items()}
    restore = partial(_restore, model, carried, Record.find(model), learned)
    for handle in carried:
        handle.remove()
    try:
        yield restore
    except BaseException:
        restore()
        raise


def _restore(
    model: nn.Module, carried: Sequence[PatchHandle], record: Record | None, learned: Mapping[str, torch.Tensor]
) -> None:
    """Mount the schemes of removed handles again, with their learned parameters."""
    for handle in carried:
        per_request = record.per_request if record else None
        _mount(handle.model, handle.scheme, handle.mounted, *handle._settings, per_request, handle)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, value in learned_parameters(model).items():
            value.copy_(learned[name])


def mount_scheme(
    model: nn.Module, scheme: Scheme, mount: Mount = "auto", attention: AttentionMode = "auto"
) -> PatchHandle:
    """Patch without a warning, for a model that was or will be trained under the scheme, or is measured."""
    with torch.device("cpu"), own_attention(model):
        planned = _planned(model, scheme, mount, Record.find(model))
        return _mount(model, *planned, mount, asked_attention(attention))


def mount_record(model: nn.Module, record: Record) -> PatchHandle:
    """Patch a model with the scheme that it was saved under; its config becomes the config from before the patch."""
    with torch.device("cpu"), own_attention(model):
        planned = _planned(model, record.scheme, "auto", None)
        return _mount(model, *planned, "auto", asked_attention("auto"), record.per_request)


def loaded(model: nn.Module | PatchHandle) -> nn.Module:
    """The model of a handle, or a model itself.

    Raises:
        UnsupportedModel: the argument is neither.
    """
    inner = model.model if isinstance(model, PatchHandle) else model
    check_loaded(inner)
    return inner


def _requested(model: nn.Module, schemes: Sequence[Any], fields: dict[str, Any]) -> Scheme:
    """Build the scheme from the arguments of `patch`; a dict is read with the config of the model."""
    stated = [fields.pop(name) for name in ("rope_scaling", "rope_parameters") if isinstance(fields.get(name), dict)]
    if "scheme" in fields and not schemes:
        stated.append(fields.pop("scheme"))
    elif not schemes and fields.keys() & {"name", "rope_type", "type"}:  # a dict behind two stars
        stated, fields = [*stated, fields], {}
    listed = [one for each in (*schemes, *stated) for one in (each if isinstance(each, (list, tuple)) else [each])]
    try:
        config = find_stacks(model)[0][1].config if any(isinstance(each, dict) for each in listed) else None
        return as_scheme([_of_dict(each, config) if isinstance(each, dict) else each for each in listed], fields)
    except MissingField as error:
        handle = find_handle(model)
        raise advise(error, (handle.stack if handle else read_stacks(model)[0]).checkpoint) from None


def _of_dict(parameters: dict[str, Any], config: Any) -> Scheme:
    """Build the scheme that a dict describes: by its registered `name`, or as `rope_parameters` of Transformers."""
    if any(isinstance(selector, int) for selector in parameters):
        raise InvalidField(f"{parameters} names schemes by layer: write PerLayer({ {**parameters, 'rest': None} })")
    if isinstance(parameters.get("name"), str) and not parameters.keys() & {"rope_type", "type"}:
        return scheme_from_dict({**parameters, "name": find_name(parameters["name"])})
    return scheme_of_parameters(parameters, config)


def _same_patch(model: nn.Module, scheme: Scheme, settings: tuple[str, str]) -> PatchHandle | None:
    """The handle of a model that carries exactly this scheme with the requested mount; else None."""
    handle = find_handle(model)
    if handle is None or handle._settings != settings:
        return None
    stacks = [stack for stack, _ in handle.mounted]
    is_all = [stack.module for stack in stacks] == [module for _, module in find_stacks(model)]
    return handle if is_all and reached(scheme, (stack.checkpoint for stack in stacks)) == handle.scheme else None


def _planned(model: nn.Module, scheme: Scheme, mount: Mount, record: Record | None) -> tuple[Scheme, Mounted]:
    """Fill in the target of a scheme, and plan where to mount it in each part of a model that carries none.

    Args:
        record: the record in the model's config, which may still hold the values of the patch.
    """
    check_free(model, scheme)
    if record is not None:
        _check_record(record, model, scheme)
    stacks = read_stacks(model)
    scheme = reached(scheme, (stack.checkpoint for stack in stacks))
    return scheme, tuple((stack, plan_mounts(scheme, stack, mount)) for stack in stacks)


def check_free(model: nn.Module, scheme: Scheme) -> None:
    """Check that a model carries no scheme yet.

    Raises:
        AlreadyPatched: the model carries one.
    """
    if (handle := find_handle(model)) is not None:
        typed = spelled(scheme)
        raise AlreadyPatched(
            f"{type(model).__name__} carries {spelled(handle.scheme)}; unpatch it before applying {typed}, or write "
            f"patch(model, {typed!r}, replace=True)"
        )


def _check_record(record: Record, model: nn.Module, scheme: Scheme) -> None:
    """Refuse a checkpoint that still contains the scheme under which it was saved: in the rows of its table, or in a
    config that holds the scheme's frequencies as if they were the checkpoint's own. Another scheme would scale them
    again.
    """
    if record.positions is not None:
        raise AlreadyPatched(
            f"{type(model).__name__} was saved with the table of {spelled(record.scheme)}; repatch(model) applies it"
        )
    if record.is_stated(find_stacks(model)[0][1].config):
        saved, typed = spelled(record.scheme), spelled(scheme)
        other = f"For {typed} alone, write model = rope_patch.from_pretrained(FOLDER); unpatch(model), and patch that"
        raise AlreadyPatched(
            f"{type(model).__name__} was saved under {saved}, which Transformers applies by itself, so {typed} would "
            f"scale it again. To keep {saved}, write repatch(model)" + ("" if saved == typed else f". {other}")
        )


def _mount(
    model: nn.Module,
    scheme: Scheme,
    mounted: Mounted,
    mount: Mount,
    attention: AttentionMode,
    per_request: Mapping[int, Scheme] | None = None,
    handle: PatchHandle | None = None,
) -> PatchHandle:
    """Install a planned scheme; a `handle` that was removed is used again."""
    rotary = {module: stack.module for stack, _ in mounted for tables in stack.rotary for module in tables.modules}
    holders = [*find_enclosing(model), *model.modules()]  # models around a backbone are saved with their own config
    forget_managers(holders)
    changes = Changes()
    if handle is None:
        handle = PatchHandle(model, scheme, mounted, changes, (mount, attention))
    handle._changes, handle.layer_states = changes, ()
    try:
        for module, its_stack in rotary.items():  # while the configs are those of the checkpoint
            changes.fill_tables(module, its_stack)
        notice = _write_record(holders, scheme, mounted, per_request, changes)
        for stack, plan in mounted:
            handle.layer_states += install(plan, stack, attention, changes)
            changes.set(stack.module, HANDLE, handle)
            changes.set(stack.module, "extra_repr", partial(_shown, stack.module.extra_repr, spelled(scheme)))
        for module, its_stack in rotary.items():
            changes.keep_filled(module, its_stack)
        install_saving([*find_around(model), *model.modules()], notice, changes)
        if any(reason_not_to_share(*each) for each in mounted):
            for holder in holders:
                if isinstance(holder, PreTrainedModel):
                    changes.set(holder, "_supports_context_parallel", False)
    except BaseException:
        changes.undo()
        raise
    return handle


def _shown(own: Callable[[], str], scheme: str) -> str:
    """The text that `print(model)` shows for a patched module: its `own` text, and the scheme."""
    return "\n".join(filter(None, (own(), f"(rope_patch): {scheme}")))


def current_scheme(model: nn.Module | PatchHandle) -> Scheme | None:
    """The scheme that a model carries, as you gave it to `patch`, with the fields that a target fills; None without a
    scheme. A model that was loaded with `attn_implementation="rope_patch"` carries the scheme in its config.

    Args:
        model: a Transformers model, also inside PEFT or another wrapper, or a handle.

    Raises:
        UnsupportedModel: the argument is neither.
    """
    model = loaded(model)
    if (handle := find_handle(model)) is not None:
        return handle.scheme
    record = Record.find(model) if asks_by_name(model) else None
    return None if record is None else record.scheme


def unpatch(model: nn.Module | PatchHandle, *, missing_ok: bool = False) -> PatchHandle | None:
    """Restore a patched model exactly: forwards, hooks, buffers, config, attention choice, registries.

    Args:
        model: a patched model, or its handle.
        missing_ok: accept a model that carries no scheme.

    Returns:
        the handle of the removed scheme, as `patch` returned it: `handle.model`, `handle.scheme`; None if there was no
        scheme.

    Raises:
        NotPatched: the model carries no scheme, and `missing_ok` is false.
    """
    if isinstance(model, PatchHandle) and not (missing_ok and not model._is_mounted):
        model.remove()
        return model
    handles = find_handles(loaded(model))
    if not handles:
        if missing_ok:
            return None
        raise NotPatched(f"{type(model).__name__} carries no scheme; unpatch(model, missing_ok=True) accepts that")
    for handle in handles:
        handle.remove()
    return handles[0]


def _write_record(
    holders: Sequence[nn.Module],
    scheme: Scheme,
    mounted: Mounted,
    per_request: Mapping[int, Scheme] | None,
    changes: Changes,
) -> Notice:
    """Give these modules their own configs, which record the scheme; other models may share the previous configs.

    If `rope_parameters` can express the scheme, they and `max_position_embeddings` do, so that other programs read it
    without this library.
    """
    stack, plan = mounted[0]
    native, own = {}, copy.deepcopy(getattr(stack.config, "rope_parameters", None))
    is_static, has_rows = bool(plan.rotary) and not plan.late, plan.embedding == "rows"
    exported = stated_parameters(scheme, stack, plan.rotary) if is_static else None
    length = None if exported is None else stated_length(scheme, exported, stack.config)
    if own is not None:
        native["rope_parameters"] = own
    if length is not None:
        native["max_position_embeddings"] = stack.config.max_position_embeddings
    left_alone = {}
    if exported is None and scheme.frequency_owner is not None and stack.rotary:
        # `rope_parameters` stay those of the layers that are left alone, so the record says where the scheme runs
        indices = [layer.index for layer in stack.layers if layer.index in plan.left_alone]
        left_alone = {index: plan.left_alone[index] for index in indices}
    positions = stack.training_length if has_rows else None  # the weights hold the longer table
    record = Record(scheme, native, left_alone, positions, per_request or {})
    for config in changes.fork_configs(holders):
        record.write(config)
    if exported is not None:
        stack.config.rope_parameters = exported
    if length is not None:
        stack.config.max_position_embeddings = length
    changes.settle_configs()
    is_native = all(its_plan.is_native(each) for each, its_plan in mounted)
    is_stated = has_rows or exported is not None
    return Notice(record, str(stack.native or "its own positions"), is_native, is_stated)
