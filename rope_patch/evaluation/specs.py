"""Schemes as a measurement names them: `plain`, and `auto` for the factor that each length needs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from rope_patch.errors import EvaluationError, did_you_mean
from rope_patch.schemes import Scheme, get_scheme

PLAIN = "plain"
"""The checkpoint as it is, unpatched."""

CUT = "window"
"""Attention cut at the training length."""

REFERENCES = (PLAIN, CUT)
"""What a scheme has to beat to earn its place; every table and chart has them."""

_AUTO = re.compile(r"(\w+)\s*=\s*auto\b")
_WINDOW = re.compile(r"\bwindow\s*=\s*(\d+)")
_ROUNDING: dict[str, Callable[[float], float]] = {
    "factor": float,
    "interpolation": float,
    "group_size": math.ceil,
}


def scheme_at(spec: str, length: int, training_length: int) -> Scheme | None:
    """The scheme that a line of the table stands for at one length.

    `factor=auto`, `interpolation=auto` and `group_size=auto` become the smallest value that keeps every distance
    within the training length: k = l / L, and k = (l - w) / (L - w) for a scheme that leaves the distances within a
    window w alone.

    Args:
        spec: `plain`, or what `get_scheme` reads, such as `yarn:factor=auto` or `rerope:window=128+logn`.
        length: l, the context length in tokens.
        training_length: L in tokens.

    Returns:
        the scheme; None for `plain`.

    Raises:
        UnknownScheme, InvalidField, SlotConflict: the spec does not name a scheme.
        EvaluationError: `auto` for another field, or beside a window that is not below L.

    Example:
        >>> str(scheme_at("pi:factor=auto", 1024, 256))
        'pi:factor=4.0'
        >>> scheme_at("self_extend:group_size=auto,window=128", 1024, 256).group_size
        7
    """
    if spec == PLAIN:
        return None
    return get_scheme("+".join(_fill_in(part, length, training_length) for part in spec.split("+")))


def _fill_in(part: str, length: int, training_length: int) -> str:
    def value(match: re.Match[str]) -> str:
        field = match[1]
        if field not in _ROUNDING:
            raise EvaluationError(
                f"{part}: {field}=auto: only some fields can be auto; {did_you_mean(field, _ROUNDING)}"
            )
        found = _WINDOW.search(part)
        window = int(found[1]) if found else 0
        if window >= training_length:
            raise EvaluationError(
                f"{part}: {field}=auto needs a window below the training length of {training_length}, not {window}"
            )
        needed = (length - window) / (training_length - window)
        return f"{field}={_ROUNDING[field](max(1.0, needed))}"

    return _AUTO.sub(value, part)
