"""Load a checkpoint and apply the scheme in its config again. Saving is left to Transformers.

A folder of PEFT adapters has no base weights: the base checkpoint is loaded, patched with the scheme under which the
adapters were trained, and then gets the adapters.

Remote code is never run, and pickled weights are read only on request.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, cached_file

from rope_patch.attention.executors.products import multiplies_bfloat16
from rope_patch.errors import (
    EvaluationError,
    InvalidField,
    MissingField,
    MissingPackage,
    NoCheckpoint,
    RopePatchError,
    UnsupportedModel,
    did_you_mean,
    require,
    warn,
)
from rope_patch.models import t5
from rope_patch.models.adapter_record import ADAPTER_RECORD, ADAPTER_WEIGHTS, ADAPTERS, check_belongs
from rope_patch.models.baichuan import register_baichuan
from rope_patch.models.config import length_today, wrong_field
from rope_patch.models.record import RECORD, Record, forget_record
from rope_patch.patching import find_handle, mount_record, mount_scheme, patch, unpatch
from rope_patch.saving.checkpoint_kind import OPTIONAL, is_gguf, kind_of_checkpoint, read_json
from rope_patch.saving.gguf import find_gguf, load_gguf, load_gguf_config, load_gguf_tokenizer
from rope_patch.saving.hub import UNKNOWN, tell_absence, within_reach
from rope_patch.saving.own_files import check_weights
from rope_patch.saving.resuming import load_class, load_parameters, resume_rows
from rope_patch.saving.trust import check_adapter, drop_implementations
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.registry import get_scheme, with_fields
from rope_patch.shipped import recipes_folder

_CLEAR = (RopePatchError, ImportError, MemoryError, torch.OutOfMemoryError)
"""Errors that `from_pretrained` raises unchanged."""

_ONE_LINE = (NoCheckpoint, MissingPackage)
"""Errors that the functions of commands raise unchanged; any other error becomes one line."""

_PLACES = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")

_PUBLISHED_PICKLED = "baichuan"
"""The `model_type` of checkpoints that were published without safetensors."""

DTYPES = ("auto", "float32", "bfloat16", "float16")

_MEANT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "gpu": "cuda",
}
"""Other names of dtypes and devices."""


def from_pretrained(path: str | Path, scheme: Any = None, *, replace: bool = False, **kwargs: Any) -> nn.Module:
    """Load a checkpoint and, if it was saved under a scheme, patch it again; or patch it with the given scheme.

    Baichuan's checkpoints are loaded by the classes of this library, never by their remote code. They were published as
    pickled files, which torch's safe reader (`weights_only`) reads. All other checkpoints are read from safetensors
    only, unless you request pickled files with `use_safetensors=False`; the same safe reader reads them. Weights of a
    GGUF file are unpacked. A config may ask for code from the Hub (`attn_implementation`); the request is ignored
    unless you pass the same argument.

    Args:
        path: a folder written by `save_pretrained`, a Hub ID, or a GGUF file. A name that looks like a path, or begins
            with a local folder, is not looked up on the Hub.
        scheme: the scheme to patch the model with, in any form that `patch` takes, such as `"rerope:window=512"`; you
            may pass a dict as `rope_scaling`.
        replace: remove the scheme that the checkpoint was saved under, as in `patch`.
        **kwargs: arguments for `from_pretrained` of the class that wrote the checkpoint; `trust_remote_code` is
            ignored.

    Returns:
        the model, or a `PeftModel` for adapters; `unpatch` restores the checkpoint without the scheme.

    Raises:
        NoCheckpoint: there is no checkpoint, it has no safetensors, or files are missing, damaged or outside the
            folder.
        UnsupportedModel: the checkpoint needs code that lies beside the weights.
        InvalidField, UnknownScheme, NotPatched: the files do not describe a scheme, or a scheme that does not fit the
            model, or adapters would run code.
        MissingPackage: the path holds adapters, and PEFT is not installed.
        AlreadyPatched: the checkpoint was saved under a scheme that differs from the given one.
        TypeError: the class does not know one of `kwargs`.
    """
    if scheme is None and isinstance(kwargs.get("rope_scaling"), dict):
        scheme = kwargs.pop("rope_scaling")
    if isinstance(scheme, str):
        with suppress(MissingField):  # the model gives advice on those
            get_scheme(scheme)  # before the weights are read
    given = {**kwargs}
    try:
        with _one_error(path, given):
            model = _load(path, kwargs)
    except TypeError as error:
        if isinstance(scheme, str) and (unknown := [name for name in given if _is_unknown(name, error)]):
            line = with_fields(scheme, {name: given[name] for name in unknown})
            raise InvalidField(
                f"{unknown[0]} is no argument of from_pretrained; a field stands inside the scheme: write "
                f"from_pretrained({str(path)!r}, {line!r})"
            ) from error
        raise
    if scheme is not None:
        patch(model, scheme, replace=replace)
    return model


def _is_unknown(name: str, error: Exception) -> bool:
    return f"unexpected keyword argument {name!r}" in str(error)


@contextmanager
def _one_error(
    path: str | Path, arguments: dict[str, Any], what: str = "", passed: tuple[type[Exception], ...] = _CLEAR
) -> Iterator[None]:
    """Turn errors about damaged files and impossible configs into `NoCheckpoint`, in one line: Transformers and
    safetensors raise any type. Errors of the types `passed` stay, as does a `TypeError` for an argument of the user.
    """
    try:
        yield
    except passed:
        raise
    except Exception as error:
        reason = textwrap.shorten(str(error), 400)
        if not isinstance(error, RopePatchError):
            if isinstance(error, TypeError) and any(_is_unknown(name, error) for name in arguments):
                raise
            location = {name: arguments[name] for name in _PLACES if name in arguments}
            reason = wrong_field(_read_fields(path, **location)) or f"{type(error).__name__}: {reason}"
        raise NoCheckpoint(f"{what}{str(path)!r} cannot be loaded: {reason}") from error


def _load(path: str | Path, kwargs: dict[str, Any], above: tuple[Path, ...] = ()) -> nn.Module:
    """Load the checkpoint for `from_pretrained`; `above` are the adapters that named the path."""
    location = {name: kwargs[name] for name in _PLACES if name in kwargs}
    if (file := kwargs.pop("gguf_file", None)) is not None:
        path = find_gguf(path, file, location)
        kwargs, location = {name: value for name, value in kwargs.items() if name not in _PLACES}, {}
    kind = kind_of_checkpoint(path, **location)
    if kind == "gguf":
        return load_gguf(path, **kwargs)
    if kind == "hub":
        location = within_reach(path, location)
        kwargs |= location
    if (adapters := cached_file(path, ADAPTERS, **OPTIONAL, **location)) is not None:
        return _with_adapters(path, Path(adapters), location, kwargs, above)
    kwargs |= {"trust_remote_code": False, "weights_only": True}
    config = kwargs.pop("config", None)
    if config is None:
        config, dropped = _read_config(path, **location)
        for field in dropped.keys() - kwargs.keys():
            warn(
                f"{path} asks for {field}={dropped[field]!r:.200}, which may be code from the Hub, so it is ignored; "
                f"if you trust it: from_pretrained(..., {field}=...), or --attention of a command",
                stacklevel=3,
            )
        # as in Transformers: arguments that are fields of the config change it
        fields = [key for key in kwargs if key in vars(config) and key not in ("dtype", "torch_dtype")]
        config.update({key: kwargs.pop(key) for key in fields})
    else:
        _read_fields(path, **location)
    check_weights(path, **location)
    kwargs.setdefault("use_safetensors", None if config.model_type == _PUBLISHED_PICKLED else True)
    written_by = (getattr(transformers, name, None) for name in config.architectures or ())
    classes = [cls for cls in written_by if isinstance(cls, type) and issubclass(cls, PreTrainedModel)]
    cls: Any = (*classes, AutoModelForCausalLM)[0]
    record = Record.read(config)
    if record is not None:
        record.restore(config.get_text_config())
        if record.positions is None:
            forget_record(config)
    try:
        if record is None:
            return cls.from_pretrained(path, config=config, **kwargs)
        model = load_class(cls, path, config=config, **kwargs)
    except OSError as error:  # for pickled weights, Transformers mentions an argument that the user never passed
        if all(cached_file(path, name, **OPTIONAL, **location) is None for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
            raise
        raise NoCheckpoint(
            f"{path} has no weights in safetensors; from_pretrained(..., use_safetensors=False) reads pickled ones if "
            "they are plain tensors"
        ) from error
    if record.positions is None:
        mount_record(model, record)
    else:
        resume_rows(model, record)
    load_parameters(model, path, **location)
    return model


def _config_of(path: str | Path, **location: Any) -> Any:
    """Load the config of a checkpoint, with its class in Transformers or in this library."""
    return _read_config(path, **location)[0]


def _read_config(path: str | Path, **location: Any) -> tuple[Any, dict[str, Any]]:
    """Load the config of a checkpoint, and return with it the requested implementations that were refused."""
    _read_fields(path, **location)
    try:
        config = AutoConfig.from_pretrained(path, **{**location, "trust_remote_code": False})
    except OSError as error:
        tell_absence(path, error, UNKNOWN)
        raise
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UnsupportedModel(
            f"{path}: its model needs remote code, which is never run here; only models in Transformers and "
            "Baichuan's can be loaded"
        ) from error
    return config, drop_implementations(config)


def _with_adapters(
    path: str | Path, adapters: Path, location: dict[str, Any], kwargs: dict[str, Any], above: tuple[Path, ...]
) -> nn.Module:
    """Load the base checkpoint with its adapters, under the scheme that their config records, or the config beside
    them.
    """
    require("peft", f"{path}, a folder of adapters,", "finetune")
    from peft import PeftModel

    settings = _settings_of(path, adapters, location)
    base = _base_in(settings, adapters)
    if adapters in above:
        raise InvalidField(f"{adapters}: base_model_name_or_path={base!r} leads back to these adapters")
    config = kwargs.pop("config", None) or _config_beside(path, location)
    elsewhere = {key: value for key, value in kwargs.items() if key not in ("revision", "subfolder")}
    if config is not None:
        elsewhere.setdefault("dtype", config.dtype)
    recorded = _recorded(settings, config, adapters)
    model = _load(base, elsewhere, (*above, adapters))
    _follow(model, recorded)
    with quiet_adapters():
        return PeftModel.from_pretrained(model, path, **location)


def follow_adapters(model: nn.Module, path: str, **location: Any) -> None:
    """Patch a base checkpoint in place with the scheme that adapters record, before PEFT adds them.

    Args:
        model: the base; it stays unchanged if the adapters record no scheme.
        path: path of the adapters, a folder or a Hub ID.
        **location: arguments of `from_pretrained` that locate a file, such as `revision`.

    Raises:
        NoCheckpoint: there are no adapters.
        InvalidField, UnknownScheme: the record of the adapters is not a scheme, or the adapters would run code.
    """
    if (file := cached_file(path, ADAPTERS, **OPTIONAL, **location)) is None:
        raise NoCheckpoint(f"there are no adapters {path!r}: it has no {ADAPTERS}")
    adapters = Path(file)
    settings = _settings_of(path, adapters, location)
    _follow(model, _recorded(settings, _config_beside(path, location), adapters))


def _settings_of(path: str | Path, adapters: Path, location: dict[str, Any]) -> dict[str, Any]:
    """The settings of adapters, with the record of their scheme: from the file beside them or, for older adapters, from
    the settings.

    Raises:
        InvalidField: the adapters would run code, or the record belongs to other weights.
    """
    settings = read_json(adapters)
    check_adapter(settings, adapters)
    if (file := cached_file(path, ADAPTER_RECORD, **OPTIONAL, **location)) is None:
        return settings
    beside, found = read_json(Path(file)), (cached_file(path, name, **OPTIONAL, **location) for name in ADAPTER_WEIGHTS)
    weights = next(filter(None, found), None)
    check_belongs(beside, Path(file), Path(weights) if weights else None)
    return {**settings, RECORD: beside.get(RECORD)}


def base_of(folder: str) -> str:
    """The path of the base checkpoint of a folder of adapters.

    Raises:
        InvalidField: the adapters name no base.
    """
    adapters = Path(folder, ADAPTERS)
    return _base_in(read_json(adapters), adapters)


def _base_in(settings: dict[str, Any], adapters: Path) -> str:
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InvalidField(
            f"{adapters}: base_model_name_or_path={base!r} is not allowed; it must be the path of a checkpoint"
        )
    return base


def _config_beside(path: str | Path, location: dict[str, Any]) -> Any:
    """The config in a folder of adapters; None without one."""
    own_config = cached_file(path, CONFIG_NAME, **OPTIONAL, **location)
    return _config_of(path, **location) if own_config else None


def _recorded(settings: dict[str, Any], config: Any, adapters: Path) -> Scheme | Literal["nothing"] | None:
    """The scheme that adapters record: None for the plain checkpoint, and "nothing" if the adapters have no record and
    no config.
    """
    if RECORD not in settings and config is None:
        return "nothing"
    try:
        record = Record.read(settings if RECORD in settings else config)
    except RopePatchError as error:
        raise type(error)(f"{adapters}: {error}") from error
    return None if record is None else record.scheme


def _follow(model: nn.Module, scheme: Scheme | Literal["nothing"] | None) -> None:
    carried = find_handle(model)
    # under the same scheme the checkpoint keeps its learned parameters
    if scheme == "nothing" or scheme == (carried and carried.scheme):
        return
    if carried is not None:
        unpatch(model)
    if scheme is not None:
        mount_scheme(model, scheme)


def _read_fields(path: str | Path, **location: Any) -> dict[str, Any]:
    """The fields of a checkpoint's config before any class reads them, with the classes of this library that it needs
    registered; empty if Transformers cannot find or read the file.

    Raises:
        NoCheckpoint: Transformers would build layers without end.
    """
    fields: dict[str, Any] = {}
    with suppress(Exception):  # loading it raises a better error
        fields |= PreTrainedConfig.get_config_dict(path, **location)[0]
    if wrong := wrong_field(fields, ("num_hidden_layers",)):
        raise NoCheckpoint(f"{str(path)!r} cannot be loaded: {wrong}")
    if fields.get("model_type") == _PUBLISHED_PICKLED:
        register_baichuan()
    return fields


def default_checkpoint() -> str:
    """The folder of the small Llama that is shipped with the recipes."""
    return str(recipes_folder() / "assets" / "tiny-llama")


def load_model(path: str, *, dtype: str | None = None, device: str = "auto", attention: str = "auto") -> nn.Module:
    """Load the language model of a checkpoint folder, Hub ID or GGUF file, patched again if it was saved under a
    scheme.

    Args:
        dtype: None for the checkpoint's own dtype (bfloat16 for a GGUF file); `auto` for that dtype, but float32 on a
            CPU without bfloat16 instructions, where half precision can be a hundred times slower; or one of `DTYPES`.
        device: a torch device, or `auto` for the first accelerator (with several processes the one of the local rank),
            or else the CPU.
        attention: `auto`, or an implementation of Transformers, such as `sdpa` or `eager`.

    Raises:
        NoCheckpoint: there is no checkpoint, or it cannot be loaded with these arguments.
        EvaluationError: the dtype or the device is not allowed.
    """
    if dtype not in (None, *DTYPES):
        meant = _MEANT.get(dtype.lower(), dtype)
        raise EvaluationError(f"dtype {dtype!r}: {did_you_mean(meant, DTYPES)}")
    target = _device(device)
    if dtype == "auto" and target.type == "cpu" and not multiplies_bfloat16():
        dtype = "float32"
    chosen: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
    with _one_error(path, {}, passed=_ONE_LINE):
        return from_pretrained(path, dtype=dtype or "auto", local_files_only=Path(path).exists(), **chosen).to(target)


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a checkpoint.

    Raises:
        NoCheckpoint: there is no tokenizer.
    """
    return _read(path, "tokenizer", _tokenizer_of, load_gguf_tokenizer)


