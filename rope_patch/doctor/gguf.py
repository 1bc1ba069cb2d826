"""The header of a GGUF file, as the fields of a config. The only tensors that are read are the lists that divide
frequencies.

Format: ggml-org/ggml, `docs/gguf.md` (version 3; the parts that are read here are the same in version 2).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .errors import Unreadable

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 0
_LISTS = {
    "rope_freqs.weight": "rope_freqs",
    "rope_factors_short.weight": "rope_factors_short",
    "rope_factors_long.weight": "rope_factors_long",
}
_SLIDING_BASE = {"gemma3": 10000.0, "gemma3n": 10000.0, "gemma-embedding": 10000.0}
"""Bases of the layers with a window that llama.cpp has in its code, by architecture."""

_INTERLEAVED = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
"""Architectures whose axes alternate from pair to pair."""

_LARGEST_TEXT, _LARGEST_ARRAY, _LARGEST_COUNT = 2**24, 2**25, 2**20
_KEPT = 4096  # entries of an array that are kept; vocabularies are longer and have no positions


def fields_of_gguf(path: Path) -> dict[str, Any]:
    """Read the config that a GGUF file states, under the names of Transformers; `gguf` holds the file's own names.

    Raises:
        Unreadable: the file is truncated, or its version is unknown.
    """
    with path.open("rb") as file:
        try:
            own, tensors = _header(file)
            lists = {key: _floats(file, tensors[name]) for name, key in _LISTS.items() if name in tensors}
        except (struct.error, OverflowError, MemoryError) as error:
            raise Unreadable(f"{path} is not a GGUF file, or is truncated: {error}") from error
        except ValueError as error:
            raise Unreadable(f"{path} is not a GGUF file that is known here: {error}") from error
    architecture = own.get("general.architecture", "")
    stated = {key.removeprefix(f"{architecture}."): value for key, value in own.items()}
    fields: dict[str, Any] = {
        "model_type": architecture,
        "max_position_embeddings": stated.get("context_length"),
        "hidden_size": stated.get("embedding_length"),
        "num_attention_heads": stated.get("attention.head_count"),
        "head_dim": stated.get("attention.key_length"),
        "rope_theta": stated.get("rope.freq_base"),
        "rope_local_base_freq": stated.get("rope.freq_base_swa", _SLIDING_BASE.get(str(architecture))),
        "gguf": {key: value for key, value in stated.items() if key.startswith("rope.")},
    }
    if rotated := stated.get("rope.dimension_count"):
        fields["rotary_dim"] = rotated
    kind = stated.get("rope.scaling.type", "none")
    if kind != "none":
        entry = {"rope_type": kind, "factor": stated.get("rope.scaling.factor", stated.get("rope.scale_linear"))}
        entry["original_max_position_embeddings"] = stated.get("rope.scaling.original_context_length")
        if kind == "yarn":
            entry["attention_factor"] = _temperature(stated, entry["factor"])
        entry["beta_fast"] = stated.get("rope.scaling.yarn_beta_fast")
        entry["beta_slow"] = stated.get("rope.scaling.yarn_beta_slow")
        fields["rope_scaling"] = {key: value for key, value in entry.items() if value is not None}
    if isinstance(sections := stated.get("rope.dimension_sections"), list) and any(sections):
        fields["mrope_section"] = sections[:3]  # the fourth is for models with four axes
        fields["mrope_interleaved"] = architecture in _INTERLEAVED
    if width := stated.get("attention.key_length_swa"):
        fields |= {"layer_types": ["sliding_attention"], "per_layer_config": {"0": {"head_dim": width}}}
    fields["gguf"] |= lists
    return {key: value for key, value in fields.items() if value is not None}


def _temperature(stated: Mapping[str, Any], factor: Any) -> float | None:
    """The factor on cos and sin under YaRN; None if it follows from the factor.

    llama.cpp multiplies its own 0.1 ln k + 1 by `attn_factor`, except under DeepSeek's `yarn_log_multiplier`, where
    `attn_factor` scales the scores instead.
    """
    if stated.get("rope.scaling.yarn_log_multiplier"):
        return 1.0
    share = stated.get("rope.scaling.attn_factor")
    if not isinstance(share, float) or not isinstance(factor, float) or factor < 1:
        return None
    return share * (0.1 * math.log(factor) + 1.0)


def _header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Read the settings, and for each tensor that is a list of float32 its length and its place in the file."""
    magic, version = file.read(4), _one(file, "I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"version {version}; 2 and 3 are known")
    tensors, settings = _one(file, "Q"), _one(file, "Q")
    if max(tensors, settings) > _LARGEST_COUNT:
        raise ValueError(f"{tensors} tensors and {settings} settings")
    own = {_text(file): _value(file, _one(file, "I")) for _ in range(settings)}
    lists: dict[str, tuple[int, int]] = {}
    for _ in range(tensors):
        name, dimensions = _text(file), _one(file, "I")
        if dimensions > 8:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        sizes = [_one(file, "Q") for _ in range(dimensions)]
        kind, offset = _one(file, "I"), _one(file, "Q")
        if dimensions == 1 and kind == _FLOAT32 and sizes[0] <= _KEPT:
            lists[name] = sizes[0], offset
    alignment = own.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment={alignment!r:.40} must be an integer above 0")
    start = -(-file.tell() // alignment) * alignment
    return own, {name: (size, start + offset) for name, (size, offset) in lists.items()}


def _floats(file: BinaryIO, tensor: tuple[int, int]) -> list[float]:
    size, place = tensor
    _go(file, place)
    return list(struct.unpack(f"<{size}f", file.read(4 * size)))


def _one(file: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0]


def _text(file: BinaryIO) -> str:
    length = _one(file, "Q")
    if length > _LARGEST_TEXT:
        raise ValueError(f"a text of {length} bytes")
    found = file.read(length)
    if len(found) < length:
        raise struct.error("the file ends inside a text")
    return found.decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind in _SCALARS:
        return _one(file, _SCALARS[kind])
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        raise ValueError(f"a value of type {kind}")
    kind, length = _one(file, "I"), _one(file, "Q")
    if length > _LARGEST_ARRAY or kind == _ARRAY:
        raise ValueError(f"an array of {length} values of type {kind}")
    if kind in _SCALARS and length > _KEPT:
        _skipped(file, length * struct.calcsize(_SCALARS[kind]))
        return None
    if kind == _STRING and length > _KEPT:
        for _ in range(length):
            _skipped(file, _one(file, "Q"))
        return None
    return [_value(file, kind) for _ in range(length)]


def _skipped(file: BinaryIO, size: int) -> None:
    _go(file, file.tell() + size)


def _go(file: BinaryIO, place: int) -> None:
    """Seek a byte of the file; a place beyond its end only shows when something is read there."""
    if place >= 2**62:
        raise struct.error(f"it names byte {place}")
    file.seek(place)
