"""Load a checkpoint and apply the scheme in its config again; saving is Transformers' own.

A folder of PEFT adapters has no weights of its own: its base checkpoint is loaded, patched with the scheme under which
the adapters were trained, and then gets the adapters.

Remote code is never run, and pickled weights are read only on request.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import textwrap
import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from rope_patch.errors import InvalidField, NoCheckpoint, NotPatched, RopePatchError, UnsupportedModel, require
from rope_patch.models import absolute
from rope_patch.models.baichuan import is_baichuan_folder, register_baichuan
from rope_patch.models.base import AbsoluteTable
from rope_patch.models.config import check_computable, restore_native, wrong_field
from rope_patch.models.reading import find_stacks, read_stacks
from rope_patch.mounting.entry import shorten
from rope_patch.mounting.parameters import NAME, learned_parameters
from rope_patch.mounting.plan import plan_mounts
from rope_patch.mounting.saved import ADAPTERS, RECORD
from rope_patch.patching import PatchHandle, find_handle, find_record, loaded, mount_scheme, unpatch
from rope_patch.saving.gguf import is_gguf, load_gguf
from rope_patch.schemes.registry import scheme_from_dict

_PLACES = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_OPTIONAL = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}


def from_pretrained(path: str | Path, **kwargs: Any) -> nn.Module:
    """Load a checkpoint and, if it was saved under a scheme, patch it again.

    Baichuan's checkpoints are loaded by the classes of this library, never by their remote code. They were published as
    pickled files, which torch's safe reader (`weights_only`) reads. Of all others only safetensors are read, unless
    `use_safetensors=False` requests pickled files, with the same reader. Weights of a GGUF file are unpacked.

    Args:
        path: a folder written by `save_pretrained`, a Hub ID, or a GGUF file. What looks like a path, or begins with a
            folder that is here, is not sought on the Hub.
        **kwargs: for `from_pretrained` of the class that wrote the checkpoint; `trust_remote_code` is ignored.

    Returns:
        the model, for adapters a `PeftModel`; `unpatch` returns to the checkpoint without the scheme.

    Raises:
        NoCheckpoint: there is no checkpoint, none in safetensors, or files are missing or damaged.
        UnsupportedModel: its model is code that lies beside the weights.
        InvalidField, UnknownScheme, NotPatched: its files do not describe a scheme, or not one of such a model.
        MissingPackage: the path holds adapters, and PEFT is not installed.
        TypeError: the class does not know one of `kwargs`.
    """
    with _in_one_line(path, {**kwargs}):
        return _load(path, kwargs)


@contextmanager
def _in_one_line(path: str | Path, kwargs: dict[str, Any]) -> Iterator[None]:
    """For damaged files and impossible configs, Transformers and safetensors raise errors of any type.

    Raises:
        NoCheckpoint: what is wrong, in one line.
        TypeError: Transformers does not know one of `kwargs`.
    """
    try:
        yield
    except (RopePatchError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, TypeError) and any(
            f"unexpected keyword argument {name!r}" in str(error) for name in kwargs
        ):
            raise
        places = {key: kwargs[key] for key in _PLACES if key in kwargs}
        reason = _wrong_field(path, places) or f"{type(error).__name__}: {textwrap.shorten(str(error), 400)}"
        raise NoCheckpoint(f"{str(path)!r} cannot be loaded: {reason}") from error


def _wrong_field(path: str | Path, places: dict[str, Any], names: Container[str] | None = None) -> str:
    """`wrong_field` of a config that no class has read yet; empty for a file that is no config."""
    with suppress(Exception):  # Transformers names what is wrong with the file
        return wrong_field(PreTrainedConfig.get_config_dict(path, **places)[0], names)
    return ""


def _load(path: str | Path, kwargs: dict[str, Any], above: tuple[Path, ...] = ()) -> nn.Module:
    """What `from_pretrained` does, below the adapters that named the path."""
    check_there(path, **{key: kwargs[key] for key in _PLACES if key in kwargs})
    if is_gguf(path):
        return load_gguf(path, **kwargs)
    places = {key: kwargs[key] for key in _PLACES if key in kwargs}
    if (adapters := cached_file(path, ADAPTERS, **_OPTIONAL, **places)) is not None:
        return _with_adapters(path, Path(adapters), places, kwargs, above)
    kwargs |= {"trust_remote_code": False, "weights_only": True}
    published_pickled = make_loadable(path, **places)
    kwargs.setdefault("use_safetensors", None if published_pickled else True)
    config = kwargs.pop("config", None)
    if config is None:
        config = _config_of(path, places)
        # as in Transformers: arguments that are fields of the config change it
        fields = [key for key in kwargs if key in vars(config) and key not in ("dtype", "torch_dtype")]
        config.update({key: kwargs.pop(key) for key in fields})
    record = _checked(vars(config).get(RECORD), config)
    if record is not None and "positions" not in record:
        for part in _parts(config):
            vars(part).pop(RECORD, None)
    if record is not None:
        restore_native(config.get_text_config(), record)
    with _advice_of_ours(path, places):
        if record is None:
            return _class_of(config).from_pretrained(path, config=config, **kwargs)
        model = _load_class(_class_of(config), path, config=config, **kwargs)
    _resume(model, record)
    _load_parameters(model, path, **places)
    return model


def check_there(path: Any, **places: Any) -> None:
    """Refuse what is neither a checkpoint here nor a name that the Hub may know; `places` are as of `make_loadable`.

    Raises:
        NoCheckpoint: with the reason, in one sentence.
    """
    if not isinstance(path, (str, os.PathLike)):
        kind = "None" if path is None else f"a {type(path).__name__}"
        raise NoCheckpoint(f"{kind} is no checkpoint; pass the path of a folder or of a GGUF file, or a Hub ID")
    name = os.fspath(path)
    folder, (parent, _, last) = Path(name, places.get("subfolder") or ""), name.rpartition("/")
    looks_like_path = not last or "/" in parent or "\\" in name or name.startswith(("/", ".", "~"))
    if not name or (not folder.exists() and looks_like_path):
        raise NoCheckpoint(f"there is no checkpoint {name!r}: no folder or file has this name")
    if not folder.exists() and parent and Path(parent).exists():
        here = {**_OPTIONAL, **places, "local_files_only": True}
        if all(cached_file(name, file, **here) is None for file in (CONFIG_NAME, ADAPTERS)):
            advice = f"for a Hub ID, download it first: hf download {name}"
            raise NoCheckpoint(f"there is no checkpoint {name!r} in the folder {parent!r}; {advice}")
    if folder.is_dir() and not any((folder / each).is_file() for each in (CONFIG_NAME, ADAPTERS)):
        raise NoCheckpoint(f"there is no checkpoint in {name!r}: the folder has no {CONFIG_NAME}")
    if folder.is_file() and not is_gguf(name):
        raise NoCheckpoint(f"{name!r} is no checkpoint: it is neither a folder nor a GGUF file")


def _parts(config: Any) -> Iterator[Any]:
    """A config and its nested configs, such as those of text and images."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _config_of(path: str | Path, places: dict[str, Any]) -> Any:
    """The config of a checkpoint, of a class in Transformers or in this library."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **places)
    except OSError as error:
        if Path(path).exists():
            raise  # the file is there, and the error names what is wrong with it
        raise NoCheckpoint(
            f"there is no checkpoint {str(path)!r}: no folder here has this name, and the Hub did not give it"
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UnsupportedModel(
            f"{path}: its model needs remote code, which is never run here; only models in Transformers and "
            "Baichuan's can be loaded"
        ) from error


@contextmanager
def _advice_of_ours(path: str | Path, places: dict[str, Any]) -> Iterator[None]:
    """For pickled weights, Transformers' error mentions an argument that the user never passed; raise our own."""
    try:
        yield
    except OSError as error:
        if all(cached_file(path, name, **_OPTIONAL, **places) is None for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
            raise
        raise NoCheckpoint(
            f"{path} has no weights in safetensors; from_pretrained(..., use_safetensors=False) reads pickled ones if "
            "they are plain tensors"
        ) from error


def _with_adapters(
    path: str | Path, adapters: Path, places: dict[str, Any], kwargs: dict[str, Any], above: tuple[Path, ...]
) -> nn.Module:
    """The base checkpoint with its adapters, under the scheme that their config records, or the one beside it."""
    require("peft", f"{path}, a folder of adapters,", "finetune")
    from peft import PeftModel

    settings = _settings_of(adapters)
    base = settings["base_model_name_or_path"]
    if adapters in above:
        raise InvalidField(f"{adapters}: base_model_name_or_path={base!r} leads back to these adapters")
    own = cached_file(path, CONFIG_NAME, **_OPTIONAL, **places)
    config = kwargs.pop("config", None) or (_config_of(path, places) if own else None)
    elsewhere = {key: value for key, value in kwargs.items() if key not in ("revision", "subfolder")}
    if config is not None:
        elsewhere.setdefault("dtype", config.dtype)
        settings.setdefault(RECORD, vars(config).get(RECORD))
    try:
        record = _checked(settings.get(RECORD), config)
    except RopePatchError as error:
        raise type(error)(f"{adapters}: {error}") from error
    model = _load(base, elsewhere, (*above, adapters))
    wanted = None if record is None else scheme_from_dict(record["scheme"])
    carried = find_handle(model)
    # under the same scheme the checkpoint keeps its learned parameters
    if RECORD in settings and wanted != (carried and carried.scheme):
        if carried is not None:
            unpatch(model)
        if wanted is not None:
            mount_scheme(model, wanted)
    with warnings.catch_warnings():  # PEFT's, that it does not know our key
        warnings.filterwarnings("ignore", rf"Unexpected keyword arguments \['{RECORD}'\]")
        return PeftModel.from_pretrained(model, path, **places)


def _settings_of(adapters: Path) -> dict[str, Any]:
    """A PEFT settings file, which names a base checkpoint."""
    try:
        settings = json.loads(adapters.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{adapters} is not JSON: {error}") from error
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base, str) or not base:
        raise InvalidField(
            f"{adapters}: base_model_name_or_path={base!r} is not allowed; it must be the path of a checkpoint"
        )
    return cast(dict[str, Any], settings)


def _checked(record: Any, config: Any) -> dict[str, Any] | None:
    """The record of a scheme in a config, if any, checked: a known scheme, and computable rotary parameters. That of
    adapters may have no `config` beside it.

    Raises:
        InvalidField, UnknownScheme, UnsupportedModel: the record is invalid.
    """
    if record is None:
        return None
    if not isinstance(record, dict):
        raise InvalidField(f"config.rope_patch={record!r} is not allowed; it must be a dict with a 'scheme'")
    scheme_from_dict(record.get("scheme", {}))
    length = record.get("max_position_embeddings", 1)
    if type(length) is not int or length < 1:
        raise InvalidField(f"`rope_patch` has max_position_embeddings={length!r}; it must be a length in tokens")
    if "rope_parameters" in record and config is not None:
        original = copy.copy(config)
        vars(original)["rope_parameters"] = record["rope_parameters"]  # `setattr` could raise Transformers' own errors
        check_computable(original)
    return record


def _load_class(cls: Any, path: str | Path, **kwargs: Any) -> nn.Module:
    """A model of the class, without a warning about learned parameters of schemes, which are loaded later."""
    logger = logging.getLogger("transformers.modeling_utils")
    report = _UnlessOurs()
    logger.addFilter(report)
    try:
        model, found = cls.from_pretrained(path, output_loading_info=True, **kwargs)
    finally:
        logger.removeFilter(report)
    others = {what: rest for what, keys in found.items() if (rest := [key for key in keys if not _is_ours(key)])}
    if report.withheld and others:
        logger.warning("%s loaded from %s: %s", type(model).__name__, path, others)
    return model


class _UnlessOurs(logging.Filter):
    """Withholds a loading report that mentions learned parameters of schemes."""

    withheld = False

    def filter(self, record: logging.LogRecord) -> bool:
        ours = f"{NAME}." in record.getMessage()
        self.withheld |= ours
        return not ours


def _is_ours(key: Any) -> bool:
    return f".{NAME}." in f".{key}"


def _load_parameters(model: nn.Module, path: str | Path, **places: Any) -> None:
    """Load the learned parameters of a patched model from a checkpoint.

    Raises:
        NotPatched: one of them, or the files, are missing; the model is then without its scheme.
    """
    wanted = learned_parameters(model)
    if not wanted:
        return
    handle = cast(PatchHandle, find_handle(model))
    try:
        saved = _saved_parameters(path, **places)
    except (OSError, SafetensorError) as error:
        handle.remove()
        raise NotPatched(
            f"{path or 'the model'} has no files with the learned parameters of {handle.scheme}: {error}"
        ) from error
    for name, value in wanted.items():
        # the model may have been saved inside another one, or without the model around it
        found = next((key for key in saved if f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}")), None)
        if found is None or saved[found].shape != value.shape:
            handle.remove()
            raise NotPatched(f"{path} has no {name} of shape {tuple(value.shape)}, which {handle.scheme} learns")
        with torch.no_grad():
            value.copy_(saved[found])


def _saved_parameters(path: str | Path, **places: Any) -> dict[str, torch.Tensor]:
    """The learned parameters of schemes in the files of a checkpoint, by their saved names."""
    optional = {**_OPTIONAL, **places}
    files = [cached_file(path, SAFE_WEIGHTS_NAME, **optional)]
    if files == [None]:
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **optional)
        files = [] if index is None else get_checkpoint_shard_files(path, index, **places)[0]
    found: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in filter(_is_ours, tensors.keys())}
    return found


