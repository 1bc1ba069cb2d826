"""Differences between readings of positions: from which position on, and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from .architecture import architecture_of
from .entries import ALL, rotations_of
from .errors import Unreadable
from .odd_values import notes_on_odd_values
from .reader import EXACT, Reader
from .readers import READERS
from .rotation import Rotation
from .sources import Source

SEEN = 0.01
"""The smallest difference in radians at which two angles count as different: a cosine then differs in the second
decimal of a score's addend.
"""


_UNCHECKED = "its code for this model decides what parameters by layer type are, and was not checked"

_UNKNOWN = 4096
"""The length of a text in tokens that is assumed if the config has none."""

_FINE = 1.02
"""The ratio between the ends of two adjacent stretches of lengths, if frequencies follow the length."""


@dataclass(frozen=True)
class Difference:
    """The difference of two rotations of one layer type.

    Attributes:
        layer_type: the layer type; empty if all layers are alike.
        first: the first position at which logits differ.
        angles: the largest difference of a pair's angle in radians, by the length of the text in tokens.
        temperature: the factor on cos and sin that the reader uses, divided by the factor that the config states.
        words: the difference as a sentence.
    """

    layer_type: str
    first: int
    angles: Mapping[int, float] = field(hash=False)
    temperature: float
    words: str


@dataclass(frozen=True)
class Reading:
    """The positions that one reader takes from a config, compared with the positions that the config states.

    Attributes:
        reader: name of the reader; `version` and `known` are as in `Reader`.
        verdict: `agrees`, `partly`, `differs`, `refuses` or `unknown`.
        rotations: the rotations that it computes, by layer type.
        differences: differences from the config's own rotations.
        reasons: sentences, one for each thing that the reader does differently.
        cures: lines to write into the config, or commands to start the program with.
        sources: the sources of the reasons.
        limit: the longest text that the reader accepts, if that is less than the config's; else None.
        writes: for a trainer, see `Reader`.
    """

    reader: str
    version: str
    known: str
    verdict: str
    rotations: Mapping[str, Rotation]
    differences: tuple[Difference, ...] = ()
    reasons: tuple[str, ...] = ()
    cures: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    limit: int | None = None
    writes: str = ""


@dataclass(frozen=True)
class Report:
    """The positions that a config states, and the reading of each program.

    Attributes:
        path: the file that was read.
        rotations: the rotations that the config states, by layer type, as the newest Transformers reads them.
        notes: sentences about values that programs may read differently.
        readings: one for each reader that was asked for.
    """

    path: str
    rotations: Mapping[str, Rotation]
    notes: tuple[str, ...]
    readings: tuple[Reading, ...] = field(default=())

    @property
    def agrees(self) -> bool:
        """Whether no reader is known to compute positions that differ from the config's."""
        return all(reading.verdict in ("agrees", "partly", "unknown") for reading in self.readings)


def diagnose(source: Source, asked: Iterable[str] = ()) -> Report:
    """Find out which positions readers take from a config.

    Args:
        source: the result of `read_source`.
        asked: names of readers behind `--for`, each with a version or without, such as `vllm==0.10`; all by default.

    Raises:
        Unreadable: the positions of the config cannot be read, or there is no such reader.
    """
    stated = rotations_of(source)
    chosen = [called(name) for name in asked] or [(reader, reader.version) for reader in READERS]
    readings = tuple(_reading(reader, version, source, stated.rotations) for reader, version in chosen)
    notes = (*stated.notes, *notes_on_odd_values(source, stated.rotations))
    return Report(str(source.path), stated.rotations, notes, readings)


