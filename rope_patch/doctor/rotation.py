"""The rotation of a layer as numbers: frequencies, the factor on cos and sin, and the axis of each pair, in float64.

Sources: RoPE 2104.09864; PI 2306.15595; YaRN 2309.00071 with the ramp of its code; LongRoPE 2402.13753; Llama 3
2407.21783; `mscale` of DeepSeek-V2 2405.04434; multimodal sections of Qwen2-VL 2409.12191; `dynamic` and
`proportional` as Transformers 5.23 computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NEED_L = ("yarn", "llama3", "longrope")
"""Types whose formula contains L, `original_max_position_embeddings`."""

TYPES = ("default", "linear", "dynamic", *NEED_L, "proportional")
"""The rope types whose formulas are implemented here."""


@dataclass(frozen=True)
class Rotation:
    """The rotation that one reader computes for the layers of one type.

    Attributes:
        rope_type: one of `TYPES`.
        theta: the base b of the frequencies.
        head_dim: dimensions of a head.
        partial: the share of these dimensions that is rotated, `partial_rotary_factor`.
        longest: `max_position_embeddings`, in tokens.
        original: L in tokens, for the types in `NEED_L`.
        factor: k.
        attention_factor: the factor on cos and sin if the config states it; None if it follows from k.
        mscale, mscale_all_dim: DeepSeek's form of YaRN's temperature, if both are set.
        beta_fast, beta_slow: rotations within L at the two ends of YaRN's ramp.
        truncate: whether the ends of the ramp are rounded outwards to whole dimensions.
        low_freq_factor, high_freq_factor: the ends of the ramp of `llama3`, in turns within L.
        short_factor, long_factor: the lists of `longrope`, one number for each pair, for texts up to L and for longer
            texts.
        sections: pairs that turn with time, height and width in a multimodal model; empty for one axis.
        interleaved: whether the axes alternate from pair to pair instead of coming one after another.
    """

    rope_type: str
    theta: float
    head_dim: int
    partial: float = 1.0
    longest: int = 0
    original: int | None = None
    factor: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    @property
    def width(self) -> int:
        """The number of dimensions over which the frequencies are spread: all of the head under `proportional`."""
        return self.head_dim if self.rope_type == "proportional" else int(self.head_dim * self.partial)

    @property
    def trained(self) -> int:
        """The original length L in tokens; `max_position_embeddings` if the config names no L."""
        return self.original or self.longest

    def plain(self, theta: float | None = None) -> list[float]:
        """The frequencies theta_i = b^(-2i/d) of each pair (RoFormer, section 3.2.2), under another base if it is
        given.
        """
        base = self.theta if theta is None else theta
        return [base ** (-index / self.width) for index in range(0, self.width, 2)]

    def frequencies(self, length: int = 0) -> list[float]:
        """The angle in radians that each pair turns from one position to the next.

        Args:
            length: length of the text in tokens; `dynamic` and `longrope` depend on it.
        """
        return _FREQUENCIES[self.rope_type](self, length)

    def temperature(self) -> float:
        """The factor on cos and sin; every score is multiplied by its square."""
        if self.rope_type == "yarn":
            return self._of_yarn()
        if self.rope_type == "longrope":
            return self._of_longrope()
        return 1.0

    def axes(self) -> list[int]:
        """The axis of each pair: 0 for time, 1 for height, 2 for width; all 0 without sections."""
        pairs = self.width // 2
        if not self.sections:
            return [0] * pairs
        if self.interleaved:  # Qwen3-VL: height at 1, 4, 7 ..., width at 2, 5, 8 ..., time wherever they have ended
            taken = [index % 3 for index in range(pairs)]
            return [axis if axis and index < 3 * self.sections[axis] else 0 for index, axis in enumerate(taken)]
        in_turn = [axis % 3 for axis, size in enumerate(self.sections) for _ in range(size)]
        return (in_turn + [0] * pairs)[:pairs]

    def _of_yarn(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return _scale(self.factor, self.mscale) / _scale(self.factor, self.mscale_all_dim)
        return _scale(self.factor)

    def _of_longrope(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.trained))


def _scale(factor: float, mscale: float = 1.0) -> float:
    """The temperature 0.1 m ln k + 1 (YaRN, equation 22, with DeepSeek's m)."""
    return 0.1 * mscale * math.log(factor) + 1.0


def _default(rotation: Rotation, length: int) -> list[float]:
    return rotation.plain()


def _linear(rotation: Rotation, length: int) -> list[float]:
    """Frequencies theta_i / k (PI, equation 4)."""
    return [each / rotation.factor for each in rotation.plain()]


def _proportional(rotation: Rotation, length: int) -> list[float]:
    """Frequencies of which only the first pairs of the whole head turn; the others are 0."""
    turning = int(rotation.partial * rotation.head_dim // 2)
    pairs = rotation.plain()[: rotation.head_dim // 2]
    return [each / rotation.factor if index < turning else 0.0 for index, each in enumerate(pairs)]


def _dynamic(rotation: Rotation, length: int) -> list[float]:
    """Frequencies of NTK with a base that grows with the text, from `max_position_embeddings` on."""
    longest, k, width = rotation.longest, rotation.factor, rotation.width
    growth = k * max(length, longest) / longest - (k - 1)
    return rotation.plain(rotation.theta * growth ** (width / (width - 2)))


def _yarn(rotation: Rotation, length: int) -> list[float]:
    """Frequencies theta_i / k r_i + theta_i (1 - r_i), with a ramp r over the dimensions (YaRN, section 3.2)."""
    width, pairs = rotation.width, rotation.plain()

    def dimension(rotations: float) -> float:
        return width * math.log(rotation.trained / (rotations * 2 * math.pi)) / (2 * math.log(rotation.theta))

    low, high = dimension(rotation.beta_fast), dimension(rotation.beta_slow)
    if rotation.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = [min(max((index - low) / (high - low), 0.0), 1.0) for index in range(len(pairs))]
    return [each / rotation.factor * r + each * (1 - r) for each, r in zip(pairs, ramp)]  # noqa: B905


def _llama3(rotation: Rotation, length: int) -> list[float]:
    """Frequencies theta_i (s + (1 - s)/k), where s grows with the turns within L, between the two factors; s is a step
    if they are equal (Llama 4).
    """
    low, high, k = rotation.low_freq_factor, rotation.high_freq_factor, rotation.factor

    def scaled(theta: float) -> float:
        turns = rotation.trained * theta / (2 * math.pi)
        kept = float(turns >= low) if high == low else min(max((turns - low) / (high - low), 0.0), 1.0)
        return theta * (kept + (1 - kept) / k)

    return [scaled(theta) for theta in rotation.plain()]


def _longrope(rotation: Rotation, length: int) -> list[float]:
    """Frequencies theta_i / lambda_i, with the long list for texts beyond L."""
    factors = rotation.long_factor if length > rotation.trained else rotation.short_factor
    return [theta / factor for theta, factor in zip(rotation.plain(), factors)]  # noqa: B905


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}