def load_config(path: str | Path, **location: Any) -> Any:
    """Load the config of a checkpoint.

    Args:
        **location: arguments of `from_pretrained` that locate a file, such as `revision`.

    Raises:
        NoCheckpoint: there is no config.
    """
    return _read(path, "config", _config_of, load_gguf_config, **location)


def trained_length(path: str) -> int:
    """The length L in tokens that a checkpoint reads today, under its own scaling, from its config alone.

    Raises:
        NoCheckpoint: there is no config.
        EvaluationError: the config gives no length.
    """
    config = load_config(path)
    if getattr(config, "rope_parameters", None):
        return length_today(config)
    default = t5.TRAINING_LENGTH if hasattr(config, "relative_attention_num_buckets") else None
    lengths = (getattr(config, name, None) for name in ("n_positions", "max_position_embeddings", "model_max_length"))
    if not (length := next(filter(None, lengths), default)):
        raise EvaluationError(f"the config of {path} does not give the training length; write lengths in tokens")
    return int(length)


def unpack(path: str, folder: str | Path, dtype: str = "auto") -> None:
    """Convert a GGUF file to a checkpoint folder of Transformers, in bfloat16 unless `dtype` names another."""
    load_model(path, dtype=None if dtype == "auto" else dtype, device="cpu").save_pretrained(folder)  # type: ignore[operator]
    load_tokenizer(path).save_pretrained(folder)


