"""Strategies of what nobody should write and somebody will: wrong values, damaged dicts, damaged words."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

_NUMBERS = [0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, 1e-320, -0.0, float("nan"), float("inf")]
_WORDS = ["", " ", "auto", "nan", "1e999", "-1", "0x10", "None", "true", "plain", "\0", "\ud800", "٣", "½", "a\nb"]
_LONG = ["9" * 5000, "x" * 5000, "[" * 2000, "(" * 300, "{" * 300, "-" * 3000, "+" * 300, "[1," * 500]

FRAGMENTS = [
    *_WORDS,
    *"[](){},=+:-.x\"'#&*!%@`|>~",
    "{[1]:2}",
    "{{}}",
    "target=auto",
    "target=9",
    "factor=auto",
    "window=",
    "1_0",
    "1j",
]
"""What damaged words are damaged with."""

_rarely_long = st.sampled_from([*FRAGMENTS, *_LONG])

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from([*_NUMBERS, *_WORDS, *_LONG, b"", 1j, object]),
)

keys = st.one_of(st.text(max_size=8), st.sampled_from([None, True, 0, -1, 1.5, float("nan"), (), "name", "self"]))

things: SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
"""Anything that YAML, JSON or a caller may hand over where something else was meant."""


@st.composite
def damaged(draw: DrawFn, wholes: SearchStrategy[dict[str, Any]], values: SearchStrategy[Any] = things) -> Any:
    """A dict, at any depth of which some values were replaced, left out or added."""
    whole = copy.deepcopy(draw(wholes))
    for _ in range(draw(st.integers(1, 3))):
        if not (places := _places(whole)):
            break
        holder, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(["replace", "replace", "drop", "add"]))
        if how == "replace":
            holder[key] = draw(values)
        elif how == "drop":
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw(keys)] = draw(values)
        else:
            holder.insert(key, draw(values))
    return whole


def _places(holder: Any) -> list[tuple[Any, Any]]:
    """Every value in nested dicts and lists, as where it is held and under which key."""
    found = []
    items = list(holder.items() if isinstance(holder, dict) else enumerate(holder))
    for key, value in items:
        found.append((holder, key))
        if isinstance(value, (dict, list)):
            found += _places(value)
    return found


@st.composite
def damaged_words(draw: DrawFn, wholes: Sequence[str]) -> str:
    """A text, some pieces of which were cut, doubled or replaced."""
    words = draw(st.sampled_from(wholes))
    for _ in range(draw(st.integers(1, 4))):
        start, length = draw(st.integers(0, len(words))), draw(st.integers(0, 6))
        piece = words[start : start + length]
        put = draw(
            st.one_of(st.sampled_from(["", piece * 2]), st.sampled_from(FRAGMENTS), st.text(max_size=3), _rarely_long)
        )
        words = words[:start] + put + words[start + length :]
    return words
