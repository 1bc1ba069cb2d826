"""How each reader of a checkpoint folder interprets its positions, and what it silently ignores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rope_patch.models.config import length_today
from rope_patch.models.record import Record
from rope_patch.models.rope_entries import as_computed
from rope_patch.models.rope_parameters import entry_of
from rope_patch.saving import readers
from rope_patch.saving.checkpoint_kind import read_config
from rope_patch.saving.loading import load_config

READERS = tuple(reader.name for reader in readers.READERS)

_COMPARED = ("rope_type", "rope_theta", "factor", "attention_factor", "partial_rotary_factor", "low_freq_factor")
"""Keys in which two descriptions of the same positions are compared."""

_L = "original_max_position_embeddings"


@dataclass
class Reading:
    """One reader's interpretation of a folder.

    Attributes:
        understood: the positions that it computes, such as `yarn, factor = 4.0`.
        lost: what it ignores or misreads, one sentence each.
        partly: the limits within which it computes the rest, likewise.
        known: how that was established, see `readers.Reader`.
        notes: values that Transformers computes otherwise than they are written, and what it makes of them; other
            programs may read them otherwise.
    """

    reader: str
    understood: str
    lost: list[str]
    partly: list[str]
    known: str
    notes: list[str] = field(default_factory=list)


def diagnose(folder: str | Path, keys: Iterable[str] = ()) -> list[Reading]:
    """How each of `READERS` interprets the positions of a checkpoint folder.

    Args:
        keys: of some readers alone, see `readers.Reader`.

    Raises:
        NoCheckpoint: there is no model in the folder, or its config cannot be read.
        NotExpressible, InvalidField: it has adapters, or its config is not JSON.
    """
    raw = read_config(folder)
    config = load_config(folder).get_text_config()
    fields = raw if "rope_parameters" in raw or not isinstance(raw.get("text_config"), dict) else raw["text_config"]
    read = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    entry: dict[str, Any] = (
        entry_of(read) if "rope_type" in read or "full_attention" in read else {"rope_type": "default"}
    )
    scaling: Any = fields.get("rope_scaling")  # which Transformers before 5 reads, and rope_theta at the top
    older = scaling if isinstance(scaling, dict) else {}
    older = {"rope_type": older.get("type", "default"), **older, "rope_theta": fields.get("rope_theta", 10000.0)}
    record, written = Record.read(raw), fields.get("rope_parameters")
    kind, factor, longest = entry["rope_type"], entry.get("factor"), fields.get("max_position_embeddings")

    def lost(reader: readers.Reader, support: readers.Support) -> Iterator[str]:
        if record is not None and not record.is_stated(config):
            yield f"{record.scheme}, which config.rope_patch records{reader.record}"
        stated = written if isinstance(written, dict) and "rope_type" in written else entry
        if reader.scaling_wins and _differ(stated, entry):
            yield f"rope_parameters ({_spelled(stated)}), because rope_scaling ({_spelled(older)}) wins"
        if reader.is_old and _differ(older, entry):
            yield f"rope_parameters ({_spelled(entry)}): it reads only rope_scaling and rope_theta"
        if kind in readers.NEED_L:  # other types do not store L
            if fields.get(_L) is None and _L not in f"{written} {fields.get('rope_scaling')}":
                yield f"L: {_L} is missing; max_position_embeddings={longest} is used instead"
            elif fields.get(_L) is None and kind in reader.l_at_top:
                yield f"L: no {_L} at the top; 8192 is used instead"
            reach = length_today(config)
            if kind in reader.cut and longest and longest < reach:
                yield f"the context beyond max_position_embeddings={longest}; factor times L is {reach}"
        if reader.needs_float and kind == "linear" and not isinstance(factor, float):
            yield f"all of it: factor={factor} must be a float, or it does not start"
        if support.reads == "no":
            yield f"{kind}: {support.words}"

    readings = []
    for reader in readers.readers_called(keys):
        (support,) = readers.supported(read, raw.get("architectures"), longest or 0, [reader])
        partly = [f"{kind}: {support.words}"] if support.reads == "partly" else []
        understood = _spelled(older if reader.is_old else entry)
        notes = as_computed(entry, config)[1] if reader.key == "transformers" else []
        readings.append(Reading(reader.name, understood, list(lost(reader, support)), partly, reader.known, notes))
    return readings


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return any(one.get(key) != other.get(key) for key in _COMPARED if key in other or key in one)


def _spelled(entry: dict[str, Any]) -> str:
    shown = {key: entry[key] for key in _COMPARED[1:] if entry.get(key) is not None}
    return ", ".join([str(entry.get("rope_type")), *(f"{key} = {value}" for key, value in shown.items())])
