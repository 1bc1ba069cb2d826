"""What the positions of the vectors are, in 40 digits, from the papers; no code of `rope_patch.doctor` is used.

RoFormer 2104.09864, section 3.2.2; PI 2306.15595, equation 4; YaRN 2309.00071, section 3.2, with the ramp over
dimensions and the rounding of its authors' code; LongRoPE 2402.13753, with Phi-3's factor on cos and sin; Llama 3
2407.21783, with the ramp of Meta's `apply_scaling`; DeepSeek-V2 2405.04434 for the mscales; Qwen2-VL 2409.12191 for
three axes one after another; axes that alternate, `dynamic`, `proportional`, and what a config may leave out, as
Transformers documents them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpmath import ceil, cos, floor, log, mp, mpf, pi, sin, sqrt

mp.dps = 40

DEFAULT_THETA = {"qwen2_vl_text": 1_000_000}
"""Where nothing names theta; 10000 for all others."""

TOP = {
    "": ("rope_theta", "rotary_emb_base"),
    "full_attention": ("global_rope_theta", "rope_theta"),
    "sliding_attention": ("local_rope_theta", "rope_local_base_freq"),
}


@dataclass(frozen=True)
class Defined:
    """Frequencies of each pair, the factor on cos and sin, and the axis of each pair."""

    inv_freq: list[mpf]
    factor: mpf
    axes: list[int]

    def tables(self, positions: list[Any]) -> tuple[list[list[mpf]], list[list[mpf]]]:
        """cos and sin with the factor, `(tokens, pairs)`, of positions `(tokens,)` or `(3, tokens)`."""
        by_axis = positions if isinstance(positions[0], list) else [positions]
        tokens = range(len(by_axis[0]))
        angles = [[by_axis[self.axes[i]][m] * theta for i, theta in enumerate(self.inv_freq)] for m in tokens]
        return tuple([[self.factor * turn(each) for each in token] for token in angles] for turn in (cos, sin))


def defined(config: dict[str, Any], layer_type: str, length: int) -> Defined:
    """What a config says about the layers of one type, for a text of `length` tokens."""
    fields = config.get("text_config", config)
    entry = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if layer_type in entry:
        entry = entry[layer_type]
    elif layer_type == "sliding_attention":
        entry = {}  # a scaling without a layer type is for full attention
    theta = entry.get("rope_theta") or next((fields[name] for name in TOP[layer_type] if name in fields), None)
    theta = mpf(theta or DEFAULT_THETA.get(config["model_type"], 10000))
    head = fields.get("qk_rope_head_dim") or fields["head_dim"]
    if layer_type == "full_attention":
        head = fields.get("global_head_dim", head)
    share = mpf(entry.get("partial_rotary_factor", fields.get("partial_rotary_factor", fields.get("rotary_pct", 1))))
    longest = mpf(fields["max_position_embeddings"])
    trained = mpf(
        fields.get("original_max_position_embeddings", entry.get("original_max_position_embeddings", longest))
    )
    k = mpf(entry["factor"]) if entry.get("factor") is not None else longest / trained
    kind = entry.get("rope_type", entry.get("type", "default"))
    d = int(share * head)
    factor = mpf(1)
    if kind in ("default", "mrope"):
        inv_freq = plain(theta, d)
    elif kind == "linear":
        inv_freq = [each / k for each in plain(theta, d)]
    elif kind == "proportional":
        k = mpf(entry.get("factor", 1))
        inv_freq = [each / k if 2 * i < d else mpf(0) for i, each in enumerate(plain(theta, head))]
    elif kind == "dynamic":
        stretched = k * max(length, longest) / longest - (k - 1)
        inv_freq = plain(theta * stretched ** (mpf(d) / (d - 2)), d)
    elif kind == "llama3":
        inv_freq = [llama3(each, entry, trained, k) for each in plain(theta, d)]
    elif kind in ("longrope", "su"):
        lists = entry["long_factor"] if length > trained else entry["short_factor"]
        inv_freq = [each / mpf(scale) for each, scale in zip(plain(theta, d), lists, strict=True)]
        follows = sqrt(1 + log(k) / log(trained)) if k > 1 else mpf(1)
        factor = mpf(entry.get("attention_factor", follows))
    else:
        assert kind == "yarn"
        inv_freq, factor = yarn(entry, theta, d, trained, k), temperature(entry, k)
    return Defined(inv_freq, factor, axes(entry, len(inv_freq)))


def plain(theta: mpf, d: int) -> list[mpf]:
    """b^(-2i/d)."""
    return [theta ** (-mpf(2 * i) / d) for i in range(d // 2)]


def llama3(each: mpf, entry: dict[str, Any], trained: mpf, k: mpf) -> mpf:
    """A wave shorter than L/high stays, one longer than L/low is divided by k, between them it is mixed."""
    low, high = mpf(entry["low_freq_factor"]), mpf(entry["high_freq_factor"])
    wave = 2 * pi / each
    if wave < trained / high:
        return each
    if wave > trained / low:
        return each / k
    smooth = (trained / wave - low) / (high - low)
    return (1 - smooth) * each / k + smooth * each


def yarn(entry: dict[str, Any], theta: mpf, d: int, trained: mpf, k: mpf) -> list[mpf]:
    """(1 - g) theta_i / k + g theta_i: g is 1 where a pair turns beta_fast times within L, 0 where beta_slow times."""
    ends = [entry.get("beta_fast", 32), entry.get("beta_slow", 1)]
    start, stop = (d * log(trained / (2 * pi * turns)) / (2 * log(theta)) for turns in ends)
    if entry.get("truncate", True):
        start, stop = floor(start), ceil(stop)
    start, stop = max(start, mpf(0)), min(stop, mpf(d - 1))
    found = []
    for i, each in enumerate(plain(theta, d)):
        g = 1 - min(max((i - start) / (stop - start), mpf(0)), mpf(1))
        found.append((1 - g) * each / k + g * each)
    return found


def temperature(entry: dict[str, Any], k: mpf) -> mpf:
    """What the entry says, else the quotient of both mscales, else 0.1 ln k + 1."""
    if "attention_factor" in entry:
        return mpf(entry["attention_factor"])
    if k <= 1:
        return mpf(1)
    above, below = entry.get("mscale"), entry.get("mscale_all_dim")
    if above and below:
        return (mpf(above) * log(k) / 10 + 1) / (mpf(below) * log(k) / 10 + 1)
    return log(k) / 10 + 1


def axes(entry: dict[str, Any], pairs: int) -> list[int]:
    """One after another, or height and width take every third pair, and time the rest."""
    if "mrope_section" not in entry:
        return [0] * pairs
    time, height, width = entry["mrope_section"]
    if not entry.get("mrope_interleaved"):
        return [0] * time + [1] * height + [2] * width
    found = [0] * pairs
    for axis, size in ((1, height), (2, width)):
        for i in range(size):
            found[axis + 3 * i] = axis
    return found
