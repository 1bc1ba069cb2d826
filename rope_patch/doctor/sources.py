"""Sources of configs on disk: a folder, a `config.json`, or a GGUF file, as the fields of the text model's config."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import Unreadable
from .gguf import fields_of_gguf

LARGEST = 64 * 2**20
"""Size in bytes of the largest config that is read; published configs have up to a few hundred kilobytes."""

INNER = ("text_config", "llm_config", "language_config", "language_model", "thinker_config", "decoder")
"""Names under which a config contains the config of its text model."""

RECORD = "rope_patch"
"""The key under which rope_patch records a scheme that is not among the rope types."""


class Aside(str):
    """A note that raises no doubt about the positions, such as where they were found."""


@dataclass(frozen=True)
class Source:
    """The config of one checkpoint.

    Attributes:
        path: the file that was read.
        fields: fields of the text model, as written.
        kind: `config` or `gguf`.
        whole: all fields of the file; the text model's may be inside them.
    """

    path: Path
    fields: dict[str, Any]
    kind: str = "config"
    whole: dict[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """The name of the architecture in Transformers; empty if the config has none."""
        found = self.fields.get("model_type", self.whole.get("model_type", ""))
        return found if isinstance(found, str) else ""

    @property
    def architectures(self) -> list[str]:
        """The classes that the config names."""
        found = self.whole.get("architectures") or self.fields.get("architectures")
        return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

    @property
    def record(self) -> dict[str, Any] | None:
        """The scheme that rope_patch recorded, unless `rope_parameters` express it."""
        found = self.fields.get(RECORD, self.whole.get(RECORD))
        if not isinstance(found, dict):
            return None
        native = found.get("rope_parameters", self.fields.get("rope_parameters"))
        return found if native == self.fields.get("rope_parameters") else None


def read_source(path: str | Path) -> Source:
    """Read the config of a folder, of a JSON file or of a GGUF file.

    A folder of adapters is read by its base, if the base is a local folder.

    Args:
        path: path of the folder or file.

    Raises:
        Unreadable: there is no config, or the file is not one.
    """
    path = Path(path)
    try:
        return _read(path)
    except OSError as error:  # no rights, a name that is too long
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from error


def _read(path: Path) -> Source:
    if path.is_dir():
        return _of_folder(path)
    if not path.is_file():
        is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.parent.exists()
        first = f"; of a Hub ID, fetch it first: hf download {path} config.json --local-dir FOLDER" if is_id else ""
        raise Unreadable(f"{path} is not there; pass a folder with a config.json, a config.json, or a GGUF file{first}")
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            whole = fields_of_gguf(path)
            return Source(path, whole, "gguf", whole)
    if path.suffix == ".gguf":
        raise Unreadable(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    return _of_json(path)


def _of_folder(folder: Path) -> Source:
    if (folder / "config.json").is_file():
        return _of_json(folder / "config.json")
    if (adapters := folder / "adapter_config.json").is_file():
        settings = _parsed(adapters)
        base = settings.get("base_model_name_or_path")
        for place in (Path(str(base)), folder / str(base)) if base else ():
            if (place / "config.json").is_file():
                source = _of_json(place / "config.json")
                beside = folder / f"{RECORD}.json"  # older adapters have the record in their settings
                recorded = (_parsed(beside) if beside.is_file() else settings).get(RECORD, source.record)
                return replace(source, whole=source.whole | {RECORD: recorded})
        raise Unreadable(
            f"{folder} has adapters of {base!r:.200}, which is no folder here; pass the folder of the base"
        )
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return _read(files[0])
    several = f", but {len(files)} GGUF files; pass one of them" if files else ""
    raise Unreadable(f"{folder} has no config.json{several}")


def _of_json(path: Path) -> Source:
    whole = _parsed(path)
    fields = whole
    for _ in range(3):  # Qwen3-Omni has the text model two levels down
        name = next((name for name in INNER if isinstance(fields.get(name), dict) and fields[name]), None)
        if name is None:
            break
        fields = fields[name]
    return Source(path, fields, "config", whole)


def _parsed(path: Path) -> dict[str, Any]:
    if path.stat().st_size > LARGEST:
        raise Unreadable(f"{path} has {path.stat().st_size} bytes; a config has at most {LARGEST}")
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also raised for bytes that are not UTF-8
        raise Unreadable(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Unreadable(f"{path} contains a {type(found).__name__}; a config is an object with named fields")
    return found
