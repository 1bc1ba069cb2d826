"""Apply the scheme that a checkpoint's config records, with the parameters that it learned."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from rope_patch.errors import NotPatched
from rope_patch.models import absolute
from rope_patch.models.base import AbsoluteTable
from rope_patch.models.find_stacks import find_stacks, read_stacks
from rope_patch.models.record import Record, forget_record
from rope_patch.mounting.entry import shorten
from rope_patch.mounting.parameters import NAME, learned_parameters
from rope_patch.mounting.plan import plan_mounts
from rope_patch.patching import PatchHandle, check_free, find_handle, loaded, mount_record, patch
from rope_patch.saving.checkpoint_kind import OPTIONAL
from rope_patch.saving.own_files import check_weights


def repatch(model: nn.Module | PatchHandle, *schemes: Any, **fields: Any) -> PatchHandle:
    """Apply the scheme in the config of a `model` that plain Transformers loaded, or another scheme in its place.

    Args:
        model: a model that Transformers loaded.
        *schemes, **fields: the scheme; default the recorded one. With a scheme, `repatch` is `patch(model, ...,
            replace=True)`.

    Raises:
        NotPatched: the config records no scheme, or the scheme's learned parameters are missing from the checkpoint.
        InvalidField, UnknownScheme, UnsupportedModel: the record is invalid.
        AlreadyPatched: the model already has a scheme.
    """
    if schemes or fields:
        return patch(model, *schemes, replace=True, **fields)
    model = loaded(model)
    config = cast(Any, find_stacks(model)[0][1].config)
    record = Record.find(model)
    if record is None:
        raise NotPatched(
            f"the config of {type(model).__name__} has no `rope_patch`: it was not saved under a scheme, "
            "so write patch(model, SCHEME)"
        )
    replaced = Record(record.scheme, {name: getattr(config, name, None) for name in record.native})
    record.restore(config)  # so that a base is not raised twice
    try:
        handle = mount_record(model, record) if record.positions is None else resume_rows(model, record)
    finally:
        replaced.restore(config)
    if handle is None:
        raise NotPatched(
            f"{type(model).__name__} was saved without the original rows, which {record.scheme.name} replaced"
        )
    load_parameters(model, str(model.name_or_path))
    return handle


def resume_rows(model: nn.Module, record: Record) -> PatchHandle | None:
    """Patch a model with the rows that its table of positions was saved with; None if it was saved without a replaced
    table.

    Raises:
        NotPatched: the record has a number of positions that does not fit the model.
        AlreadyPatched: the model already has a scheme.
    """
    scheme, capacity, has_table = record.scheme, cast(int, record.positions), find_stacks(model)[0][0] is absolute
    check_free(model, scheme)
    if not has_table:
        raise NotPatched(f"`rope_patch` has positions={capacity}, which is impossible for {type(model).__name__}")
    if scheme.slots == {"embedding"} and scheme.is_table and not scheme.keeps_rows:
        return None
    stack = read_stacks(model)[0]
    table = cast(AbsoluteTable, stack.absolute)
    plan_mounts(scheme, stack)
    if capacity > table.capacity:
        raise NotPatched(f"`rope_patch` has positions={capacity}, but {type(model).__name__} has {table.capacity}")
    saved = shorten(table, capacity)
    forget_record(stack.config)
    handle = mount_record(model, record)
    table.rows.copy_(saved)  # as they were trained
    return handle


def load_class(cls: Any, path: str | Path, **kwargs: Any) -> nn.Module:
    """Load a model of the class, without a warning about learned parameters of schemes, which are loaded later."""
    logger = logging.getLogger("transformers.modeling_utils")
    withheld = []

    def is_of_others(report: logging.LogRecord) -> bool:
        if is_ours := f"{NAME}." in report.getMessage():
            withheld.append(report)
        return not is_ours

    logger.addFilter(is_of_others)
    try:
        model, info = cls.from_pretrained(path, output_loading_info=True, **kwargs)
    finally:
        logger.removeFilter(is_of_others)
    others = {what: rest for what, keys in info.items() if (rest := [key for key in keys if not is_learned(key)])}
    if withheld and others:
        logger.warning("%s loaded from %s: %s", type(model).__name__, path, others)
    return cast(nn.Module, model)


def is_learned(key: Any) -> bool:
    """Whether a name in a `state_dict` belongs to a learned parameter of a scheme."""
    return f".{NAME}." in f".{key}"


def load_parameters(model: nn.Module, path: str | Path, **location: Any) -> None:
    """Load the learned parameters of a patched model from a checkpoint.

    Raises:
        NotPatched: a parameter, or the files, are missing; the model is then without its scheme.
    """
    learned = learned_parameters(model)
    if not learned:
        return
    handle = cast(PatchHandle, find_handle(model))
    try:
        saved = saved_parameters(path, **location)
    except (OSError, SafetensorError) as error:
        handle.remove()
        raise NotPatched(
            f"{path or 'the model'} has no files with the learned parameters of {handle.scheme}: {error}"
        ) from error
    for name, value in learned.items():
        # the model may have been saved inside another one, or without the model around it
        key = next((key for key in saved if f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}")), None)
        if key is None or saved[key].shape != value.shape:
            handle.remove()
            raise NotPatched(f"{path} has no {name} of shape {tuple(value.shape)}, which {handle.scheme} learns")
        with torch.no_grad():
            value.copy_(saved[key])


def saved_parameters(path: str | Path, **location: Any) -> dict[str, torch.Tensor]:
    """The learned parameters of schemes, of any shape, in the files of a checkpoint, by their saved names.

    Raises:
        NoCheckpoint: an index of weights is damaged, or names files outside the checkpoint.
    """
    check_weights(path, **location)
    optional = {**OPTIONAL, **location}
    files = [cached_file(path, SAFE_WEIGHTS_NAME, **optional)]
    if files == [None]:
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **optional)
        files = [] if index is None else get_checkpoint_shard_files(path, index, **location)[0]
    parameters: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            parameters |= {name: tensors.get_tensor(name) for name in filter(is_learned, tensors.keys())}
    return parameters