def called(asked: str) -> tuple[Reader, str]:
    """Resolve a word such as `vllm==0.10` to a reader and a version.

    Raises:
        Unreadable: there is no such reader.
    """
    name, _, version = asked.partition("==")
    by_key = {reader.key: reader for reader in READERS}
    if name not in by_key:
        near = get_close_matches(name, by_key, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise Unreadable(f"there is no reader {name!r}; {hint}allowed: {', '.join(by_key)}")
    return by_key[name], version or by_key[name].version


def _reading(reader: Reader, version: str, source: Source, stated: Mapping[str, Rotation]) -> Reading:
    own = architecture_of(source.model_type)
    if own is not None and own.split and not reader.knows_layers_of(source.model_type):
        return Reading(reader.name, version, reader.known, "unknown", {}, reasons=(_UNCHECKED,), writes=reader.writes)
    understood = reader.understood(source, version)
    differences = () if understood.refusal else differences_of(stated, understood.rotations)
    found = understood.deviations if differences or understood.refusal else ()
    reasons = [f"it {deviation.words}" for deviation in found]
    cures = [deviation.cure for deviation in found if deviation.cure]
    limit = None
    if understood.refusal:
        verdict, reasons = "refuses", reasons or [understood.refusal]
    else:
        partly = bool(found) and all(each.partly for each in found)
        verdict = "agrees" if not differences else "partly" if partly else "differs"
        for rotation in stated.values():
            cut = reader.limit(source, rotation, version)
            if cut is not None and cut < reach(rotation):
                limit, verdict = cut, "differs"
                reasons.append(f"it limits texts to max_position_embeddings={cut}; factor times L is {reach(rotation)}")
                cures.append(f'write "max_position_embeddings": {reach(rotation)}')
    if verdict == "agrees" and set(stated) != {ALL} and not reader.knows_layers_of(source.model_type):
        verdict = "partly"
        reasons.append(_UNCHECKED)
    if source.record is not None:
        verdict = "differs"
        reasons.append(f"it does not know the scheme that config.rope_patch records{reader.record}")
    sources = [each.source for each in (*found, *understood.possible)]
    if differences and not reasons:
        reasons, sources = [f"it takes {reader.takes}"], [reader.source]
        cures = cures or ["write the entry in both spellings: rope-patch export does"]
    reasons += [
        f"{version} may be older than {each.ended or each.until} or not: before, it {each.words}"
        if each.ended or each.until
        else f"{version} may be older than {each.begun or each.since} or not: since then, it {each.words}"
        for each in understood.possible
    ]
    longest = max((reach(rotation) for rotation in stated.values()), default=0)
    return Reading(
        reader.name,
        version,
        reader.known if version == reader.version else "read",
        verdict,
        understood.rotations,
        differences,
        tuple(reasons),
        tuple(dict.fromkeys(cure.format(length=longest) for cure in cures)),
        tuple(dict.fromkeys(sources)),
        limit,
        reader.writes,
    )


def reach(rotation: Rotation) -> int:
    """The longest text in tokens that a config is meant for: its maximum, or the factor times L if that is more."""
    if rotation.rope_type == "yarn":
        return max(rotation.longest, round(rotation.factor * rotation.trained))
    return max(rotation.longest, rotation.trained)


def differences_of(stated: Mapping[str, Rotation], found: Mapping[str, Rotation]) -> tuple[Difference, ...]:
    """The differences between two readings of a config, by layer type; one rotation may stand for several types."""
    differences = []
    for kind in dict.fromkeys((*stated, *found)):
        one, other = stated.get(kind, stated.get(ALL)), found.get(kind, found.get(ALL))
        if one is not None and other is not None:
            differences.append(difference_of(one, other, kind))
        elif kind != ALL:
            words = "turns layers of a type that the first does not name" if other else "has no layers of this type"
            differences.append(Difference(kind, 0, {}, 1.0, words))
    seen = [each for each in differences if each is not None]
    return tuple(each for index, each in enumerate(seen) if each not in seen[:index])


def difference_of(stated: Rotation, found: Rotation, kind: str = ALL) -> Difference | None:
    """The difference of a rotation from the stated one; None if both turn every pair alike.

    Args:
        stated, found: the rotation that a config states, and the one that a reader or another config computes.
        kind: the layer type.
    """
    old, new = stated.temperature(), found.temperature()
    temperature = new / old if old else float(new == old)  # a factor of 0 is one that Transformers computes
    if len(stated.frequencies()) != len(found.frequencies()):
        words = f"turns {found.width} of {found.head_dim} dimensions instead of {stated.width} of {stated.head_dim}"
        return Difference(kind, 1, {}, temperature, words)
    first = _first(stated, found)
    said = []
    if abs(temperature - 1) > EXACT:
        said.append(f"multiplies cos and sin by {new:.4g} instead of {old:.4g}")
    if first is not None:
        said.append(_described(stated, found))
    if stated.axes() != found.axes():
        said.append("gives the axes of an image to other pairs, so images differ")
    if not said:
        return None
    trained = stated.trained or _UNKNOWN
    lengths = sorted({trained, 2 * trained, max(trained, round(stated.factor * trained))})
    angles = {length: _angle(stated, found, length) for length in lengths}
    start = 0 if abs(temperature - 1) > EXACT else first or 0
    return Difference(kind, start, angles, temperature, " and ".join(said))


def _described(stated: Rotation, found: Rotation) -> str:
    """Describe the first three settings that make the angles differ."""
    names = ["rope_type", "theta", "partial"]
    if {stated.rope_type, found.rope_type} != {"default"}:
        names += ["factor", "trained"]
    if stated.rope_type == found.rope_type:
        names += {
            "yarn": ["beta_fast", "beta_slow", "truncate"],
            "llama3": ["low_freq_factor", "high_freq_factor"],
        }.get(stated.rope_type, [])
    changed = [
        f"{'L' if name == 'trained' else name} = {_plain(new)} instead of {_plain(old)}"
        for name in names
        if (new := getattr(found, name)) != (old := getattr(stated, name))
    ]
    return f"turns with {', '.join(changed[:3])}" if changed else "divides the frequencies by other lists"


def _plain(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _angle(one: Rotation, other: Rotation, length: int) -> float:
    """The largest difference of a pair's angle at the end of a text, in radians."""
    pairs = zip(one.frequencies(length), other.frequencies(length), strict=True)
    return max((abs(a - b) for a, b in pairs if abs(a - b) > EXACT * max(abs(a), abs(b))), default=0.0) * length


def _first(stated: Rotation, found: Rotation) -> int | None:
    """The first length at which an angle differs by `SEEN`; None if none does up to 16 times the longest text.

    Within a stretch of lengths the frequencies are constant, so the difference grows with the length. The frequencies
    of `dynamic` change with the length: the difference may shrink for a while, so its stretches are short.
    """
    last = 16 * (max(reach(stated), reach(found)) or _UNKNOWN)
    ends = {stated.trained, found.trained, stated.longest, found.longest, last}
    if "dynamic" in (stated.rope_type, found.rope_type):
        ends |= {round(last * _FINE**-step) for step in range(400)}
    start = 1
    for end in sorted(end for end in ends if end):
        if _angle(stated, found, end) >= SEEN:
            low, high = start, end
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if _angle(stated, found, middle) >= SEEN else (middle + 1, high)
            return low
        start = end + 1
    return None


def as_numbers(report: Report) -> dict[str, Any]:
    """Convert a report to JSON; `schema.json` describes it.

    Args:
        report: the report on one config.
    """
    return {
        "schema": 1,
        "config": report.path,
        "positions": {kind: _as_entry(rotation) for kind, rotation in report.rotations.items()},
        "notes": list(report.notes),
        "agrees": report.agrees,
        "readers": [
            {
                "reader": reading.reader,
                "version": reading.version,
                "known": reading.known,
                "verdict": reading.verdict,
                "positions": {kind: _as_entry(rotation) for kind, rotation in reading.rotations.items()},
                "differences": [as_difference(each) for each in reading.differences],
                "reasons": list(reading.reasons),
                "cures": list(reading.cures),
                "sources": list(reading.sources),
                "limit": reading.limit,
            }
            for reading in report.readings
        ],
    }


def as_difference(difference: Difference) -> dict[str, Any]:
    """Convert a difference to JSON."""
    return {
        "layer_type": difference.layer_type,
        "first_position": difference.first,
        "angles": {str(length): angle for length, angle in difference.angles.items()},
        "temperature": difference.temperature,
        "words": difference.words,
    }


def _as_entry(rotation: Rotation) -> dict[str, Any]:
    """Convert a rotation to JSON, without the fields that its type does not use."""
    shown = {
        "rope_type": rotation.rope_type,
        "theta": rotation.theta,
        "head_dim": rotation.head_dim,
        "rotated": rotation.width,
        "max_position_embeddings": rotation.longest,
        "temperature": rotation.temperature(),
    }
    if rotation.rope_type != "default":
        shown["factor"] = rotation.factor
    if rotation.original:
        shown["original_max_position_embeddings"] = rotation.original
    if rotation.sections:
        shown |= {"mrope_section": list(rotation.sections), "mrope_interleaved": rotation.interleaved}
    return shown
