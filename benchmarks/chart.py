"""Time and memory as pictures: the curve over lengths, and the ratios of the headline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from benchmarks.results import Point, ResultFile, Row
from rope_patch.evaluation import charts
from rope_patch.evaluation.scheme_specs import display_name

# Okabe and Ito's colours, which colour-blind readers can tell apart
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#1A1A1A", "marker": "o", "linestyle": (0, (5, 2))},
    {"color": "#0072B2", "marker": "s"},
    {"color": "#D55E00", "marker": "^"},
    {"color": "#009E73", "marker": "v"},
)
_INK, _FAINT = "#222222", "#777777"


def save(results: ResultFile, path: Path) -> Path:
    """Draw `figure(results)` into a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure(results).savefig(path, dpi=160)
    return path


def figure(results: ResultFile) -> Figure:
    """Two panels, both logarithmic in both directions: time, and memory beyond the inputs."""
    points = results.points
    drawn = charts.blank(11.0, 4.9)
    left, right = drawn.subplots(1, 2)
    drawn.subplots_adjust(left=0.075, right=0.985, top=0.82, bottom=0.12, wspace=0.24)
    _panel(left, points, "time of one call", lambda point: point.seconds, _seconds)
    _panel(right, points, "peak memory beyond the inputs", lambda point: point.memory, _bytes)
    machine = results.facts["machine"]
    drawn.text(0.075, 0.93, "One attention call over lengths", size=15, weight="bold", color=_INK)
    subtitle = f"{machine['gpu'] or machine['processor']}. Causal, forward; {_without_length(points)}."
    drawn.text(0.075, 0.875, subtitle, size=9.5, color=_FAINT)
    left.legend(frameon=False, fontsize=9, labelcolor=_INK)
    return drawn


def save_ratios(
    results: ResultFile, path: Path, groups: Mapping[str, Sequence[str]], name_of: Callable[[str], str]
) -> Path:
    """Draw the ratios of some rows, in groups, as bars from plain attention; a target that is missed is orange.

    Args:
        groups: the names of rows, by what they do.
        name_of: the word for a row.
    """
    rows = {row.name: row for row in results.rows}
    lines: list[tuple[str, Row | None]] = []
    for title, names in groups.items():
        lines += [(title, None), *((name_of(name), rows[name]) for name in names if name in rows)]
    drawn = charts.blank(6.4, 0.34 * len(lines) + 1.5, layout="constrained")
    axes = drawn.subplots()
    axes.axvline(1, color=_INK, linewidth=1)
    for place, (name, row) in enumerate(lines):
        if row is None:
            heading: dict[str, Any] = {"va": "center", "size": 11, "weight": "bold", "backgroundcolor": "white"}
            axes.text(0, place, name, transform=axes.get_yaxis_transform(), **heading)
        elif row.ratio is not None:
            colour = "#D55E00" if row.met is False else "#0072B2"
            axes.barh(place, row.ratio - 1, left=1, height=0.66, color=colour)
            beside: dict[str, Any] = {"ha": "left", "x": max(row.ratio, 1) + 0.006}
            axes.text(y=place, s=f"{row.ratio:.2f}", va="center", size=11, **beside)
            axes.text(-0.02, place, name, transform=axes.get_yaxis_transform(), va="center", ha="right", size=11)
    axes.set(ylim=(len(lines) - 0.4, -0.6), xlim=(0.7, 1.3), yticks=[])
    axes.tick_params(length=0, labelsize=11)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.set_xlabel("time over plain attention; orange: a target is missed", size=11)
    drawn.suptitle("What a scheme costs on a CPU", x=0.01, ha="left", size=15, weight="bold", color=_INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=160)
    return path


