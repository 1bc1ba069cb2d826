"""Vectors to which a reader of rotary positions can be held: `python -m tools.vectors` writes vectors/*.json.

A file has a config, and for a short and a long text what its positions are: `inv_freq`, the factor on cos and sin, and
both tables with that factor, `(positions, d/2)`, at positions 0, 1, L - 1, L and the last. All in float64 from the
formulas; `vectors/check_vectors.py` holds a reader to them. Sources: RoFormer 2104.09864; PI 2306.15595; dynamic NTK
and `proportional` as in Transformers; YaRN 2309.00071 with the ramp of its code; LongRoPE 2402.13753; Llama 3
2407.21783; mscale of DeepSeek-V2 2405.04434.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "vectors"
L, HEAD = 64, 32
SHORT, LONG = [1 + i / 16 for i in range(16)], [1 + i / 2 for i in range(16)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": L}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": L}
EQUAL = {"short_factor": LONG, "long_factor": LONG}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.5}

ENTRIES: dict[str, dict[str, Any]] = {
    "default": {},
    "theta_500000": {"rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear_integer_factor": {"rope_type": "linear", "factor": 4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic_factor_1": {"rope_type": "dynamic", "factor": 1.0},
    "yarn": YARN,
    "yarn_integer_factor": YARN | {"factor": 4},
    "yarn_attention_factor": YARN | {"attention_factor": 1.0},
    "yarn_attention_factor_above": YARN | {"attention_factor": 1.3},
    "yarn_mscale": YARN | MSCALES,
    "yarn_mscale_equal": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn_mscale_alone": YARN | {"mscale": 0.7},
    "yarn_truncate_false": YARN | {"truncate": False},
    "yarn_betas": YARN | {"beta_fast": 8.0, "beta_slow": 0.5},
    "yarn_original_missing": {"rope_type": "yarn", "factor": 4.0},
    "yarn_theta_500000": YARN | {"rope_theta": 5e5},
    "llama3": LLAMA3 | ORIGINAL,
    "llama3_original_missing": LLAMA3,
    "llama3_bounds": LLAMA3 | ORIGINAL | {"low_freq_factor": 0.5, "high_freq_factor": 2.0},
    "longrope": LISTS | ORIGINAL,
    "longrope_attention_factor": LISTS | ORIGINAL | {"attention_factor": 1.25},
    "longrope_factor_missing": {name: value for name, value in LISTS.items() if name != "factor"} | ORIGINAL,
    "longrope_equal_lists": LISTS | ORIGINAL | EQUAL,
    "longrope_equal_lists_temperature": LISTS
    | EQUAL
    | ORIGINAL
    | {"attention_factor": 1.1, "short_mscale": 1.1, "long_mscale": 1.1},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional_factor": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 4.0},
}
"""Entries of `rope_parameters` of a Llama, beside `rope_theta`, 10000 where it is not here."""


def positions_of(entry: dict[str, Any], length: int, longest: int) -> tuple[np.ndarray, float]:
    """Frequencies, `(d/2,)`, and the factor on cos and sin.

    Args:
        entry: of `rope_parameters`.
        length: of the text, in tokens.
        longest: `max_position_embeddings`.
    """
    kind, base, k = entry.get("rope_type", "default"), entry["rope_theta"], float(entry.get("factor") or 1)
    share = entry.get("partial_rotary_factor", 1.0)
    width = HEAD if kind == "proportional" else int(HEAD * share)
    index = np.arange(0, width, 2)
    theta = base ** (-index / width)
    trained = entry.get("original_max_position_embeddings", longest)
    if kind == "linear":
        return theta / k, 1.0
    if kind == "proportional":
        return np.where(index < int(width * share), theta, 0.0) / k, 1.0
    if kind == "dynamic":
        growth = k * max(length, longest) / longest - (k - 1)
        return (base * growth ** (width / (width - 2))) ** (-index / width), 1.0
    if kind == "llama3":
        low, high = entry["low_freq_factor"], entry["high_freq_factor"]
        keep = np.clip((trained * theta / (2 * math.pi) - low) / (high - low), 0, 1)
        return theta * (keep + (1 - keep) / k), 1.0
    if kind == "longrope":
        ratio = k if "factor" in entry else longest / trained
        follows = math.sqrt(1 + math.log(ratio) / math.log(trained)) if ratio > 1 else 1.0
        factors = entry["long_factor"] if length > trained else entry["short_factor"]
        return theta / np.array(factors), entry.get("attention_factor", follows)
    if kind == "yarn":
        return yarn(entry, theta, width, trained)
    return theta, 1.0


def yarn(entry: dict[str, Any], theta: np.ndarray, width: int, trained: int) -> tuple[np.ndarray, float]:
    """The same of YaRN."""
    k = float(entry["factor"])

    def dimension(rotations: float) -> float:
        return width * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(entry["rope_theta"]))

    low, high = dimension(entry.get("beta_fast", 32)), dimension(entry.get("beta_slow", 1))
    if entry.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / (high - low if high > low else 0.001), 0, 1)
    factor = entry.get("attention_factor")
    if factor is None:
        scales = [0.1 * entry.get(name, 0) * math.log(k) + 1 for name in ("mscale", "mscale_all_dim")]
        both = entry.get("mscale") and entry.get("mscale_all_dim")
        factor = scales[0] / scales[1] if both else 0.1 * math.log(k) + 1
    return theta / k * ramp + theta * (1 - ramp), factor


def rows_of(entry: dict[str, Any], longest: int) -> Iterator[dict[str, Any]]:
    """What a vector has of a short and of a long text."""
    for at in ((0, 1, L - 1), (0, 1, L - 1, L, 4 * L - 1)):
        inv_freq, factor = positions_of(entry, at[-1] + 1, longest)
        angles = np.outer(at, inv_freq)
        yield {
            "positions": at,
            "inv_freq": inv_freq.tolist(),
            "attention_factor": factor,
            "cos": (factor * np.cos(angles)).tolist(),
            "sin": (factor * np.sin(angles)).tolist(),
        }


def vectors() -> dict[str, dict[str, Any]]:
    """All vectors by the name of their file."""
    sizes: dict[str, Any] = {
        "hidden_size": 2 * HEAD,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
    }
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 8, "rms_norm_eps": 1e-6}
    made: dict[str, dict[str, Any]] = {}

    def add(name: str, entry: dict[str, Any], longest: int | None = None, layer_type: str = "", **config: Any) -> None:
        entry = {"rope_type": "default", "rope_theta": 10000.0, **entry}
        if longest is None:
            longest = L if entry["rope_type"] in ("default", "dynamic") else 4 * L
        fields = {"model_type": "llama", **sizes, "max_position_embeddings": longest, "rope_parameters": entry}
        made[name] = {"config": fields | config, "layer_type": layer_type, "rows": list(rows_of(entry, longest))}

    for name, entry in ENTRIES.items():
        add(name, entry)
    for name in ("default", "linear", "yarn", "llama3"):
        add(f"partial_{name}", ENTRIES[name] | {"partial_rotary_factor": 0.5}, model_type="phi")
    for name in ("linear", "yarn", "llama3", "longrope_equal_lists"):
        entry, sliding = {"rope_theta": 1e6, **ENTRIES[name]}, {"rope_type": "default", "rope_theta": 10000.0}
        nested = {"full_attention": {"rope_type": "default", **entry}, "sliding_attention": sliding}
        gemma: dict[str, Any] = {"model_type": "gemma3_text", "rope_parameters": nested, "sliding_window": 16}
        gemma["layer_types"] = ["sliding_attention", "full_attention"]
        add(f"nested_{name}_full", entry, layer_type="full_attention", **gemma)
        add(f"nested_{name}_sliding", sliding, 4 * L, layer_type="sliding_attention", **gemma)
    two = {"rope_theta": 5e5, "rope_type": "default"}
    add("theta_in_two_places", two, rope_theta=10000.0)
    for name in ("linear", "yarn", "llama3", "longrope"):  # as Transformers before 5 writes them
        old = {"type": ENTRIES[name]["rope_type"], **ENTRIES[name]}
        add(f"rope_scaling_{name}", ENTRIES[name] | {"rope_theta": 5e5}, rope_scaling=old, rope_theta=5e5)
        del made[f"rope_scaling_{name}"]["config"]["rope_parameters"]
    return made


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name, vector in vectors().items():
        (FOLDER / f"{name}.json").write_text(json.dumps(vector) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