@contextmanager
def as_folder(path: str) -> Iterator[str]:
    """Yield a checkpoint as a folder: a GGUF file is unpacked into a temporary one."""
    if not is_gguf(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        unpack(path, folder)
        yield folder


@contextmanager
def quiet_adapters() -> Iterator[None]:
    """Suppress PEFT's warning about the record of a scheme in the settings of older adapters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", rf"Unexpected keyword arguments \['{RECORD}'\]")
        yield


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress Transformers' loading reports, advice and progress bars, which would flood a terminal."""
    logging = transformers.utils.logging
    verbosity, bars, hub = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub_logging.get_verbosity()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub)
        if bars:
            logging.enable_progress_bar()


def _read(
    path: str | Path, what: str, read: Callable[..., Any], read_gguf: Callable[[Any], Any], **location: Any
) -> Any:
    with _one_error(path, {}, f"the {what} of ", _ONE_LINE):
        kind = kind_of_checkpoint(path)
        if kind == "gguf":
            return read_gguf(path)
        return read(path, **within_reach(path, {"local_files_only": kind != "hub", **location}))


def _tokenizer_of(path: str | Path, **location: Any) -> Any:
    _read_fields(path, **location)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, **location)
    except OSError as error:
        tell_absence(path, error)
        raise


def _device(name: str) -> torch.device:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if name not in ("auto", "cpu"):
            raise EvaluationError(f"device {name!r}: with several processes each uses its own device; use auto or cpu")
        from accelerate import PartialState

        process = PartialState(cpu=name == "cpu" or not torch.accelerator.is_available())
        atexit.register(process.destroy_process_group)
        return process.device
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        meant = f"cuda:{name}" if name.isdecimal() else _MEANT.get(name.lower())
        reason = f"did you mean {meant!r}?" if meant else str(error).splitlines()[0]
        raise EvaluationError(f"device {name!r} cannot be used here: {reason}") from error
