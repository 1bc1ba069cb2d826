"""The picture of a scheme: a position map, wavelengths, biases by distance, a scale, or else what was measured.

Each is an SVG whose words are text, 4.2 inches wide, so that it keeps its size in the column of a phone.
"""

from __future__ import annotations

import io
import math
from functools import cache
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.ticker import NullLocator
from scheme_measurements import losses  # type: ignore[import-not-found]

from rope_patch.errors import RopePatchError
from rope_patch.evaluation.charts import COLOURS, FAINT, INK, blank, tidy
from rope_patch.schemes import Checkpoint, Scheme, get_scheme, scheme_class
from rope_patch.schemes.target import takes_target
from rope_patch.typing import RotarySpec
from tools import position_matrices as matrices
from tools import scores_by_distance as scores

TRAINED, TARGET = 4096, 8 * 4096
"""L, and the length that schemes reach, in tokens."""

FIELDS = {
    "abf": {"base": 500_000.0},
    "giraffe_power": {"power": 2.0},
    "longrope": {"short_factor": [1.0] * 64, "long_factor": [8 ** (i / 63) for i in range(64)]},
}
"""Examples of what no length fills."""

_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "rope_patch", "font.family": "sans-serif", "font.size": 9.5}


@cache
def draw(name: str) -> tuple[str, str] | None:
    """What the picture shows, and the SVG; None if there is nothing to draw."""
    kind = scheme_class(name)
    for slot, picture in {
        "segments": _map,
        "frequencies": _wavelengths,
        "bias": _biases,
        "query_scale": _scale,
    }.items():
        if getattr(kind, slot) is not getattr(Scheme, slot) and (drawn := _tried(picture, name)):
            return drawn
    return _tried(_measured, name)


def _tried(picture: Any, name: str) -> tuple[str, str] | None:
    with mpl.rc_context(_STYLE):
        figure = blank(4.2, 2.7, layout="constrained")
        axes = figure.subplots()
        tidy(axes)
        if (shown := picture(axes, name)) is None:
            return None
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return shown, out.getvalue()


def _scheme(name: str, trained: int, target: int) -> Scheme | None:
    """The scheme as it reaches a length, if it can be made without a checkpoint's own numbers."""
    checkpoint = Checkpoint(trained, num_heads=8, max_length=target)
    try:
        given = {"target": target} if takes_target(scheme_class(name)) else {}
        return get_scheme(name, **given, **FIELDS.get(name, {})).reach(checkpoint).resolve(checkpoint)
    except RopePatchError:
        return None


def _map(axes: Any, name: str) -> str | None:
    trained, length = 64, 256
    if (scheme := _scheme(name, trained, length)) is None:
        return None
    m, n = torch.arange(length)[:, None], torch.arange(length)
    distances = matrices.rotated_distances(scheme, m, n).masked_fill(m < n, math.nan)
    colours = mpl.colormaps["YlGnBu"].with_extremes(over=COLOURS[1], bad="white")
    image = axes.imshow(distances.numpy(), cmap=colours, vmin=0, vmax=trained, interpolation="nearest")
    ticks = range(0, length, trained)
    names = ["0", *(f"{k}L" if k > 1 else "L" for k in range(1, 4))]
    axes.set(xlabel="key n", ylabel="query m")
    axes.set_xticks(ticks, names)
    axes.set_yticks(ticks, names)
    axes.grid(False)
    bar = axes.figure.colorbar(image, ax=axes, extend="max", label="distance seen")
    bar.set_ticks([0, trained], labels=["0", "L"])
    return f"Position map of {name}: the distance by which each query and key are rotated"


def _wavelengths(axes: Any, name: str) -> str | None:
    rotary, scheme = RotarySpec(128, 10000, TRAINED), _scheme(name, TRAINED, TARGET)
    if scheme is None or scheme.learned_frequencies or scheme.by_head:
        return None
    if scheme.refines:
        own = scores.frequencies_of(get_scheme("rope"), rotary)
        turned = scheme.refine(own, rotary).inv_freq.double().view(-1)
    else:
        turned = scores.frequencies_of(scheme, rotary, TARGET).inv_freq
    waves, rope = 2 * math.pi / turned, 2 * math.pi / scores.frequencies_of(get_scheme("rope"), rotary).inv_freq
    if not waves.isfinite().any() or (name != "rope" and torch.equal(waves, rope)):
        return None
    axes.plot(rope, color=FAINT, linewidth=1.5, linestyle="--", label="rope")
    if name != "rope":
        axes.plot(waves.where(waves.isfinite(), torch.nan), color=COLOURS[0], linewidth=2, label=name)
    axes.axhline(TRAINED, color=FAINT, linewidth=1, linestyle=":")
    axes.text(0, TRAINED, " L", va="bottom", color=FAINT)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="pair of dimensions i", ylabel="wavelength (tokens)")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.88))
    return f"Wavelengths of {name} and of RoPE, L = 4096, reaching 8L"


def _biases(axes: Any, name: str) -> str | None:
    kind = scheme_class(name)
    if kind.bias is Scheme.bias or (scheme := _scheme(name, 64, 256)) is None:
        return None
    found = matrices.bias_matrices(scheme, 8, 256)[:, -1].flip(-1)
    if not found.any():  # learned from zero
        return None
    for head, values in enumerate(found[::2]):
        axes.plot(values, color=COLOURS[head], linewidth=1.8, label=f"head {2 * head + 1}")
    axes.set(xlabel="distance m - n (tokens)", ylabel="bias (nats)")
    axes.legend(frameon=False, loc="lower left")
    return f"Biases of {name} by distance, for four of eight heads"


def _scale(axes: Any, name: str) -> str | None:
    scheme = _scheme(name, TRAINED, TARGET)
    if scheme is None or scheme_class(name).parameters is not Scheme.parameters or scheme.slots != {"query_scale"}:
        return None
    m = torch.arange(0, TARGET, 16)
    axes.plot(m / TRAINED, scheme.query_scale(m, 1, {}).view(-1), color=COLOURS[0], linewidth=2)
    axes.set(xlabel="position of the query (L)", ylabel="factor of the query")
    return f"What {name} multiplies queries by, L = 4096"


def _measured(axes: Any, name: str) -> str | None:
    found = losses("encodings/summary.json")
    lines = [line for line in found if name in {part.partition(":")[0] for part in line.split("+")}]
    if not lines:
        return None
    best = min(lines, key=lambda line: found[line][4].nll)
    drawn = {"rope": (FAINT, "--"), "window": (INK, "--"), best: (COLOURS[0], "-")}
    for line, (colour, dashes) in drawn.items():
        multiples, cells = list(found[line]), list(found[line].values())
        middle, spread = [cell.nll for cell in cells], [cell.spread or 0 for cell in cells]
        axes.plot(multiples, middle, color=colour, linestyle=dashes, linewidth=2, label=line.partition(":")[0])
        edges = (
            [a - b for a, b in zip(middle, spread, strict=True)],
            [a + b for a, b in zip(middle, spread, strict=True)],
        )
        axes.fill_between(multiples, *edges, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(multiples, [f"{k}L" for k in multiples])
    axes.set(xlabel="context length", ylabel="NLL, nats per byte")
    axes.legend(frameon=False, loc="upper left")
    return f"Loss of {name} against length after training from scratch, beside RoPE and the sliding window"
