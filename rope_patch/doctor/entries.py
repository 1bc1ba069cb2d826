"""From the fields of a config to rotations: the spellings, the defaults of each architecture, and what is not allowed.

Where a config says one thing twice, programs differ in which one they take: a `Spelling` is such a choice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .errors import Unreadable
from .rotation import NEED_L, TYPES, Rotation
from .sources import Source

ALL = ""
"""The layer type of a config whose layers are alike."""

ORIGINAL = "original_max_position_embeddings"

_LARGEST_HEAD = 2**16
_LARGEST_NUMBER = 1e300

_THETA = {
    "full_attention": ("global_rope_theta", "rope_theta", "rotary_emb_base"),
    "sliding_attention": ("local_rope_theta", "rope_local_base_freq"),
}
"""Names of theta at the top of a config, by the layer type that it is for; a config of one type has the first."""

_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_pct")

_ALIASES = {"su": "longrope", "mrope": "default", "none": "default", "deepseek_yarn": "yarn", "axial": "axial"}

_NUMBERS = {
    **dict.fromkeys(("factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"), 0.0),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), 0.0),
}
_LISTS = ("short_factor", "long_factor")

KNOWN = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate", ORIGINAL, *_NUMBERS, *_LISTS),
        *("mrope_section", "mrope_interleaved", "interleaved", "finetuned", "short_mscale", "long_mscale"),
    }
)
"""Keys of an entry that some reader takes."""


@dataclass(frozen=True)
class Spelling:
    """Which of a config's words a program takes.

    Attributes:
        keys: the fields that it reads for the scaling, the first that is there and not empty wins.
        top_theta_first: whether `rope_theta` at the top wins over the one beside the scaling.
        nested: whether it reads parameters by layer type.
        theta: the base where none is named; None is the architecture's own default.
        inner_theta: whether it reads a theta that stands beside the scaling.
    """

    keys: tuple[str, ...] = ("rope_scaling", "rope_parameters")
    top_theta_first: bool = False
    nested: bool = True
    theta: float | None = None
    inner_theta: bool = True


TRANSFORMERS_5 = Spelling()
"""The yardstick: `rope_scaling or rope_parameters`, theta beside the scaling before theta at the top."""


@dataclass(frozen=True)
class Stated:
    """The rotations of a config by layer type, with a sentence about each thing that programs may take otherwise."""

    rotations: Mapping[str, Rotation]
    notes: tuple[str, ...] = field(default=())


@cache
def architectures() -> dict[str, dict[str, Any]]:
    """Defaults by `model_type`, as Transformers has them; `tools/position_defaults.py` writes the file."""
    return dict(json.loads((Path(__file__).parent / "architectures.json").read_text(encoding="utf-8")))


def rotations_of(source: Source, spelling: Spelling = TRANSFORMERS_5) -> Stated:
    """What a config says, taken by one spelling.

    Raises:
        Unreadable: it has no rotary positions, an unknown rope type, or a number that is not allowed.
    """
    return _Reader(source, spelling).stated()


class _Reader:
    """One reading of one config; `notes` grow on the way."""

    def __init__(self, source: Source, spelling: Spelling) -> None:
        self.source, self.spelling, self.notes = source, spelling, list(source.notes)
        self.fields = source.fields
        self.defaults = architectures().get(source.model_type, {})

    def stated(self) -> Stated:
        if self.source.kind == "gguf" and (lists := self._gguf_lists()):
            return Stated({ALL: lists}, tuple(self.notes))
        if self.defaults.get("rotary") is False and not self._scaling() and self._top(ALL) is None:
            raise Unreadable(f"{self.source.path}: {self.source.model_type} has no rotary positions")
        if not self.defaults and self.source.model_type and self.source.kind == "config":
            self.notes.append(
                f"model_type={self.source.model_type} is not known here: defaults are those of Llama, and code of "
                "its own may read other fields"
            )
        entry = self._scaling()
        thetas = self.defaults.get("theta", 10000.0)
        is_nested = bool(entry) and any(isinstance(value, dict) for value in entry.values())
        if is_nested and self.spelling.nested:
            kinds = [key for key, value in entry.items() if isinstance(value, dict)]
            return Stated({kind: self._rotation(entry[kind], kind) for kind in kinds}, tuple(self.notes))
        if is_nested:
            entry = {}
        if isinstance(thetas, dict) and self.spelling.nested:  # one scaling, and a theta for each type
            scaled = self.defaults.get("scaled", ["full_attention"])
            return Stated(
                {kind: self._rotation(entry if kind in scaled else {}, kind) for kind in thetas}, tuple(self.notes)
            )
        return Stated({ALL: self._rotation(entry, ALL)}, tuple(self.notes))

    def _scaling(self) -> dict[str, Any]:
        for key in self.spelling.keys:
            if found := self.fields.get(key):
                if not isinstance(found, dict):
                    raise Unreadable(f"{self.source.path}: {key}={found!r:.80} must be an object with a rope_type")
                return found
        return {}

    def _top(self, kind: str) -> float | None:
        for name in _THETA.get(kind, _THETA["full_attention"]):
            if self.fields.get(name) is not None:
                return self._number(name, self.fields[name])
        return None

    def _rotation(self, entry: Mapping[str, Any], kind: str) -> Rotation:
        named = entry.get("rope_type", entry.get("type", self._default_type(kind)))
        if not isinstance(named, str):
            raise Unreadable(f"{self.source.path}: rope_type={named!r:.80} must be a string, one of {', '.join(TYPES)}")
        rope_type = _ALIASES.get(named, named)
        if rope_type == "yarn" and self.source.model_type.startswith(("phi3", "phi4")) and "long_factor" in entry:
            rope_type = "longrope"  # as its first checkpoints have it
        if rope_type not in TYPES:
            raise Unreadable(f"{self.source.path}: rope_type={named!r:.80}; allowed are {', '.join(TYPES)}")
        if entry.get("type") not in (None, entry.get("rope_type", entry.get("type"))):
            self.notes.append(f"type={entry['type']!r} and rope_type={entry['rope_type']!r}: rope_type is taken")
        numbers = {name: self._number(name, entry[name]) for name in _NUMBERS if entry.get(name) is not None}
        longest = int(self._number("max_position_embeddings", self.fields.get("max_position_embeddings") or 0, 0))
        values: dict[str, Any] = {
            "theta": self._theta(entry, kind),
            "head_dim": self._head_dim(kind),
            "partial": self._partial(entry, kind),
            "longest": longest,
        }
        if rope_type in NEED_L:
            values["original"] = self._original(entry, longest, rope_type)
        self._factor(numbers, entry, rope_type, values)
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            if numbers.get(name) == 0:
                self.notes.append(f"{name}={entry[name]} counts as not given")
                del numbers[name]
        if rope_type not in ("yarn", "longrope"):
            numbers.pop("attention_factor", None)
        if "truncate" in entry:
            values["truncate"] = bool(entry["truncate"])
        values |= numbers
        sections = entry.get("mrope_section", self.fields.get("mrope_section"))
        if sections:
            values["sections"] = tuple(int(self._number("mrope_section", size)) for size in sections)
            values["interleaved"] = bool(entry.get("mrope_interleaved", entry.get("interleaved", False)))
        for name in _LISTS if rope_type == "longrope" else ():
            values[name] = self._list(name, entry.get(name))
        unknown = sorted(str(key) for key in entry.keys() - KNOWN)
        if unknown:
            self.notes.append(f"no rope type has {', '.join(unknown)}: every reader ignores it, or has code of its own")
        rotation = Rotation(rope_type=rope_type, **values)
        self._check(rotation)
        return rotation

    def _default_type(self, kind: str) -> str:
        kinds = self.defaults.get("rope_type", "default")
        return str(kinds.get(kind, "default") if isinstance(kinds, dict) else kinds)

    def _theta(self, entry: Mapping[str, Any], kind: str) -> float:
        own = self.defaults.get("theta", 10000.0)
        default = own.get(kind, next(iter(own.values()))) if isinstance(own, dict) else own
        inner = self._number("rope_theta", entry["rope_theta"]) if entry.get("rope_theta") is not None else None
        top = self._top(kind)
        if inner is not None and top is not None and inner != top:
            self.notes.append(f"theta is there twice: {inner:g} beside the scaling, {top:g} at the top")
        if not self.spelling.inner_theta:
            inner = None
        order = (top, inner) if self.spelling.top_theta_first else (inner, top)
        found = next((theta for theta in order if theta is not None), None)
        if found is None:
            found = float(default if self.spelling.theta is None else self.spelling.theta)
        if found <= 1:
            raise Unreadable(f"{self.source.path}: rope_theta={found:g} must be above 1")
        return found

    def _partial(self, entry: Mapping[str, Any], kind: str) -> float:
        own = self.defaults.get("partial", 1.0)
        default = own.get(kind, 1.0) if isinstance(own, dict) else own
        found = entry.get(_PARTIAL[0])
        for name in _PARTIAL:
            found = self.fields.get(name) if found is None else found
        if found is None and (rotated := self.fields.get("rotary_dim")):
            found = self._number("rotary_dim", rotated) / self._head_dim(kind)
        share = float(default) if found is None else self._number(_PARTIAL[0], found)
        if not 0 < share <= 1:
            raise Unreadable(f"{self.source.path}: partial_rotary_factor={share:g} must be above 0 and at most 1")
        return share

    def _head_dim(self, kind: str) -> int:
        names = self.defaults.get("names", {})

        def size(name: str) -> int:
            found = self.fields.get(name)
            found = self.fields.get(names.get(name, name)) if found is None else found
            found = max(found) if isinstance(found, list) and found else found
            return 0 if found is None or isinstance(found, (dict, list)) else int(self._number(name, found, 0))

        width = (
            size("qk_rope_head_dim") or size("global_head_dim" if kind == "full_attention" else "") or size("head_dim")
        )
        width = width or int(self.defaults.get("head_dim", 0))
        if not width and size("num_attention_heads"):
            width = size("hidden_size") // size("num_attention_heads")
        if not 2 <= width <= _LARGEST_HEAD:
            raise Unreadable(
                f"{self.source.path}: head_dim, or hidden_size / num_attention_heads, is {width}; it must be from 2 to "
                f"{_LARGEST_HEAD}"
            )
        return width

    def _original(self, entry: Mapping[str, Any], longest: int, rope_type: str) -> int:
        top, own = self.fields.get(ORIGINAL), entry.get(ORIGINAL)
        if top is not None and own is not None and top != own:
            self.notes.append(f"{ORIGINAL} is there twice: {own} beside the scaling, {top} at the top")
        found = top if top is not None else own
        if found is None:
            self.notes.append(f"{ORIGINAL} is missing: {rope_type} takes max_position_embeddings={longest} for L")
            found = longest
        original = int(self._number(ORIGINAL, found))
        if original < 2:
            raise Unreadable(f"{self.source.path}: {ORIGINAL}={original} must be at least 2, in tokens")
        return original

    def _factor(
        self, numbers: dict[str, float], entry: Mapping[str, Any], rope_type: str, values: Mapping[str, Any]
    ) -> None:
        original, longest = values.get("original"), values["longest"]
        if "factor" not in numbers and original and rope_type in ("yarn", "longrope"):
            numbers["factor"] = longest / original if longest else 1.0
            if rope_type == "yarn":
                self.notes.append(
                    f"factor={entry.get('factor')!r}: it is taken as {numbers['factor']:g}, max_position_embeddings / {ORIGINAL}"
                )
        needs = rope_type in ("linear", "dynamic", "llama3")
        if needs and "factor" not in numbers:
            raise Unreadable(f"{self.source.path}: factor is missing, which {rope_type} needs; it must be a number")
        if rope_type != "default" and numbers.get("factor", 1.0) <= 0:
            raise Unreadable(f"{self.source.path}: factor={numbers['factor']:g} must be above 0")
        if rope_type == "dynamic" and not longest:
            raise Unreadable(f"{self.source.path}: max_position_embeddings is missing, which dynamic needs")

    def _list(self, name: str, found: Any) -> tuple[float, ...]:
        if not isinstance(found, list) or not found:
            raise Unreadable(f"{self.source.path}: {name}={found!r:.80} must be a list with one number for each pair")
        numbers = tuple(self._number(name, each) for each in found)
        if min(numbers) <= 0:
            raise Unreadable(f"{self.source.path}: {name} has {min(numbers):g}; its numbers must be above 0")
        return numbers

    def _check(self, rotation: Rotation) -> None:
        pairs = len(rotation.plain())
        for name in _LISTS:
            if (numbers := getattr(rotation, name)) and len(numbers) != pairs:
                raise Unreadable(f"{self.source.path}: {name} has {len(numbers)} numbers; there are {pairs} pairs")
        if rotation.high_freq_factor == rotation.low_freq_factor and rotation.rope_type == "llama3":
            raise Unreadable(f"{self.source.path}: high_freq_factor must be above low_freq_factor")
        if rotation.rope_type == "yarn" and (rotation.beta_fast <= 0 or rotation.beta_slow <= 0):
            raise Unreadable(f"{self.source.path}: beta_fast and beta_slow must be above 0")
        if rotation.rope_type == "dynamic" and rotation.width <= 2:
            raise Unreadable(
                f"{self.source.path}: dynamic needs at least 4 rotated dimensions; there are {rotation.width}"
            )

    def _number(self, name: str, value: Any, least: float = -_LARGEST_NUMBER) -> float:
        read = value
        if isinstance(value, str):
            try:
                read = float(value)
            except ValueError:
                read = None
            else:
                self.notes.append(f"{name}={value!r} is a string; programs that need a number stop or misread it")
        if isinstance(read, bool) or not isinstance(read, (int, float)) or not least <= read <= _LARGEST_NUMBER:
            raise Unreadable(f"{self.source.path}: {name}={value!r:.80} must be a number")
        if math.isnan(read):
            raise Unreadable(f"{self.source.path}: {name} is not a number (NaN)")
        return float(read)

    def _gguf_lists(self) -> Rotation | None:
        own = self.fields["gguf"]
        short = own.get("rope_factors_short") or own.get("rope_freqs")
        if not short:
            return None
        entry = {"short_factor": short, "long_factor": own.get("rope_factors_long", short)}
        scaling = self.fields.get("rope_scaling", {})
        entry["attention_factor"] = scaling.get("attn_factor", own.get("rope.scaling.attn_factor", 1.0))
        entry[ORIGINAL] = scaling.get(ORIGINAL) or self.fields.get("max_position_embeddings")
        return self._rotation({"rope_type": "longrope", "factor": 1.0, **entry}, ALL)
