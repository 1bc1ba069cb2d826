"""Checkpoints from disk, quietly, with errors that say what is wrong with the folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from torch import nn
from transformers import AutoTokenizer

from rope_patch.errors import EvaluationError, did_you_mean
from rope_patch.evaluation.sharing import own_device
from rope_patch.saving.loading import from_pretrained, make_loadable
from rope_patch.shipped import recipes_folder

DTYPES = ("auto", "float32", "bfloat16", "float16")


def default_checkpoint() -> str:
    """The small Llama that comes with the library, as a path.

    Raises:
        EvaluationError: when the library was installed without it.
    """
    folder = recipes_folder() / "assets" / "tiny-llama"
    if not (folder / "config.json").is_file():
        raise EvaluationError(f"the embedded checkpoint {folder} is not here; name a checkpoint folder with --model")
    return str(folder)


def load_model(path: str, *, dtype: str = "auto", device: str = "auto", attention: str = "auto") -> nn.Module:
    """A language model, patched again where it was saved under a scheme.

    Args:
        path: a checkpoint folder, or the id of a model on the hub.
        dtype: `auto` for what the checkpoint declares, or one of `DTYPES`.
        device: `auto` for the first accelerator (of several processes: the one of the local rank) or else the CPU, or
            a name that torch knows.
        attention: `auto`, or an implementation that Transformers knows, such as `sdpa` or `eager`.

    Raises:
        EvaluationError: no checkpoint there, or one that cannot be loaded as asked; the first line of the reason.
    """
    if dtype not in DTYPES:
        raise EvaluationError(f"dtype {dtype!r}: {did_you_mean(dtype, DTYPES)}")
    place = _device(device)
    chosen: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
    with _one_line(path, "a language model"):
        model = from_pretrained(path, dtype=dtype, **_where(path), **chosen)
    return model.to(place)


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a checkpoint.

    Raises:
        EvaluationError: when there is none.
    """
    with _one_line(path, "a tokenizer"):
        make_loadable(path, **_where(path))
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, **_where(path))


def check_checkpoint(path: str) -> None:
    """Refuse, before anything slow, what cannot be a checkpoint folder.

    Raises:
        EvaluationError: a file, or a folder without `config.json`, or nothing that could be an id on the hub.
    """
    folder = Path(path)
    if folder.exists():
        if not (folder / "config.json").is_file():
            kind = "a folder without config.json" if folder.is_dir() else "a file"
            raise EvaluationError(f"{path} is no checkpoint folder: it is {kind}")
    elif path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise EvaluationError(f"{path} is no checkpoint folder: there is nothing of that name")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without Transformers' load reports, advice and progress bars, which a command line would drown in."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_verbosity = hub_logging.get_verbosity()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()


def _where(path: str) -> dict[str, Any]:
    return {"local_files_only": Path(path).exists()}


def _device(name: str) -> torch.device:
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return own_device() or accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EvaluationError(f"device {name!r} cannot be used here: {_first_line(error)}") from error
    return device


@contextmanager
def _one_line(path: str, what: str) -> Iterator[None]:
    check_checkpoint(path)
    try:
        yield
    except Exception as error:  # loading raises many unrelated types; all mean that this is not what it should be
        raise EvaluationError(f"cannot load {what} from {path}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
