"""Rotations from the fields of a config: spellings, the defaults of each architecture, and values that are not allowed.

If a config states a value twice, programs differ in which one they read: a `Spelling` is such a choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .architecture import LOCAL_THETA, PARTIAL, THETA, WIDTHS, Architecture, architecture_of, unknown_architecture
from .checked import MOST_TOKENS, Checked
from .rotation import NEED_L, TYPES, Rotation
from .sources import Aside, Source

ALL = ""
"""The layer type of a config whose layers are alike."""

ORIGINAL = "original_max_position_embeddings"

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Layer types that configs without a list of layers may name parameters for."""

LARGEST_HEAD = 2**12
"""The largest head dimension that a config may name."""

_ALIASES = {"su": "longrope", "mrope": "default", "xdrope": "dynamic", "none": "default", "deepseek_yarn": "yarn"}
"""Other names of rope types, as remote code and older versions wrote them."""

_PHI = ("phi3", "phi4_multimodal")
"""Model types whose first checkpoints call `longrope` by the name of YaRN."""

_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""Fields that a rope type needs; the factor of `yarn` may be null."""

_NUMBERS = {
    "factor": (*_NEEDED, "proportional"),
    "attention_factor": ("yarn", "longrope"),
    **dict.fromkeys(("mscale", "mscale_all_dim", "beta_fast", "beta_slow"), ("yarn",)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
}
"""The numbers of an entry, and the rope types that have them."""

_MAY_BE_ZERO = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
"""Numbers whose 0 counts as absent."""

_FOR_OTHERS: Mapping[str, Mapping[str, float]] = {
    "short_mscale": {},
    "long_mscale": {},
    "alpha": {"least": 0.0, "most": 1e6},
    "max_trained_positions": {"least": 0.0, "most": MOST_TOKENS},
    "rope_dim": {"least": 2.0, "most": LARGEST_HEAD},
}
"""Numbers that other readers read, with their limits."""

_LISTS = ("short_factor", "long_factor")

ENTRY = ("rope_type", "rope_theta", "partial_rotary_factor", "truncate", ORIGINAL, *_NUMBERS, *_LISTS)
"""Keys of an entry that Transformers reads for positions of text."""

KNOWN = frozenset(
    {
        *ENTRY,
        *("type", "mrope_section", "mrope_interleaved", "interleaved", "xdrope_section"),
        *("finetuned", "max_position_embeddings", "llama_4_scaling_beta", *_FOR_OTHERS),
    }
)
"""Keys of an entry that some reader reads."""


@dataclass(frozen=True)
class Spelling:
    """The fields of a config that a program reads, and the order in which they win.

    Attributes:
        keys: the fields that it reads for the scaling; the first that is present and not empty wins.
        top_theta_first: whether `rope_theta` at the top wins over a theta beside the scaling.
        nested: whether it reads parameters by layer type.
        theta: the base if the config names none; None is the architecture's own default.
        inner_theta: whether it reads a theta that stands beside the scaling.
        type_first: whether `type` wins over `rope_type`.
        top_partial_first: whether `partial_rotary_factor` at the top wins over a factor beside the scaling.
        inner_partial: whether it reads a `partial_rotary_factor` that stands beside the scaling.
        original: the places where it looks for L, `top` of the config or `entry`, in this order; L is
            max_position_embeddings if neither has it.
    """

    keys: tuple[str, ...] = ("rope_scaling", "rope_parameters")
    top_theta_first: bool = False
    nested: bool = True
    theta: float | None = None
    inner_theta: bool = True
    type_first: bool = False
    top_partial_first: bool = False
    inner_partial: bool = True
    original: tuple[str, ...] = ("top", "entry")


TRANSFORMERS_5 = Spelling()
"""The yardstick: `rope_scaling or rope_parameters`, theta beside the scaling before theta at the top."""


@dataclass(frozen=True)
class Stated:
    """The positions that a config states.

    Attributes:
        rotations: the rotations by layer type.
        notes: a sentence about each value that programs may read differently.
        entries: the fields beside the scaling as written, by layer type.
    """

    rotations: Mapping[str, Rotation]
    notes: tuple[str, ...] = field(default=())
    entries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def rotations_of(source: Source, spelling: Spelling = TRANSFORMERS_5) -> Stated:
    """Read the rotations that a config states, under one spelling.

    Args:
        source: the result of `read_source`.
        spelling: the fields that count, and their order.

    Raises:
        Unreadable: the config has no rotary positions, an unknown rope type, or a number that is not allowed.
    """
    return _Reader(source, spelling).stated()


class _Reader:
    """One reading of one config; it adds to the notes of `checked`."""

    def __init__(self, source: Source, spelling: Spelling) -> None:
        self.source, self.spelling, self.fields = source, spelling, source.fields
        self.checked = Checked(source.path)
        self.own = self._architecture()

    def stated(self) -> Stated:
        if self.own.unread:
            self.checked.refuse(f"model_type={self.source.model_type}: {self.own.unread}")
        for name, value in self.own.only_if.items():
            if self.fields.get(name) != value:
                self.checked.refuse(f"{name} is not {value!r}: it has no rotary positions")
        if self.fields.get("alibi") is True:
            self.checked.refuse("alibi is true: it has no rotary positions")
        entries = self._lists_of_gguf() or self._entries()
        rotations = {kind: self._rotation(entry, kind) for kind, entry in entries.items()}
        if not rotations:
            self.checked.refuse("rope_parameters is null for every layer type: it has no rotary positions")
        return Stated(rotations, tuple(dict.fromkeys(self.checked.notes)), entries)

    def _architecture(self) -> Architecture:
        """The defaults of the config's architecture; llama.cpp names other architectures, and takes no size by
        default.
        """
        found = architecture_of(self.source.model_type) if self.source.kind == "config" else None
        if found is None and self.source.kind == "config":
            self.checked.notes.append(
                Aside(
                    f"model_type={self.source.model_type!r:.40} is not one of Transformers: Llama's defaults are "
                    "taken, and code of its own may read other fields"
                )
            )
        return found or unknown_architecture(self.fields)

    def _entries(self) -> dict[str, Mapping[str, Any]]:
        """The parameters by layer type, each as one entry."""
        named = [name for name in self.spelling.keys if self.fields.get(name)]
        given = {name: self.checked.object(name, self.fields[name]) for name in named}
        if self.own.fixed:
            return {ALL: {}}
        if not self.own.reads_scaling and given.pop("rope_scaling", {}):
            self.checked.notes.append(f"{self.source.model_type} does not read rope_scaling in Transformers")
        if self.own.kinds:
            return self._entries_of_kinds(given)
        entry = next(iter(given.values()), self.own.rope_parameters)
        nested = self._by_type(entry)
        if not nested:
            return {ALL: entry}
        if self.own.known:
            self.checked.notes.append(
                f"{self.source.model_type} has one rotation for all layers in Transformers; its parameters name "
                f"{', '.join(nested)}"
            )
        if not self.spelling.nested:
            return {ALL: {}}
        return {kind: each for kind, each in nested.items() if each is not None}

    def _entries_of_kinds(self, given: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Like `_entries`, for an architecture whose layer types have their own thetas."""
        if self.own.split:
            return self._split(next(iter(given.values()), {}))
        entries: dict[str, Any] = {} if given else dict(self.own.rope_parameters)
        entries = {kind: entries.get(kind, {}) for kind in self.own.kinds}
        nested = {name: by_type for name, entry in given.items() if (by_type := self._by_type(entry))}
        if nested and self.spelling.nested:
            entries |= next(iter(nested.values()))
        for name in [name for name in given if name not in nested][:1]:
            kinds = self.own.scaled if name == "rope_scaling" else self.own.flat
            if kinds is None:
                self.checked.refuse(f"{name} must have an object for each of {', '.join(self.own.kinds)}")
            if not kinds:
                self.checked.notes.append(f"{name} names no layer type, so {self.source.model_type} ignores it")
            if kinds and "type" in given[name] and "rope_type" not in given[name]:
                self.checked.notes.append(
                    f"{name} has type={given[name]['type']!r:.40} without rope_type: Transformers 5 drops the scaling "
                    f"of {self.source.model_type}"
                )
            entries |= {kind: {"rope_type": "default", **(entries[kind] or {}), **given[name]} for kind in kinds}
        return {kind: entry for kind, entry in entries.items() if entry is not None}

    def _split(self, entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """The two entries of DeepSeek V4 (`DeepseekV4Config.__post_init__` of 5.23). If the config names both layer
        types, fields that they leave out come from the top, except that `default` alone rotates whole heads. Else the
        parameters belong to the compressed keys, with theta and the rotated share from the top, and YaRN without a
        temperature.
        """
        share = self.fields.get(PARTIAL[0])
        unsaid = self._partial({}, "", "default", self._head_dim("")) if share is None else share
        both = {kind: self._by_type(entry).get(kind) for kind in self.own.kinds}
        if self.spelling.nested and all(both.values()):
            theta = self.fields.get(THETA[0]) or self.own.theta[self.own.kinds[0]]  # type: ignore[index]
            top = {PARTIAL[0]: unsaid, THETA[0]: theta}
            whole = {**top, PARTIAL[0]: 1.0} if share is None else top
            return {
                kind: {**(whole if self._type(each or {}) == "default" else top), **(each or {})}
                for kind, each in both.items()
            }
        scaling = {name: value for name, value in entry.items() if name not in (*both, THETA[0])}
        if scaling and self._type(scaling) == "yarn":
            scaling = {"attention_factor": 1.0, **scaling}
        main, compress = self.own.kinds
        return {main: {PARTIAL[0]: unsaid}, compress: {**scaling, PARTIAL[0]: unsaid}}

    def _by_type(self, entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any] | None]:
        """The parts of an entry under the name of a layer type; null means a layer without positions."""
        listed = self.fields.get("layer_types")
        listed = [name for name in listed if str(name).isidentifier()] if isinstance(listed, list) else []
        names = {*self.own.kinds, *LAYER_TYPES, *listed}
        found = {name: value for name, value in entry.items() if name in names}
        return {name: value if value is None else self.checked.object(name, value) for name, value in found.items()}

    def _rotation(self, entry: Mapping[str, Any], kind: str) -> Rotation:
        rope_type = self._type(entry)
        values: dict[str, Any] = {
            "theta": self._theta(entry, kind),
            "head_dim": self._head_dim(kind),
            "longest": self._longest(),
        }
        values["partial"] = self._partial(entry, kind, rope_type, values["head_dim"])
        if rope_type == "dynamic" and self.own.alpha and entry.get("alpha"):
            width = values["head_dim"]
            values["theta"] *= self.checked.number("alpha", entry["alpha"], most=1e6) ** (width / max(width - 2, 1))
            rope_type = "default"
        for name in _NEEDED.get(rope_type, ()):
            if name not in entry or (entry[name] is None and (rope_type, name) != ("yarn", "factor")):
                self.checked.refuse(f"{name} is missing, which {rope_type} needs")
        values |= self._numbers(entry, rope_type)
        if rope_type in NEED_L:
            values["original"] = self._original(entry, rope_type, values["longest"])
        if rope_type in ("yarn", "longrope") and "factor" not in values:
            values["factor"] = self._ratio(entry, rope_type, values)
        if rope_type == "yarn" and entry.get("truncate") is not None:
            values["truncate"] = self.checked.flag("truncate", entry["truncate"])
        for name in _LISTS if rope_type == "longrope" else ():
            values[name] = self.checked.numbers(name, entry[name])
        self._note_unknown(entry)
        rotation = Rotation(rope_type=rope_type, **values, **self._sections(entry))
        self._check(rotation)
        return rotation

    def _type(self, entry: Mapping[str, Any]) -> str:
        first, second = ("type", "rope_type") if self.spelling.type_first else ("rope_type", "type")
        named = entry.get(first, entry.get(second, "default"))
        if not isinstance(named, str):
            self.checked.refuse(f"rope_type={named!r:.80} must be a string, one of {', '.join(TYPES)}")
        if entry.get("type", named) != named:
            self.checked.notes.append(f"type={entry['type']!r:.40} and rope_type={named!r}: rope_type is taken")
        found = _ALIASES.get(named, named)
        if found != named and named != "mrope" and not self.own.alpha:
            self.checked.notes.append(f"rope_type={named!r} is an older name of {found}: Transformers 5 stops at it")
        if found == "yarn" and self.source.model_type in _PHI:
            found = "longrope"
        if found not in TYPES:
            self.checked.refuse(f"rope_type={named!r:.80}; allowed are {', '.join(TYPES)}")
        return found

    def _theta(self, entry: Mapping[str, Any], kind: str) -> float:
        if self.own.fixed:
            return float(self._of_kind(self.own.theta, kind, 10000.0))
        names = self.own.reads_theta
        names = names.get(kind, ()) if isinstance(names, Mapping) else names
        inner = self._theta_in(entry, ("rope_theta",))
        top = self._theta_in(self.fields, names)
        if inner is not None and top is not None and inner != top:
            self.checked.notes.append(f"theta is there twice: {inner:g} beside the scaling, {top:g} at the top")
        for name in (*THETA, *LOCAL_THETA) if self.own.known and not self.own.kinds else ():
            if self.fields.get(name) is not None and name not in names:
                self.checked.notes.append(f"{name} is not a name of theta that {self.source.model_type} reads")
        if not self.spelling.inner_theta:
            inner = None
        order = (top, inner) if self.spelling.top_theta_first else (inner, top)
        found = next((theta for theta in order if theta is not None), self.spelling.theta)
        return float(self._of_kind(self.own.theta, kind, 10000.0)) if found is None else found

    def _theta_in(self, fields: Mapping[str, Any], names: Iterable[str]) -> float | None:
        for name in names:
            if fields.get(name) is not None:
                return self.checked.number(name, fields[name], above=1.0, most=1e30)
            if name in fields:
                self.checked.notes.append(f"{name} is null: Transformers stops, and others take their default")
        return None

    def _head_dim(self, kind: str) -> int:
        width, fields = 0, {**self.fields, **self._of_layer(kind)}
        if (
            kind == "full_attention"
            and isinstance(self.own.head_dim, Mapping)
            and "head_dim" not in self._of_layer(kind)
        ):
            fields["head_dim"] = self.fields.get("global_head_dim", self.own.head_dim[kind])
        for parts in (name.split("+") for name in self.own.reads_head_dim):
            if not width and all(fields.get(part) is not None for part in parts):
                width = sum(self.checked.size(part, fields[part]) for part in parts)
        names = [name for name in self.own.reads_head_dim if name in fields]
        if not width and not names:  # null does not count as unsaid
            width = int(self._of_kind(self.own.head_dim, kind, 0) or 0)
        if not width:
            heads = self._size("num_attention_heads") or self.own.num_attention_heads
            width = (self._size("hidden_size") or self.own.hidden_size) // max(heads, 1)
        if not 2 <= width <= LARGEST_HEAD:
            self.checked.refuse(
                f"head_dim, or hidden_size / num_attention_heads, is {width}; it must be from 2 to {LARGEST_HEAD}"
            )
        return width

    def _size(self, name: str) -> int:
        """A size, under the architecture's own name for it; 0 if the config lacks it."""
        for each in (self.own.names.get(name, name), name):
            if self.fields.get(each) is not None:
                return self.checked.size(each, self.fields[each])
        return 0

    def _of_layer(self, kind: str) -> Mapping[str, Any]:
        """The fields that `per_layer_config` has for the first layer of a type."""
        layers, types = self.fields.get("per_layer_config"), self.fields.get("layer_types")
        if not isinstance(layers, dict) or not isinstance(types, list) or kind not in types:
            return {}
        found = layers.get(str(types.index(kind)))
        return found if isinstance(found, dict) else {}

    def _longest(self) -> int:
        for name in (
            self.own.names.get("max_position_embeddings", "max_position_embeddings"),
            "max_position_embeddings",
        ):
            if self.fields.get(name) is not None:
                return self.checked.tokens(name, self.fields[name], 1)
        return self.own.max_position_embeddings

    def _partial(self, entry: Mapping[str, Any], kind: str, rope_type: str, head_dim: int) -> float:
        if rope_type == "default" and not self.own.heeds_partial:
            return 1.0
        inner = [(PARTIAL[0], entry)] if self.spelling.inner_partial else []
        top = [(name, self.fields) for name in self.own.reads_partial]
        for name, fields in [*top, *inner] if self.spelling.top_partial_first else [*inner, *top]:
            if fields.get(name) is None:
                continue
            if name in WIDTHS:
                share = min(self.checked.number(name, fields[name]) / head_dim, 1.0)
                return (
                    share if self.own.known else min(math.nextafter(share, 2.0), 1.0)
                )  # so that it rounds to the width
            return self.checked.number(name, fields[name], most=1.0)
        if self.own.kinds and rope_type != "default":
            return 1.0
        return float(self._of_kind(self.own.partial, kind, 1.0))

    def _of_kind(self, default: Any, kind: str, otherwise: Any) -> Any:
        return default.get(kind, otherwise) if isinstance(default, Mapping) else default

    def _numbers(self, entry: Mapping[str, Any], rope_type: str) -> dict[str, float]:
        for name, limits in _FOR_OTHERS.items():
            if entry.get(name) is not None:
                self.checked.number(name, entry[name], **limits)
        found = {}
        for name, types in _NUMBERS.items():
            if entry.get(name) is None or rope_type not in types:
                continue
            if entry[name] == 0 and name in _MAY_BE_ZERO and entry[name] is not False:
                self.checked.notes.append(f"{name}={entry[name]!r:.40} counts as not given")
                continue
            least = 0.0 if name == "attention_factor" else None  # Transformers also computes with 0
            found[name] = self.checked.number(name, entry[name], least=least)
        return found

    def _original(self, entry: Mapping[str, Any], rope_type: str, longest: int) -> int:
        own, top = entry.get(ORIGINAL), self.fields.get(ORIGINAL, self.own.original)
        if top is not None and own is not None and top != own:
            self.checked.notes.append(
                f"{ORIGINAL} is there twice: {own!r:.40} beside the scaling, {top!r:.40} at the top"
            )
        places = {"top": top, "entry": own}
        order = ("entry",) if self.own.kinds else self.spelling.original
        found = next((places[place] for place in order if places[place] is not None), None)
        if found is None:
            self.checked.notes.append(
                f"{ORIGINAL} is missing: {rope_type} takes max_position_embeddings={longest} for L"
            )
            found = longest
        return self.checked.tokens(ORIGINAL, found)

    def _ratio(self, entry: Mapping[str, Any], rope_type: str, values: Mapping[str, Any]) -> float:
        found: float = values["longest"] / values["original"] if values["longest"] else 1.0
        if rope_type == "yarn":
            self.checked.notes.append(
                f"factor={entry.get('factor')!r}: it is taken as {found:g}, max_position_embeddings / {ORIGINAL}"
            )
        return found

    def _sections(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        if self.own.known and not self.own.sections:
            return {}
        found = entry.get("mrope_section", entry.get("xdrope_section", self.fields.get("mrope_section")))
        if found is None:
            return {"sections": tuple(self.own.sections), "interleaved": self.own.interleaved}
        if not isinstance(found, list) or not 1 <= len(found) <= 4:
            self.checked.refuse(f"mrope_section={found!r:.80} must be a list with the pairs of each axis")
        sizes = tuple(0 if size == 0 else self.checked.size("mrope_section", size) for size in found)
        if max(sizes) > LARGEST_HEAD:
            self.checked.refuse(f"mrope_section={found!r:.80} has more pairs than a head; at most {LARGEST_HEAD}")
        named = ("mrope_interleaved", "interleaved")
        said = any(fields.get(name) is True for name in named for fields in (entry, self.fields))
        return {"sections": sizes, "interleaved": self.own.interleaved or (said and not self.own.known)}

    def _note_unknown(self, entry: Mapping[str, Any]) -> None:
        unknown = sorted(repr(key)[1:41].rstrip("'") for key in entry.keys() - KNOWN)[:5]
        if unknown:
            self.checked.notes.append(
                f"no rope type has {', '.join(unknown)}: every reader ignores it, or has code of its own"
            )

    def _check(self, rotation: Rotation) -> None:
        if rotation.width < 2:
            self.checked.refuse(f"partial_rotary_factor={rotation.partial:g} rotates less than one pair")
        pairs = len(rotation.plain())
        for name in _LISTS:
            if (numbers := getattr(rotation, name)) and len(numbers) != pairs:
                self.checked.refuse(f"{name} has {len(numbers)} numbers; there are {pairs} pairs")
        if rotation.rope_type == "llama3" and rotation.high_freq_factor < rotation.low_freq_factor:
            self.checked.refuse(
                f"high_freq_factor={rotation.high_freq_factor:g} must be at least "
                f"low_freq_factor={rotation.low_freq_factor:g}"
            )
        if rotation.rope_type == "dynamic" and rotation.width <= 2:
            self.checked.refuse(f"dynamic needs at least 4 rotated dimensions; there are {rotation.width}")
        if rotation.rope_type == "dynamic" and not rotation.longest:
            self.checked.refuse("max_position_embeddings is missing, which dynamic needs")

    def _lists_of_gguf(self) -> dict[str, Mapping[str, Any]]:
        """The lists of factors in a GGUF file, as one entry."""
        own = self.fields.get("gguf", {}) if self.source.kind == "gguf" else {}
        short = own.get("rope_factors_short") or own.get("rope_freqs")
        if not short:
            return {}
        entry = {
            "rope_type": "longrope",
            "factor": 1.0,
            "short_factor": short,
            "long_factor": own.get("rope_factors_long", short),
            "attention_factor": own.get("rope.scaling.attn_factor", 1.0),
            ORIGINAL: own.get("rope.scaling.original_context_length") or self.fields.get("max_position_embeddings"),
        }
        return {kind: {} for kind in self.own.kinds} | {"full_attention" if self.own.kinds else ALL: entry}
