"""Load checkpoints quietly, with errors that name the problem of the folder."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from rope_patch.attention.products import multiplies_bfloat16
from rope_patch.errors import EvaluationError, MissingPackage, did_you_mean
from rope_patch.evaluation.processes import joined
from rope_patch.models import t5
from rope_patch.models.config import training_length
from rope_patch.saving.gguf import is_gguf, load_gguf_config, load_gguf_tokenizer
from rope_patch.saving.loading import from_pretrained, make_loadable
from rope_patch.shipped import recipes_folder

DTYPES = ("auto", "float32", "bfloat16", "float16")


def default_checkpoint() -> str:
    """The folder of the small Llama that is shipped with the recipes."""
    return str(recipes_folder() / "assets" / "tiny-llama")


def load_model(path: str, *, dtype: str | None = None, device: str = "auto", attention: str = "auto") -> nn.Module:
    """The language model of a checkpoint folder, Hub ID or GGUF file, patched again if it was saved under a scheme.

    Args:
        dtype: None for the checkpoint's own (bfloat16 for a GGUF file); `auto` for the same, but float32 on a CPU
            without bfloat16 instructions, where half precision can be a hundred times slower; or one of `DTYPES`.
        device: a torch device, or `auto` for the first accelerator (with several processes that of the local rank), or
            else the CPU.
        attention: `auto`, or an implementation of Transformers, such as `sdpa` or `eager`.

    Raises:
        EvaluationError: there is no checkpoint, or it cannot be loaded with these arguments; the message has the first
            line of the reason.
    """
    if dtype not in (None, *DTYPES):
        raise EvaluationError(f"dtype {dtype!r}: {did_you_mean(dtype, DTYPES)}")
    place = _device(device)
    if dtype == "auto" and place.type == "cpu" and not multiplies_bfloat16():
        dtype = "float32"
    chosen: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
    with _one_line(path, "a language model"):
        return from_pretrained(path, dtype=dtype or "auto", local_files_only=Path(path).exists(), **chosen).to(place)


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a checkpoint.

    Raises:
        EvaluationError: there is none.
    """
    return _read(path, "a tokenizer", AutoTokenizer, load_gguf_tokenizer)


def load_config(path: str) -> Any:
    """The config of a checkpoint.

    Raises:
        EvaluationError: there is none.
    """
    return _read(path, "a config", AutoConfig, load_gguf_config)


def trained_length(path: str) -> int:
    """L in tokens of a checkpoint, from its config alone.

    Raises:
        EvaluationError: there is no config, or it does not give a length.
    """
    config = load_config(path)
    if getattr(config, "rope_parameters", None):
        return training_length(config)
    default = t5.TRAINING_LENGTH if hasattr(config, "relative_attention_num_buckets") else None
    lengths = (getattr(config, name, None) for name in ("n_positions", "max_position_embeddings", "model_max_length"))
    if not (found := next(filter(None, lengths), default)):
        raise EvaluationError(f"the config of {path} does not give the training length; write lengths in tokens")
    return int(found)


def unpack(path: str, folder: str | Path, dtype: str = "auto") -> None:
    """Convert a GGUF file to a checkpoint folder of Transformers, in bfloat16 unless `dtype` names another."""
    load_model(path, dtype=None if dtype == "auto" else dtype, device="cpu").save_pretrained(folder)  # type: ignore[operator]
    load_tokenizer(path).save_pretrained(folder)


@contextmanager
def as_folder(path: str) -> Iterator[str]:
    """A checkpoint as a folder: a GGUF file is unpacked into a temporary one."""
    if not is_gguf(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        unpack(path, folder)
        yield folder


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


def _read(path: str, what: str, kind: Any, of_gguf: Callable[[str], Any]) -> Any:
    local = Path(path).exists()
    with _one_line(path, what):
        if is_gguf(path):
            return of_gguf(path)
        make_loadable(path, local_files_only=local)
        return kind.from_pretrained(path, trust_remote_code=False, local_files_only=local)


def _device(name: str) -> torch.device:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if name not in ("auto", "cpu"):
            raise EvaluationError(f"device {name!r}: with several processes each uses its own device; use auto or cpu")
        process = joined(cpu=name == "cpu")
        atexit.register(process.destroy_process_group)
        return process.device
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise EvaluationError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error


@contextmanager
def _one_line(path: str, what: str) -> Iterator[None]:
    """Refuse invalid checkpoint folders before any slow step, and report problems in one line."""
    folder = Path(path)
    known = (folder.is_file() and is_gguf(path)) or any(
        (folder / name).is_file() for name in ("config.json", "adapter_config.json")
    )
    if folder.exists() and not known:
        kind = "a folder without config.json" if folder.is_dir() else "a file"
        raise EvaluationError(f"{path} is no checkpoint folder: it is {kind}")
    if not folder.exists() and (path.count("/") > 1 or path.startswith((".", "/", "~"))):
        raise EvaluationError(f"{path} is no checkpoint folder: there is nothing of that name")
    try:
        yield
    except MissingPackage:
        raise
    except Exception as error:  # loading raises many unrelated types, which all mean an invalid checkpoint
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise EvaluationError(f"cannot load {what} from {path}: {lines[0]}") from error
