"""How each reader of a checkpoint folder interprets its positions, and what it silently ignores.

docs/serving.md has the facts about vLLM and llama.cpp, and how they were established.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rope_patch.models.config import checkpoint_of_config
from rope_patch.models.rope_parameters import entry_of
from rope_patch.mounting.saved import RECORD
from rope_patch.saving.export import config_of, read_config, readers_of
from rope_patch.schemes.registry import scheme_from_dict

READERS = NEW, OLD, VLLM, LLAMA_CPP = ("Transformers 5", "Transformers 4", "vLLM", "llama.cpp")

_NEED_L = ("yarn", "llama3", "longrope")
"""Types that need L, `original_max_position_embeddings`."""

_WORDS = ("rope_type", "rope_theta", "factor", "attention_factor", "partial_rotary_factor", "low_freq_factor")
"""Keys in which two descriptions of the same positions are compared."""

_OTHERS_DEFAULT = 8192  # L of llama3 and longrope in llama.cpp's converter if the top of the config has none


@dataclass
class Reading:
    """One reader's interpretation of a folder.

    Attributes:
        understood: the positions that it computes, such as `yarn, factor = 4.0`.
        lost: what it ignores or misreads, one sentence each.
    """

    reader: str
    understood: str
    lost: list[str] = field(default_factory=list)


def diagnose(folder: str | Path) -> list[Reading]:
    """How each of `READERS` interprets the positions of a checkpoint folder.

    Raises:
        NotExpressible: its config.json is not a config, or Transformers cannot read it.
        OSError: the folder or its config.json is missing.
    """
    raw = read_config(Path(folder))
    config = config_of(Path(folder)).get_text_config()
    part = raw if "rope_parameters" in raw or not isinstance(raw.get("text_config"), dict) else raw["text_config"]
    read = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    entry = entry_of(read) if "rope_type" in read or "full_attention" in read else {"rope_type": "default"}
    older = _as_older_readers_have_it(part)
    found = {reader: Reading(reader, _spelled(older if reader == OLD else entry)) for reader in READERS}

    def lost(sentence: str, *readers: str) -> None:
        for reader in readers or READERS:
            found[reader].lost.append(sentence)

    record = part.get(RECORD) or raw.get(RECORD)
    if isinstance(record, dict) and record.get("rope_parameters", read) == read:
        recorded = f"{scheme_from_dict(record.get('scheme', {}))}, which config.rope_patch records"
        lost(f"{recorded}: load it with rope_patch.from_pretrained", NEW, OLD)
        lost(f"{recorded}, unless rope_patch is installed with it, on a CPU", VLLM)
        lost(recorded, LLAMA_CPP)
    written, factor = part.get("rope_parameters"), entry.get("factor")
    if isinstance(written, dict) and "rope_type" in written and _differ(written, entry):
        lost(f"rope_parameters ({_spelled(written)}), because rope_scaling ({_spelled(older)}) wins", NEW, VLLM)
    if _differ(older, entry):
        lost(f"rope_parameters ({_spelled(entry)}): it reads only rope_scaling and rope_theta", OLD)
    _look_at_lengths(part, entry, checkpoint_of_config(config).training_length, lost)
    if entry["rope_type"] == "linear" and not isinstance(factor, float):
        lost(f"all of it: factor={factor} must be a float, or it does not start", VLLM)
    if entry["rope_type"] == "dynamic":
        lost("dynamic: it uses one base, for the longest text that it serves", VLLM)
        lost("dynamic: it keeps the checkpoint's base", LLAMA_CPP)
    else:
        for other in readers_of(read, raw.get("architectures") or [], 0)[1:]:
            if other.reads == "no" or (other.reads == "partly" and "rope_type" not in read):
                lost(f"{entry['rope_type']}: {other.words}", other.name)
    return list(found.values())


def _look_at_lengths(part: dict[str, Any], entry: dict[str, Any], trained: int, lost: Any) -> None:
    kind, longest, factor = entry["rope_type"], part.get("max_position_embeddings"), entry.get("factor")
    at_top = part.get("original_max_position_embeddings")
    if kind in _NEED_L and at_top is None and not _names_l(part):
        lost(f"L: original_max_position_embeddings is missing; max_position_embeddings={longest} is used instead")
    elif kind in ("llama3", "longrope") and at_top is None:
        lost(f"L: no original_max_position_embeddings at the top; {_OTHERS_DEFAULT} is used instead", LLAMA_CPP)
    reach = round(factor * trained) if factor and kind in _NEED_L else 0  # other types do not store L
    if longest and longest < reach:
        readers = (LLAMA_CPP,) if kind == "yarn" else (VLLM, LLAMA_CPP)  # vLLM multiplies L of yarn by the factor
        lost(f"the context beyond max_position_embeddings={longest}; factor times L is {reach}", *readers)


def _names_l(part: dict[str, Any]) -> bool:
    entries = (part.get("rope_parameters"), part.get("rope_scaling"))
    return any(isinstance(entry, dict) and "original_max_position_embeddings" in str(entry) for entry in entries)


def _as_older_readers_have_it(part: dict[str, Any]) -> dict[str, Any]:
    """The positions that Transformers before 5 reads: `rope_scaling`, and `rope_theta` at the top."""
    scaling = part.get("rope_scaling")
    scaling = scaling if isinstance(scaling, dict) else {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {**scaling, "rope_type": kind, "rope_theta": part.get("rope_theta", 10000.0)}


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return any(one.get(word) != other.get(word) for word in _WORDS if word in other or word in one)


def _spelled(entry: dict[str, Any]) -> str:
    shown = {word: entry[word] for word in _WORDS[1:] if entry.get(word) is not None}
    return ", ".join([str(entry.get("rope_type")), *(f"{word} = {value}" for word, value in shown.items())])
