"""The record of a scheme beside PEFT adapters, in its own file. In `adapter_config.json` PEFT would take the unknown
key for one of a newer release, and advise an upgrade.

Older adapters have the record in `adapter_config.json`, where it is still read.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rope_patch.errors import InvalidField
from rope_patch.models.record import RECORD, Record
from rope_patch.schemes.base import Scheme

ADAPTERS = "adapter_config.json"
"""PEFT's file with the settings of adapters."""

ADAPTER_RECORD = f"{RECORD}.json"
"""The file with the record of the scheme, and the checksum of the weights that were saved with it."""

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""PEFT's names for the weights of adapters."""

_WEIGHTS = "weights_sha256"


def write_adapter_record(folder: Path, scheme: Scheme) -> None:
    """Record the scheme of adapters that are saved in a folder."""
    settings: dict[str, Any] = {_WEIGHTS: _checksum(_weights_in(folder))}
    Record(scheme).write(settings)
    _write(folder / ADAPTER_RECORD, settings)


def renew_checksum(folder: Path) -> None:
    """Write the checksum of a folder's weights into its record: Transformers saves the settings of adapters before the
    weights.
    """
    file = folder / ADAPTER_RECORD
    if file.is_file():
        _write(file, {**json.loads(file.read_text(encoding="utf-8")), _WEIGHTS: _checksum(_weights_in(folder))})


def check_belongs(settings: dict[str, Any], file: Path, weights: Path | None) -> None:
    """Check that a file holds the record of a scheme, and was saved with the adapters beside it.

    Args:
        settings: the fields of the record's `file`.
        weights: weights of the adapters; None if there are none.

    Raises:
        InvalidField: the file holds no record, or was saved with other adapters: PEFT, which does not know the file,
            may have saved new adapters into the folder.
    """
    if not isinstance(settings.get(RECORD), dict):
        raise InvalidField(f"{file} has no scheme under {RECORD!r}; save the adapters again, or delete {file.name}")
    stated = settings.get(_WEIGHTS)
    if stated is not None and weights is not None and stated != _checksum(weights):
        raise InvalidField(
            f"{file} was saved with other weights than {weights.name} has now, so these adapters may have been "
            f"trained without its scheme. Delete {file.name} if they were; delete its line {_WEIGHTS!r} if only the "
            "file of the weights was rewritten"
        )


def _weights_in(folder: Path) -> Path | None:
    return next((file for name in ADAPTER_WEIGHTS if (file := folder / name).is_file()), None)


def _checksum(file: Path | None) -> str | None:
    if file is None:
        return None
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _write(file: Path, settings: dict[str, Any]) -> None:
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
