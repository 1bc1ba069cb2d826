"""The kind of a checkpoint at a path: a model's folder, a folder of adapters, a GGUF file, or a name for the Hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from transformers.utils import CONFIG_NAME, cached_file

from rope_patch.errors import InvalidField, NoCheckpoint, NotExpressible
from rope_patch.models.adapter_record import ADAPTERS

Kind = Literal["model", "adapters", "gguf", "hub"]

OPTIONAL = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
"""Arguments with which `cached_file` returns None for a missing file."""


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file."""
    return Path(path).suffix == ".gguf"


def kind_of_checkpoint(path: Any, **location: Any) -> Kind:
    """Find out which kind of checkpoint a path names, by the local files.

    Args:
        path: a folder, a GGUF file or a Hub ID.
        **location: arguments of `from_pretrained` that locate a file, such as `subfolder`.

    Returns:
        `adapters` for a folder of PEFT adapters, with or without a config; `hub` for a path that is not local, but may
        be a Hub ID.

    Raises:
        NoCheckpoint: the path names no checkpoint; the message has the reason, and names the newest checkpoint of a
            Trainer's output folder.
    """
    if not isinstance(path, (str, os.PathLike)):
        kind = "None" if path is None else f"a {type(path).__name__}"
        is_loaded = hasattr(path, "named_modules")
        line = "pass the path of a folder or of a GGUF file, or a Hub ID"
        line = "it is loaded already: write patch(model, SCHEME)" if is_loaded else line
        raise NoCheckpoint(f"{kind} is not a checkpoint; {line}")
    name = os.fspath(path)
    folder = Path(name, location.get("subfolder") or "")
    if name and folder.is_dir():
        if (folder / ADAPTERS).is_file():
            return "adapters"
        if (folder / CONFIG_NAME).is_file():
            return "model"
        from transformers.trainer_utils import get_last_checkpoint

        newest = get_last_checkpoint(folder)
        advice = f"; it is a Trainer's output, whose newest checkpoint is {str(newest)!r}" if newest else ""
        raise NoCheckpoint(f"there is no checkpoint in {name!r}: the folder has no {CONFIG_NAME}{advice}")
    if name and folder.exists():
        if is_gguf(name) and folder.is_file():  # not a pipe, on which reading waits
            return "gguf"
        beside = folder.parent / CONFIG_NAME
        advice = f"; pass its folder, {str(folder.parent)!r}" if beside.is_file() else ""
        raise NoCheckpoint(f"{name!r} is not a checkpoint: it is neither a folder nor a GGUF file{advice}")
    parent, _, last = name.rpartition("/")
    if not last or is_gguf(name) or "/" in parent or "\\" in name or name.startswith(("/", ".", "~")):
        raise NoCheckpoint(f"there is no checkpoint {name!r}: no folder or file has this name")
    if parent and Path(parent).exists():
        here = {**OPTIONAL, **location, "local_files_only": True}
        if all(cached_file(name, file, **here) is None for file in (CONFIG_NAME, ADAPTERS)):
            advice = f"for a Hub ID, download it first: hf download {name}"
            raise NoCheckpoint(f"there is no checkpoint {name!r} in the folder {parent!r}; {advice}")
    return "hub"


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the `config.json` of a model's folder, unchanged.

    Raises:
        NoCheckpoint: there is no model's folder.
        NotExpressible: the folder holds adapters, whose positions come from their base.
        InvalidField: the config is not JSON.
    """
    kind = kind_of_checkpoint(folder)
    if kind == "adapters":
        raise NotExpressible(
            f"{folder} is an adapter: servers apply it to a base model whose config does not contain the scheme. Merge "
            "it first (PEFT's merge_and_unload, then save_pretrained) and export the merged folder"
        )
    if kind != "model":
        raise NoCheckpoint(f"{str(folder)!r} is not a folder; download it from the Hub first (hf download ID)")
    return read_json(Path(folder, CONFIG_NAME))


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a settings file of a checkpoint, unchanged; empty if the file holds something else.

    Raises:
        InvalidField: the file is not JSON.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{file} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}