def save_losses(stages: Mapping[str, Any], trained: int, path: Path) -> Path:
    """Draw what `benchmarks.checkpoint` found at the longest length: the loss of the last tokens, and that of a passage
    that is repeated, under each scheme and after fine-tuning under it.

    Args:
        stages: the parts in the file of results, by name.
        trained: L in tokens.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for name, part in stages.items():
        (stage, _, scheme), result = name.partition("/"), part["result"]
        if stage == "far" and result:
            found[display_name(scheme)] = result
        if stage == "finetune" and result:
            found[display_name(scheme)] = result["before"]
            found[f"{display_name(scheme)}, fine-tuned"] = result["after"]
    first = next(iter(found.values()))
    after = {int(name.split()[-1]): name for name in first if name.startswith("last")}
    length, longest = max(after), after[max(after)]
    cut = {longest: first[after[trained]], "repeat": first["repeat, cut at L"]}
    note = f"Loss in nats, with standard errors over windows. L = {trained:,}; the checkpoint beyond L is off the scale"
    drawn, *panels = charts.sheet(f"A checkpoint at {length:,} tokens", note, 2.3, columns=2, sharey=True)
    for axes, (name, title) in zip(panels, {longest: "last tokens", "repeat": "repeated passage"}.items(), strict=True):
        end = 1.6 * cut[name][0]
        axes.set_xlim(0, end)
        bars = {"plain, truncated text": cut[name]} | {line: losses[name] for line, losses in found.items()}
        for line, (loss, error) in bars.items():
            fits, words = loss + error < end, {"va": "center", "size": charts.SIZE - 1}
            axes.barh(line, min(loss, end), xerr=error if fits else None, height=0.66, color="#0072B2", ecolor=_FAINT)
            words |= {"ha": "left", "color": _INK} if fits else {"ha": "right", "color": "white"}
            axes.text(loss + error + 0.02 * end if fits else 0.97 * end, line, f"{loss:.2f}", **words)
        axes.set_title(title, size=charts.SIZE, loc="left", color=_INK)
        axes.grid(visible=False, axis="y")
    panels[0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    return charts.write(drawn, path)


def _without_length(points: list[Point]) -> str:
    return points[0].shape.partition(", ")[2] if points else "nothing measured"


def _panel(
    chart: Any,
    points: list[Point],
    title: str,
    value: Callable[[Point], float],
    unit: Callable[[float, int], str],
) -> None:
    lines = dict.fromkeys(point.line for point in points)
    lengths = sorted({point.length for point in points})
    chart.set_xscale("log", base=2)
    chart.set_yscale("log")
    for style, line in zip(_STYLES, lines, strict=False):
        # a length at which memory did not rise has no place on a logarithmic axis
        shown = [(point.length, value(point)) for point in points if point.line == line and value(point) > 0]
        chart.plot(*zip(*shown, strict=True), label=line, linewidth=2, markersize=5, **style) if shown else None
    chart.xaxis.set_major_locator(FixedLocator(lengths))
    chart.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length / 1024:g}k"))
    chart.xaxis.set_minor_locator(NullLocator())
    chart.yaxis.set_major_locator(LogLocator(10))
    chart.yaxis.set_major_formatter(FuncFormatter(unit))
    chart.yaxis.set_minor_locator(NullLocator())
    chart.set_xlabel("length in tokens (1k = 1024)", size=9.5, color=_INK)
    chart.set_ylabel(title, size=9.5, color=_INK)
    chart.grid(color="#E6E6E6", linewidth=0.8)
    chart.set_axisbelow(True)
    chart.tick_params(length=0, labelsize=9, colors=_INK)
    for side, spine in chart.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#BBBBBB")


def _seconds(value: float, _: int) -> str:
    return _with_unit(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))


def _bytes(value: float, _: int) -> str:
    return _with_unit(value, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def _with_unit(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """In the largest unit of which there is at least one; ticks are powers of ten up to rounding."""
    size, unit = next((pair for pair in units if value >= 0.999 * pair[0]), units[-1])
    return f"{value / size:g} {unit}"
