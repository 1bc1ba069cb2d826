"""Strategies of what is allowed: every registered scheme with any legal fields, and compositions of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from rope_patch import Compose, InvalidField, Scheme, get_scheme, list_schemes
from rope_patch.schemes import scheme_class
from tests.families import TRAINING_LENGTH

LONGEST = 52
"""Tokens of the longest text of these tests."""

_switch = st.booleans()
_factor = st.floats(1, 10)
_window = st.integers(1, LONGEST + 4)
_trained = st.integers(8, 64)
_rows = st.integers(LONGEST, 80)
_base = st.floats(10, 1e6)
_few = st.integers(2, 12)
_small = st.floats(0.05, 1)
_ENDS = st.tuples(st.floats(0.2, 4), st.floats(4, 40))

_SHARED: dict[str, SearchStrategy[Any]] = {
    "factor": _factor,
    "base": _base,
    "window": _window,
    "width": st.integers(1, 12),
    "attention_factor": st.floats(0.5, 2),
    "mscale": st.floats(0.3, 2),
    "mscale_all_dim": st.floats(0.3, 2),
    "original_max_position_embeddings": _trained,
    "num_positions": _rows,
    "initial_std": _small,
    "initial_scale": _small,
    "length": st.integers(1, 90),
    "max_distance": st.integers(1, 40),
    "interpolation": _factor,
    "group_size": st.integers(1, 9),
    "chunk_size": st.integers(2, 40),
    "local_window": st.integers(1, 20),
    "n_global": st.integers(0, 6),
    "cutoff_length": st.integers(4, 200),
    "training_length": st.integers(2, 64),
    "embedding_dim": st.integers(1, 12).map(lambda half: 2 * half),
    "scale_base": st.floats(4, 600),
    "gamma": _small,
    "threshold": st.floats(1, 600),
    "stride": st.floats(0.001, 0.1),
    "alpha": st.floats(0.05, 0.95).filter(lambda alpha: abs(alpha - 0.5) > 0.05),
    "amplitude": st.floats(0.05, 2),
    "grid_width": st.integers(1, 9),
    "exponent": st.floats(0.2, 2),
    "partial_rotary_factor": st.floats(0.05, 1),
    "max_positions": st.integers(2, 40),
    "num_buckets": st.integers(2, 20).map(lambda half: 2 * half),
    "buckets": st.integers(2, 10).map(lambda half: 2 * half),
    "absolute_layers": st.integers(0, 2),
    "low_freq_factor": st.floats(0.3, 2),
    "high_freq_factor": st.floats(2.5, 8),
    "seed": st.integers(0, 9),
    "variant": st.sampled_from(["fixed", "old", "log", "power"]),
    "ramp": st.sampled_from(["index", "rotations"]),
    "constants": st.sampled_from(["released", "paper"]),
    "solver": st.sampled_from(["euler", "midpoint", "rk4", "dopri5"]),
    "start": st.sampled_from(["sinusoidal", "zeros"]),
    "shift": st.sampled_from(["floor", "fractional"]),
    "layout": st.sampled_from(["interleaved", "split"]),
    "terms": st.sampled_from([("c2p",), ("p2c",), ("p2c", "c2p")]),
}
"""By the name of a field, what it may be wherever it is; anything else is true or false."""

_LEFT_OUT = {
    "extend",  # keeps the rows of a table, which these models have none of
    "short_factor",
    "long_factor",
    "slopes",
    "beta_fast",
    "beta_slow",
}
"""Fields that are drawn together with others, or never."""

_OWNED = {"frequencies", "segments", "values", "embedding"}
"""Slots that one scheme of a composition has for itself."""


@st.composite
def schemes(draw: DrawFn, pairs: int, heads: int) -> Scheme:
    """One scheme, or up to three that do not want the same slot.

    Args:
        draw: by hypothesis.
        pairs: of dimensions of a head that turn.
        heads: number of query heads.
    """
    found: list[Scheme] = []
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        scheme = draw(single(pairs, heads))
        if not any(scheme.slots & other.slots & _OWNED or scheme.name == other.name for other in found):
            found.append(scheme)
    return found[0] if len(found) == 1 else Compose(*found)


@st.composite
def single(draw: DrawFn, pairs: int, heads: int) -> Scheme:
    """A registered scheme with some of its fields drawn, those without a default always."""
    name = draw(st.sampled_from(list_schemes()))
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(scheme_class(name)):  # type: ignore[arg-type]
        if field.name not in _LEFT_OUT and (field.default is dataclasses.MISSING or draw(st.booleans())):
            fields[field.name] = draw(_SHARED.get(field.name, _switch))
    if name == "longrope":
        factors = st.lists(st.floats(1, 8), min_size=pairs, max_size=pairs).map(tuple)
        fields |= {"short_factor": draw(factors), "long_factor": draw(factors)}
    if name == "alibi" and draw(st.booleans()):
        fields["slopes"] = draw(st.lists(_small, min_size=heads, max_size=heads).map(tuple))
    if name in ("yarn", "dynamic_yarn", "ntk_by_parts") and draw(st.booleans()):
        fields["beta_slow"], fields["beta_fast"] = draw(_ENDS)
    if name in ("ntk", "kerple") and "variant" in fields:
        fields["variant"] = {"ntk": ("fixed", "old"), "kerple": ("log", "power")}[name][len(fields["variant"]) % 2]
    try:
        return get_scheme(name, **fields)
    except InvalidField:  # two fields that do not go together
        reject()


def is_cached_exactly(scheme: Scheme, length: int) -> bool:
    """Whether a cache may be compared with a full forward: states of a length-dependent scheme are of their time."""
    return not scheme.length_dependent or length <= min(TRAINING_LENGTH, _own_length(scheme))


def _own_length(scheme: Scheme) -> int:
    said = [getattr(part, "original_max_position_embeddings", None) for part in scheme.parts()]
    return min((length for length in said if length), default=TRAINING_LENGTH)
