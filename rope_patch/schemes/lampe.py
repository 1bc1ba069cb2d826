"""LaMPE: Self-Extend whose number of far positions depends on the length of the text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rope_patch.errors import InvalidField
from rope_patch.schemes.base import Scheme, Source, Sweep
from rope_patch.schemes.rules import Above, AtLeast, AtMost
from rope_patch.schemes.slots import ALL_PAIRS, Checkpoint, Region, nothing_for
from rope_patch.schemes.tools.positions import Grouped, Identity, Interpolated


@dataclass(frozen=True)
class LaMPE(Scheme):
    """Keep true positions within the window and, once more, between the first and the last tokens of a text; in
    between, map a text of l tokens to M(l) positions.

    phi(n) = floor(M n / (l - 1)) counts the middle, and the query is shifted so that the count continues where the
    window ends. From l - e tokens on, distances grow by one again: the last e tokens see the first e at true
    resolution, where e is the last token that shares its position with token `head_keys`. M grows with the text,
    because a model needs few positions for a short text and knows them best: M(l) = floor(c / (1 + exp(-(a l + b)))).
    The curve is fitted for each model: `rope-patch sweep --schemes lampe` fits it on your text. Below two windows
    nothing changes.

    l is the number of tokens of each row read so far. The cache keeps unrotated keys, and every new token rotates all
    of them. In a deep model decoding differs from recomputation, because earlier hidden states were computed for a
    shorter text. The released code keeps the prompt's l while it decodes: `length=` does the same, for a whole request.
    Its prefill counts the two distances at which parts meet twice, W and l - e, and its decoded queries all stay at the
    prompt's last position of the middle, for at most W tokens; this function is the same at every step.

    Args:
        mapping_length: M in positions, at least 1, for every text, or for texts below `curve_from` tokens; default
            without a curve 3/8 of L (docs/sweep.md).
        a: growth of M per token, above 0. Llama-3-8B (L = 8,192): a = 1.0493e-4, b = -2.4666, c = 6204.41 from 8,192
            tokens on, and 1,536 positions below.
        b: offset of the curve, from -100 to 100: M is half of c at -b/a tokens.
        c: upper limit of M in positions, above 0.
        curve_from: the shortest text in tokens that uses the curve, if `mapping_length` is given as well.
        window: W in tokens, at least 1; default L/4, but at most the authors' 512.
        head_keys: tokens at the start that are seen at true resolution, up to the next change of phi; at most W.
            Default 25/64 of W, which is the authors' 200.
        length: a fixed l in tokens, at least 2, for a whole request; default: the length of each text.
    """

    name = "lampe"
    summary = "keeps the window and the first tokens, and squeezes the middle by the length"
    title = "LaMPE"
    equation = "distance = m - n if m - n < W else phi(m) - phi(n) + b1 if m - n < l - e else m - n - b2"
    source = Source(
        "LaMPE: Length-aware Multi-grained Positional Encoding for Adaptive Long-context Scaling Without Training",
        2026,
        "https://arxiv.org/abs/2508.02308",
        "https://github.com/scar-on/LaMPE",
    )
    absolute = True
    causal_only = True
    sweep = (
        Sweep("mapping_length", "L", (3 / 8, 1 / 4, 1 / 2, 5 / 8), window=1 / 2),
        Sweep("mapping_length", "L", (3 / 8, 1 / 4, 1 / 2, 5 / 8), window=1 / 4),
    )

    mapping_length: Annotated[int, AtLeast(1)] | None = None
    a: Annotated[float, Above(0)] | None = None
    b: Annotated[float, AtLeast(-100), AtMost(100)] | None = None
    c: Annotated[float, Above(0)] | None = None
    curve_from: Annotated[int, AtLeast(1)] | None = None
    window: Annotated[int, AtLeast(1)] | None = None
    head_keys: Annotated[int, AtLeast(0), AtMost("window")] | None = None
    length: Annotated[int, AtLeast(2)] | None = None

    fields_for = nothing_for

    def __post_init__(self) -> None:
        super().__post_init__()
        curve = {name: getattr(self, name) for name in ("a", "b", "c")}
        missing = [name for name, value in curve.items() if value is None]
        if 0 < len(missing) < len(curve):
            raise InvalidField(f"lampe: the curve needs a, b and c; {' and '.join(missing)} missing")
        if (self.curve_from is not None) != (self.mapping_length is not None and not missing):
            raise InvalidField(
                f"lampe: curve_from={self.curve_from} must be given exactly where mapping_length (below it) and a, b, "
                "c (from it on) are given too"
            )

    @property
    def length_dependent(self) -> bool:  # type: ignore[override]
        return self.length is None

    @property
    def regions_by_length(self) -> bool:  # type: ignore[override]
        return self.length is None

    @property
    def breaks_graph(self) -> bool:  # type: ignore[override]
        return self.length is None

    def at_length(self, length: int) -> Scheme:
        return self if self.length is not None else dataclasses.replace(self, length=max(2, length))

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        trained = checkpoint.training_length
        window = self.window or max(1, min(512, trained // 4))
        head_keys = 25 * window // 64 if self.head_keys is None else self.head_keys
        is_open = self.mapping_length is None and self.a is None
        mapping_length = max(1, 3 * trained // 8) if is_open else self.mapping_length
        return dataclasses.replace(self, window=window, head_keys=head_keys, mapping_length=mapping_length)

    @classmethod
    def fit(cls, best: Mapping[int, float]) -> dict[str, Any]:
        """Fit a, b and c of the curve by least squares to the best M at each length. It takes at least three lengths,
        and an M that grows. The grid of a and b is made finer around its best point; c follows from them.
        """
        points = sorted(best.items())
        if len(points) < 3:
            return {}
        first, span = points[0][0], points[-1][0] - points[0][0]
        growth, start, width = 0.0, 0.0, 6.0  # ln of a over the lengths, and a l + b at the first
        for _ in range(30):
            grid = [width * step / 5 for step in range(-5, 6)]
            _, growth, start = min(
                (
                    _squares(points, math.exp(growth + x) / span, start + y - math.exp(growth + x) / span * first)[0],
                    growth + x,
                    start + y,
                )
                for x in grid
                for y in grid
                if abs(growth + x) <= 6 >= abs(start + y)
            )
            width *= 0.7
        a = math.exp(growth) / span
        b = start - a * first
        c = _squares(points, a, b)[1]
        return {"a": float(f"{a:.5g}"), "b": float(f"{b:.5g}"), "c": float(f"{c:.6g}")} if growth > -2 else {}

    def positions_of(self, length: int) -> int:
        """The number M of positions for the middle of a text of `length` tokens."""
        if self.a is None or self.b is None or self.c is None or length < (self.curve_from or 0):
            if self.mapping_length is None:
                raise ValueError("lampe: call resolve() first to fill in the mapping length")
            return self.mapping_length
        half = (self.a * length + self.b) / 2
        return max(1, int(self.c * (1 + math.tanh(half)) / 2))  # 1 / (1 + exp(-2 half)), which cannot overflow

    def segments(self) -> tuple[Region, ...]:
        if self.window is None or self.head_keys is None:
            raise ValueError("lampe: call resolve() first to fill in the window")
        if self.length is None:
            raise ValueError("lampe: call at_length() first, because its regions follow the length of the text")
        l, w = self.length, self.window  # noqa: E741
        if l < 2 * w:
            return (ALL_PAIRS,)
        positions, steps = self.positions_of(l), l - 1

        def phi(n: int) -> int:
            return n * positions // steps

        e = min(-(-(phi(self.head_keys) + 1) * steps // positions) - 1, l - w)
        back = w - 1 - phi(w)
        behind = (steps - e) - phi(steps - e) - back
        middle = Region(Grouped(steps, back, positions), Grouped(steps, 0, positions), start=w, stop=l - e)
        return (
            Region(Identity(), Identity(), start=1 - w, stop=w),
            *((middle,) if middle.start < middle.stop else ()),
            Region(Interpolated(1, shift=-behind), Identity(), start=l - e),
        )


def _squares(points: Sequence[tuple[int, float]], a: float, b: float) -> tuple[float, float]:
    """The least sum of squares by which a curve with this a and b misses M at the given lengths, and the c of that
    curve.
    """
    shares = [(1 + math.tanh((a * length + b) / 2)) / 2 for length, _ in points]
    c = sum(share * m for share, (_, m) in zip(shares, points, strict=True)) / sum(share**2 for share in shares)
    return sum((c * share - m) ** 2 for share, (_, m) in zip(shares, points, strict=True)), c