def make_loadable(path: str | Path, **places: Any) -> bool:
    """Register the classes of this library that a checkpoint needs; return whether it needs any. `places` are arguments
    of `from_pretrained`, such as `revision`.

    Raises:
        NoCheckpoint: Transformers would build layers without end.
    """
    if Path(path).is_dir() and (wrong := _wrong_field(path, places, ("num_hidden_layers",))):
        raise NoCheckpoint(f"{str(path)!r} cannot be loaded: {wrong}")
    if not is_baichuan_folder(path, **places):
        return False
    register_baichuan()
    return True


def _class_of(config: Any) -> Any:
    """The class that wrote the checkpoint, if Transformers has it."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    return AutoModelForCausalLM


def repatch(model: nn.Module | PatchHandle) -> PatchHandle:
    """Apply the scheme in the config of a `model`, after plain Transformers loaded it.

    Raises:
        NotPatched: the config records no scheme, or the scheme's learned parameters are missing from the checkpoint.
        InvalidField, UnknownScheme, UnsupportedModel: the record is invalid.
        AlreadyPatched: the model already has a scheme.
    """
    model = loaded(model)
    config = cast(Any, find_stacks(model)[0][1].config)
    record = _checked(find_record(model), config)
    if record is None:
        raise NotPatched(f"the config of {type(model).__name__} has no `rope_patch`: it was not saved under a scheme")
    with _unscaled(config, record):
        handle = _resume(model, record)
    if handle is None:
        raise NotPatched(
            f"{type(model).__name__} was saved without the original rows, which {record['scheme']['name']} replaced"
        )
    _load_parameters(model, str(model.name_or_path))
    return handle


@contextmanager
def _unscaled(config: Any, record: dict[str, Any]) -> Iterator[None]:
    """Restore the config from before the patch, so that a base is not raised twice."""
    replaced = restore_native(config, record)
    try:
        yield
    finally:
        restore_native(config, replaced)


def _resume(model: nn.Module, record: dict[str, Any]) -> PatchHandle | None:
    """Patch a loaded model with the scheme under which it was saved; None if its own positions were not saved."""
    scheme = scheme_from_dict(record["scheme"])
    if "positions" not in record or find_handle(model) is not None:
        return mount_scheme(model, scheme)
    capacity, has_table = record["positions"], find_stacks(model)[0][0] is absolute
    if not has_table or type(capacity) is not int or capacity <= 0:
        raise NotPatched(f"`rope_patch` has positions={capacity!r}, which is impossible for {type(model).__name__}")
    if scheme.slots == {"embedding"} and scheme.is_table and not scheme.keeps_rows:
        return None
    stack = read_stacks(model)[0]
    table = cast(AbsoluteTable, stack.absolute)
    plan_mounts(scheme, stack)
    if capacity > table.capacity:
        raise NotPatched(f"`rope_patch` has positions={capacity!r}, but {type(model).__name__} has {table.capacity}")
    saved = shorten(table, capacity)
    del stack.config.rope_patch
    handle = mount_scheme(model, scheme)
    table.rows.copy_(saved)  # as they were trained
    return handle
