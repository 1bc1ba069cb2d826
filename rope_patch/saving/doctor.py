"""What each reader of a checkpoint folder understands of its positions, and what it drops without a word.

The facts about vLLM and llama.cpp, and where they were read or run, are in docs/serving.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rope_patch.models.config import checkpoint_of_config
from rope_patch.saving.export import _RECORD, _config_of, _entry, _read_config, _readers
from rope_patch.schemes.registry import scheme_from_dict

READERS = NEW, OLD, VLLM, LLAMA_CPP = ("Transformers 5", "Transformers 4", "vLLM", "llama.cpp")

_NEED_L = ("yarn", "llama3", "longrope")
"""Types that are computed from L, `original_max_position_embeddings`."""

_WORDS = ("rope_type", "rope_theta", "factor", "attention_factor", "partial_rotary_factor", "low_freq_factor")
"""What two spellings of the same positions are compared by."""

_OTHERS_DEFAULT = 8192  # L of llama3 and longrope for llama.cpp's converter where the top of the config has none


@dataclass
class Reading:
    """What one reader makes of a folder.

    Attributes:
        understood: the positions that it computes, such as `yarn, factor = 4.0`.
        lost: what it drops or takes for something else, one sentence each.
    """

    reader: str
    understood: str
    lost: list[str] = field(default_factory=list)


def diagnose(folder: str | Path) -> list[Reading]:
    """What each of `READERS` understands of the positions of a checkpoint folder.

    Raises:
        NotExpressible: its config.json is no config, or Transformers does not read it.
        OSError: there is no such folder, or it has no config.json.
    """
    raw = _read_config(Path(folder))
    config = _config_of(Path(folder)).get_text_config()
    part = raw if "rope_parameters" in raw or not isinstance(raw.get("text_config"), dict) else raw["text_config"]
    read = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    entry = _entry(read) if "rope_type" in read or "full_attention" in read else {"rope_type": "default"}
    older = _as_older_readers_have_it(part)
    found = {reader: Reading(reader, _spelled(older if reader == OLD else entry)) for reader in READERS}

    def lost(sentence: str, *readers: str) -> None:
        for reader in readers or READERS:
            found[reader].lost.append(sentence)

    record = part.get(_RECORD) or raw.get(_RECORD)
    if isinstance(record, dict) and record.get("rope_parameters", read) == read and "positions" not in record:
        recorded = f"{scheme_from_dict(record.get('scheme', {}))}, which config.rope_patch records"
        lost(f"{recorded}: load it with rope_patch.from_pretrained", NEW, OLD)
        lost(f"{recorded}, unless rope_patch is installed beside it, on a CPU", VLLM)
        lost(recorded, LLAMA_CPP)
    said, factor = part.get("rope_parameters"), entry.get("factor")
    if isinstance(said, dict) and "rope_type" in said and _differ(said, entry):
        lost(f"rope_parameters ({_spelled(said)}), because rope_scaling ({_spelled(older)}) wins", NEW, VLLM)
    if _differ(older, entry):
        lost(f"rope_parameters ({_spelled(entry)}): it reads rope_scaling and rope_theta alone", OLD)
    _look_at_lengths(part, entry, checkpoint_of_config(config).training_length, lost)
    if entry["rope_type"] == "linear" and not isinstance(factor, float):
        lost(f"all of it: factor={factor} has to be a float, or it does not start", VLLM)
    if entry["rope_type"] == "dynamic":
        lost("dynamic: one base for the longest text that it serves", VLLM)
        lost("dynamic: its base stays that of the checkpoint", LLAMA_CPP)
    else:
        for other in _readers(read, raw.get("architectures") or [], 0)[1:]:
            if other.reads == "no" or (other.reads == "partly" and "rope_type" not in read):
                lost(f"{entry['rope_type']}: {other.words}", other.name)
    return list(found.values())


def _look_at_lengths(part: dict[str, Any], entry: dict[str, Any], trained: int, lost: Any) -> None:
    kind, longest, factor = entry["rope_type"], part.get("max_position_embeddings"), entry.get("factor")
    at_top = part.get("original_max_position_embeddings")
    if kind in _NEED_L and at_top is None and not _names_l(part):
        lost(f"L: original_max_position_embeddings is missing, and max_position_embeddings={longest} is taken for it")
    elif kind in ("llama3", "longrope") and at_top is None:
        lost(f"L: no original_max_position_embeddings at the top, and {_OTHERS_DEFAULT} is taken for it", LLAMA_CPP)
    reach = round(factor * trained) if factor and kind in _NEED_L else 0  # others do not tell their L
    if longest and longest < reach:
        readers = (LLAMA_CPP,) if kind == "yarn" else (VLLM, LLAMA_CPP)  # vLLM multiplies L of yarn by the factor
        lost(f"the context beyond max_position_embeddings={longest}; factor times L is {reach}", *readers)


def _names_l(part: dict[str, Any]) -> bool:
    entries = (part.get("rope_parameters"), part.get("rope_scaling"))
    return any(isinstance(entry, dict) and "original_max_position_embeddings" in str(entry) for entry in entries)


def _as_older_readers_have_it(part: dict[str, Any]) -> dict[str, Any]:
    """What Transformers before 5 reads: `rope_scaling`, and `rope_theta` at the top."""
    scaling = part.get("rope_scaling")
    scaling = scaling if isinstance(scaling, dict) else {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {**scaling, "rope_type": kind, "rope_theta": part.get("rope_theta", 10000.0)}


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return any(one.get(word) != other.get(word) for word in _WORDS if word in other or word in one)


def _spelled(entry: dict[str, Any]) -> str:
    shown = {word: entry[word] for word in _WORDS[1:] if entry.get(word) is not None}
    return ", ".join([str(entry.get("rope_type")), *(f"{word} = {value}" for word, value in shown.items())])
