"""A scheme for each layer, and named mixtures of layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rope_patch.errors import InvalidField, did_you_mean
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.compose import Combined
from rope_patch.schemes.registry import FORMS, as_scheme, get_scheme, scheme_from_dict, split_outside_brackets
from rope_patch.schemes.slots import Checkpoint

REST = "rest"  # selects all layers that no other selector selects

# nine digits at most: int() refuses thousands of them
_SLICE = re.compile(r"-?\d{0,9}:-?\d{0,9}(:(0*[1-9]\d{0,8})?)?", re.ASCII)
_RANGES = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", re.ASCII)


class PerLayer(Combined):
    """A scheme for each layer of a stack.

    A selected layer is changed even if `patch` alone would skip it: a layer with a sliding window, or a layer without
    rotation if the scheme needs none.

    Args:
        schemes: maps a selector to a scheme, a scheme's name, a list of these to compose, or None to leave the layers
            unchanged. A selector is a slice (`"3::4"`), indices and ranges (`"0-2,5"`, both ends included), a layer
            type of the config (`"full_attention"`; a config without types has this one and `"sliding_attention"`) or
            `"rest"`.

    The text form is `layers:[3::4=nope+logn;rest=rerope:window=512]`, with `none` for None.

    Raises:
        InvalidField: a selector or a scheme is invalid. `patch` checks that selectors are disjoint and complete.

    Example:
        >>> patch(model, PerLayer({"3::4": [NoPE(), LogN()], "rest": ReRoPE(window=512)}))
    """

    name = "layers"
    equation = "each layer under the scheme of its selector"
    source = Source(
        "Rope to Nope and Back Again: A New Hybrid Attention Strategy", 2025, "https://arxiv.org/abs/2501.18795"
    )
    by_layer = True
    sweep = None  # mixtures are designed by hand

    def __init__(self, schemes: Mapping[str | int, str | Scheme | Sequence[str | Scheme] | None]) -> None:
        if not isinstance(schemes, Mapping) or not schemes:
            raise InvalidField(f"PerLayer: {schemes!r} is not allowed; a dict of selectors and schemes is expected")
        self._schemes = {_selector(selector): _scheme(scheme) for selector, scheme in schemes.items()}
        if len(self._schemes) < len(schemes):
            raise InvalidField(f"PerLayer: duplicate selector in {', '.join(map(str, schemes))}")
        self.inner = tuple(scheme for scheme in self._schemes.values() if scheme is not None)
        if not self.inner:
            raise InvalidField(f"PerLayer: every selector of {self} is None, which changes nothing")

    @classmethod
    def read(cls, layers: Any) -> PerLayer:
        """Parse a mixture from its text form, or from a saved dict.

        Args:
            layers: `[selector=scheme;...]`, with `none` for layers to leave unchanged; or a dict from selectors to the
                dict of a scheme, or to None.

        Raises:
            InvalidField, UnknownScheme, SlotConflict: the text or the dict is invalid.
        """
        if isinstance(layers, dict):
            return cls({key: None if value is None else scheme_from_dict(value) for key, value in layers.items()})
        if not (isinstance(text := layers, str) and text.startswith("[") and text.endswith("]")):
            raise InvalidField(
                f"layers={layers!r} is not allowed; layers:[selector=scheme;...] or a dict from selectors to schemes is"
            )
        schemes: dict[str | int, str | Scheme | Sequence[str | Scheme] | None] = {}
        for item in filter(None, split_outside_brackets(text[1:-1], ";")):
            selector, equals, spec = (part.strip() for part in item.partition("="))
            if not equals:
                raise InvalidField(f"{item!r} in layers:{text} does not have the form selector=scheme")
            if selector in schemes:
                raise InvalidField(f"layers:{text} contains the selector {selector!r} twice; each is allowed once")
            schemes[selector] = None if spec.lower() in ("none", "null") else spec
        return cls(schemes)

    def of_layers(self, kinds: Mapping[int, str], num_layers: int) -> dict[int, Scheme | None]:
        selected: dict[int, tuple[str, Scheme | None]] = {}
        for selector, scheme in self._schemes.items():
            chosen = _chosen(selector, kinds, num_layers)
            if twice := [index for index in chosen if index in selected]:
                others = ", ".join(dict.fromkeys(repr(selected[index][0]) for index in twice))
                raise InvalidField(f"{self}: {_named(twice)} selected by {others} and {selector!r}; select each once")
            selected |= dict.fromkeys(chosen, (selector, scheme))
        rest = [index for index in kinds if index not in selected]
        if rest and REST not in self._schemes:
            raise InvalidField(f"{self}: {_named(rest)} not selected; add a selector, or 'rest' (None: unchanged)")
        return {index: selected[index][1] if index in selected else self._schemes[REST] for index in kinds}

    def reach(self, checkpoint: Checkpoint) -> Scheme:
        return self._each(lambda scheme: scheme.reach(checkpoint.under(scheme)))

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        return self._each(lambda scheme: scheme.resolve(checkpoint.under(scheme)))

    def _each(self, change: Callable[[Scheme], Scheme]) -> PerLayer:
        return PerLayer({key: None if value is None else change(value) for key, value in self._schemes.items()})

    def fields(self) -> dict[str, Any]:
        return {"layers": {key: None if value is None else value.to_dict() for key, value in self._schemes.items()}}

    def __str__(self) -> str:
        spelled = (f"{key}={'none' if value is None else value}" for key, value in self._schemes.items())
        return f"layers:[{';'.join(spelled)}]"

    def __repr__(self) -> str:
        return f"PerLayer({self._schemes!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerLayer) and self._schemes == other._schemes

    def __hash__(self) -> int:
        return hash(frozenset(self._schemes.items()))


def _selector(selector: Any) -> str:
    text = str(selector).strip() if isinstance(selector, (str, int)) and not isinstance(selector, bool) else ""
    allowed = _SLICE.fullmatch(text) or _RANGES.fullmatch(text) or re.fullmatch(r"[A-Za-z]\w*", text)
    if not allowed:
        raise InvalidField(
            f"PerLayer: {selector!r} is not a selector; a slice ('3::4'), indices and ranges ('0-2,5'), a layer type "
            "of the config ('full_attention') or 'rest' is expected"
        )
    return text


def _scheme(value: Any) -> Scheme | None:
    if value is None:
        return None
    schemes = [value] if isinstance(value, (str, Scheme)) else value
    if not isinstance(schemes, Sequence) or not all(isinstance(scheme, (str, Scheme)) for scheme in schemes):
        raise InvalidField(f"PerLayer: {value!r} is not allowed; a scheme, its name, a list of them or None is")
    scheme = as_scheme(schemes, {})
    if scheme.by_layer:
        raise InvalidField(f"PerLayer: {scheme} is itself a scheme by layer; list its layers here instead")
    return scheme


def _chosen(selector: str, kinds: Mapping[int, str], num_layers: int) -> list[int]:
    """The attention layers that a selector picks; none for `rest`."""
    if selector == REST:
        return []
    if _SLICE.fullmatch(selector):
        bounds = (int(bound) if bound else None for bound in selector.split(":"))
        chosen: Iterable[int] = range(num_layers)[slice(*bounds)]
    elif _RANGES.fullmatch(selector):
        chosen = [index for item in selector.split(",") for index in _range(item, num_layers)]
    else:
        chosen = [index for index, kind in kinds.items() if kind == selector]
        if not chosen:
            allowed = did_you_mean(selector, list(dict.fromkeys(kinds.values())))
            raise InvalidField(f"PerLayer: no layer of this model has the type {selector!r}; {allowed}")
    attending = [index for index in chosen if index in kinds]
    if missing := [index for index in chosen if index >= num_layers]:
        raise InvalidField(f"PerLayer: {selector!r} names layer {missing[0]}; the stack has {num_layers}, from 0")
    if not attending:
        raise InvalidField(f"PerLayer: {selector!r} selects no attention layer; those are {_listed(kinds)}")
    return attending


def _range(item: str, num_layers: int) -> range:
    """Parse `0-2` or `5` to a range of layers; of layers that do not exist, it keeps only the first, for the error."""
    first, *last = map(int, item.split("-"))
    return range(first, min(*(last or [first]), max(first, num_layers)) + 1)


def _named(indices: Sequence[int]) -> str:
    return f"layer {indices[0]} is" if len(indices) == 1 else f"layers {_listed(indices)} are"


def _listed(indices: Iterable[int]) -> str:
    return ", ".join(map(str, indices))


def hwfa(every: int = 4, window: int | None = None) -> PerLayer:
    """Give layers windows with RoPE, and every k-th layer full attention under log-n without rotation (HWFA).

    Positions come from the windows; the full layers use no positions, so they have no distance to extrapolate. Use it
    on models trained this way. Source: kexue.fm/archives/9603 (the last layer full) and 9731 (every k-th).

    Args:
        every: k, at least 2.
        window: window of the other layers in tokens; default the training length.
    """
    return _every(every, [get_scheme("nope"), get_scheme("logn", clip=False)], get_scheme("window", window=window))


def rnope_swa(every: int = 4, window: int = 4096) -> PerLayer:
    """Give layers windows with RoPE, and every k-th layer full attention without rotation (RNoPE-SWA; 2501.18795,
    section 4).

    Args:
        every: k, at least 2; 4 in the paper.
        window: window of the other layers in tokens; 4096 in the paper.
    """
    return _every(every, [get_scheme("nope")], get_scheme("window", window=window))


def full_layers(**fields: Any) -> PerLayer:
    """Apply YaRN to layers with full attention only; layers with a sliding window or without rotation stay unchanged.

    Args:
        **fields: fields of `yarn`, such as `factor` or `target`.
    """
    return PerLayer({"full_attention": get_scheme("yarn", **fields), REST: None})


def _every(every: int, full: list[Scheme], local: Scheme) -> PerLayer:
    if not isinstance(every, int) or isinstance(every, bool) or every < 2:
        raise InvalidField(f"every={every!r} is not allowed; every must be an integer of at least 2")
    return PerLayer({f"{every - 1}::{every}": full, REST: local})


FORMS.update(layers=PerLayer.read, hwfa=hwfa, rnope_swa=rnope_swa, yarn_full=full_layers)
