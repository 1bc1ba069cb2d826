"""Plot how position encodings behave.

    rope-patch plot wavelengths --scheme yarn:factor=8
    rope-patch plot position_maps --scheme rerope:window=16 --scheme self_extend:group_size=4,window=16
    python -m tools.pictures scores_by_distance --documents 2

The pictures: sinusoidal, inner_product, decay_bound, wavelengths, biases, position_maps and scores_by_distance. Each is
a function of tools/pictures.py that returns a figure of Matplotlib and takes some of the options. For the numbers
behind the last three: tools/position_matrices.py and tools/scores_by_distance.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.cli.options import (
    Amounts,
    Count,
    Name,
    Numbers,
    OptionalFile,
    OptionalFolder,
    Positional,
    Specs,
    print_json,
    run,
)
from rope_patch.errors import InvalidField, did_you_mean
from tools import position_matrices as matrices
from tools import scores_by_distance as scores

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from rope_patch.schemes import Scheme
    from rope_patch.typing import RotarySpec


@dataclasses.dataclass(kw_only=True)
class Options:
    picture: Positional[Name]  # name of the picture, such as wavelengths
    output: OptionalFile = None  # PNG to write (default: NAME.png)
    schemes: Specs = ()  # scheme to draw
    base: Amounts = ()  # base of the frequencies
    dim: Numbers = ()  # width of a head, even
    length: Count = None  # tokens of the text, or the longest distance
    training_length: Count = None  # training length L in tokens
    heads: Count = None  # number of attention heads
    # checkpoint to draw (default of scores_by_distance: the small checkpoint of the recipes)
    model: OptionalFolder = None
    layer: Count = None  # layer of the checkpoint, from 0
    text: OptionalFile = None  # text file or folder (default: Python's own source)
    documents: Count = None  # number of texts to read at most
    json: bool = False  # print what was drawn as one JSON document


def main(options: Options) -> None:
    """Draw it into a PNG: the same bytes whenever the picture is the same."""
    if options.picture not in PICTURES:
        raise InvalidField(f"there is no picture {options.picture!r}; {did_you_mean(options.picture, PICTURES)}")
    output = options.output or f"{options.picture}.png"
    if Path(output).suffix.lower() != ".png":
        raise InvalidField(f"output {output!r}: a picture is a PNG; write {Path(output).with_suffix('.png')}")
    own = ("picture", "output", "json")
    settings = {name: value for name, value in vars(options).items() if name not in own and value not in (None, ())}
    taken = inspect.signature(PICTURES[options.picture]).parameters
    for name in settings:
        if name not in taken:
            raise InvalidField(f"{options.picture} takes no option {name!r}; {did_you_mean(name, taken)}")
    from rope_patch.evaluation.charts import write

    figure = PICTURES[options.picture](**settings)
    write(figure, output)
    print_json({"picture": options.picture, "options": settings, "output": output}) if options.json else print(output)


# --- formulas --------------------------------------------------------------------------------------------------------


def sinusoidal(length: int = 128, dim: Sequence[int] = (128,), base: Sequence[float] = (10000,)) -> Figure:
    """PE(pos) of "Attention Is All You Need", one row per position: fast dimensions flicker, slow ones drift."""
    import torch

    from rope_patch.evaluation.charts import sheet
    from rope_patch.schemes.tools.sinusoids import sinusoidal_rows

    d, b = check("dim", only("dim", dim), 2, 2), check("base", only("base", base), step=0)
    rows = sinusoidal_rows(torch.arange(check("length", length)), d, b, "split")
    caption = f"d = {d}, base {number(b)}; all sines, then all cosines."
    figure, axes = sheet("Sinusoidal positions", caption, 3.4)
    axes.grid(False)
    image = axes.imshow(rows.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set(xlabel="dimension", ylabel="position (tokens)", xticks=range(0, d, max(1, d // 8)))
    colour_bar(figure, image, axes, label="value")
    return figure


def inner_product(
    dim: Sequence[int] = (32, 128, 512),
    length: int = 16384,
    base: Sequence[float] = (10000,),
    training_length: int | None = None,
) -> Figure:
    """How the similarity of two positions falls with their distance, and how few dimensions ripple around that."""
    b = only("base", base)
    caption = f"mean of cos(θᵢ (m - n)) over d/2 pairs of dimensions, base {number(b)}"
    lines = {f"d = {d}": partial(mean_inner_products, dim=d, base=b) for d in dim}
    return over_distance("Similarity of two positions", caption, "inner product", lines, length, training_length)


def mean_inner_products(distance: torch.Tensor, dim: int, base: float = 10000.0) -> torch.Tensor:
    """(2/d) sum_i cos(theta_i distance): the inner product of two sinusoidal vectors over that at distance 0.

    It is as well what rotation makes of the inner product of a vector of ones with itself.
    """
    return angles(distance, dim, base).cos().mean(dim=-1)


def decay_bound(
    base: Sequence[float] = (100, 10000, 500000, 10000000),
    length: int = 16384,
    dim: Sequence[int] = (128,),
    training_length: int | None = None,
) -> Figure:
    """The bound on a rotated inner product: a larger base keeps it up far away, and tells near from far less well."""
    d = only("dim", dim)
    caption = f"mean |Sᵢ| with Sᵢ the sum of the first i unit vectors at angles (m - n) θⱼ; d = {d}"
    lines = {f"base {number(b)}": partial(decay_bounds, dim=d, base=b) for b in base}
    title = "The decay bound of rotary positions"
    return over_distance(title, caption, "mean |Sᵢ|", lines, length, training_length, top=(d / 2 + 1) / 2)


def decay_bounds(distance: torch.Tensor, dim: int, base: float = 10000.0) -> torch.Tensor:
    """(2/d) sum_(i=1)^(d/2) |S_i| with S_i = sum_(j<i) exp(i distance theta_j) (RoFormer, section 3.4.3).

    Summation by parts bounds a rotated inner product by the sum of |S_i| times the largest difference between
    neighbouring pairs of dimensions. At distance 0 it is (d/2 + 1) / 2.
    """
    turned = angles(distance, dim, base)
    return turned.cos().cumsum(dim=-1).hypot(turned.sin().cumsum(dim=-1)).mean(dim=-1)


def angles(distance: torch.Tensor, dim: int, base: float) -> torch.Tensor:
    """theta_i distance, float64, `(*distance.shape, d/2)`."""
    from rope_patch.schemes.tools.rotary import inverse_frequencies

    theta = inverse_frequencies(check("dim", dim, 2, 2), check("base", base, step=0))
    return distance.double()[..., None] * theta.double()


def over_distance(
    title: str,
    caption: str,
    name: str,
    lines: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    length: int,
    training_length: int | None,
    top: float | None = None,
) -> Figure:
    """Values from distance 1 to `length`: means over a quarter of an octave, and a band for the ripples within it."""
    import torch

    from rope_patch.evaluation.charts import COLOURS, sheet

    few("lines", lines, len(COLOURS))
    distance = torch.arange(1, check("length", length, 2) + 1)
    _, sizes = (4 * distance.double().log2()).round().unique_consecutive(return_counts=True)
    figure, axes = sheet(title, f"{caption}. Bands: range over neighbouring distances.", 3.2)
    middles = [part.log2().mean().exp2() for part in distance.double().split(sizes.tolist())]
    for colour, (label, values_at) in zip(COLOURS, lines.items(), strict=False):
        parts = values_at(distance).split(sizes.tolist())
        axes.plot(middles, [part.mean() for part in parts], color=colour, label=label)
        ends = [part.min() for part in parts], [part.max() for part in parts]
        axes.fill_between(middles, *ends, color=colour, alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=4)
    axes.set(xlim=(1, length), xlabel="distance m - n (tokens)", ylabel=name, ylim=(0, top) if top else None)
    finish(axes, "x", training_length)
    return figure


def wavelengths(
    dim: Sequence[int] = (128,),
    base: Sequence[float] = (10000, 500000, 10000000),
    schemes: Sequence[str | Scheme] = (),
    length: int | None = None,
    training_length: int = 4096,
) -> Figure:
    """Tokens per full turn of each pair of dimensions, of RoPE with several bases and of schemes for the first base.

    Pairs above the line of the training length never made a full turn in training: beyond L they meet angles that they
    do not know. What a scheme that stretches a text does to the pairs below the line is what differs between schemes.
    """
    from rope_patch.evaluation.charts import COLOURS, SIZE, sheet
    from rope_patch.typing import RotarySpec

    d, trained = check("dim", only("dim", dim), 2, 2), check("training_length", training_length)
    rotary = [RotarySpec(d, check("base", b, step=0), trained) for b in few("base", base, len(COLOURS))]
    panels = {}
    if len(rotary) > 1 or not schemes:
        panels["RoPE with several bases"] = {f"base {number(r.base)}": wavelengths_of("rope", r) for r in rotary}
    if schemes:
        named = {name_of(scheme): wavelengths_of(scheme, rotary[0], length) for scheme in ("rope", *schemes)}
        panels[f"schemes, base {number(rotary[0].base)}"] = named
        few("schemes", named, len(COLOURS))
    caption = f"d = {d}, L = {trained:,} tokens. Pairs above the dotted line never made a full turn in training."
    figure, *axes = sheet("Wavelengths of rotary positions", caption, 2.9 * len(panels), rows=len(panels), sharex=True)
    for panel, (title, lines) in zip(axes, panels.items(), strict=True):
        for colour, (label, values) in zip(COLOURS, lines.items(), strict=False):
            panel.plot(values, color=colour, label=label)  # a pair that does not turn is left out
        panel.set_yscale("log")
        panel.set(ylabel="wavelength (tokens)")
        panel.set_title(title, size=SIZE, loc="left")
        finish(panel, "y", trained)
    panel.set_xlabel("pair of dimensions i")
    return figure


def wavelengths_of(scheme: str | Scheme, rotary: RotarySpec, length: int | None = None) -> torch.Tensor:
    """2 pi / theta_i in tokens, float64, `(d/2,)`; infinite where a pair does not turn."""
    return 2 * math.pi / scores.frequencies_of(as_scheme(scheme), rotary, length).inv_freq


def biases(
    schemes: Sequence[str | Scheme] = ("alibi", "sandwich"), heads: int = 4, length: int = 64, model: str | None = None
) -> Figure:
    """What is added to the score of query m and key n: a row per scheme, a column per head.

    With a checkpoint of T5's style, its own learned biases come last, those of its first heads.
    """
    from matplotlib import colormaps

    from rope_patch.evaluation.charts import SIZE, sheet

    own = None if model is None else biases_of_checkpoint(model)
    few("heads", range(heads), 8)
    chosen = {name_of(scheme): as_scheme(scheme) for scheme in few("schemes", schemes, 6)}
    drawn = {name: matrices.bias_matrices(each, heads, check("length", length)) for name, each in chosen.items()}
    if own:
        scheme, weights, own_heads, both = own
        drawn[f"{name_of(scheme).partition(',')[0]}, learned"] = matrices.bias_matrices(
            scheme, own_heads, length, weights, both
        )[:heads]
    caption = "Added to the score of query m and key n (nats). Rows of one colour scale; grey is not seen."
    figure, *axes = sheet("Biases by position", caption, (0.9 + 4 / heads) * len(drawn), len(drawn), heads)
    figure.get_layout_engine().set(hspace=0.18, rect=(0, 0, 1, 0.94))  # room for the names
    for row, (name, per_head) in enumerate(drawn.items()):
        panels = axes[row * heads : (row + 1) * heads]
        most = float(per_head.nan_to_num().abs().max()) or 1.0
        colours = colormaps["RdBu_r"].with_extremes(bad="#EDEDED")
        for head, (panel, matrix) in enumerate(zip(panels, per_head, strict=True)):
            image = panel.imshow(matrix.numpy(), cmap=colours, vmin=-most, vmax=most, interpolation="nearest")
            low, high = (f"{end + 0.0:.2g}" for end in matrix[~matrix.isnan()].aminmax())
            panel.set_title(f"head {head + 1}\n{low} to {high}", size=SIZE, loc="left")
            panel.grid(False)
            panel.set(xticks=[0, length - 1], yticks=[0, length - 1], xlabel="key n", ylabel="query m")
            panel.label_outer()
        panels[0].text(0, 1.5, name, transform=panels[0].transAxes, weight="bold", size=SIZE).set_in_layout(False)
        colour_bar(figure, image, panels, shrink=0.7, aspect=12)
    return figure


def biases_of_checkpoint(path: str) -> tuple[Scheme, dict[str, torch.Tensor], int, bool]:
    """Of a checkpoint of T5's style: its scheme, its table, its number of heads, and whether it sees both sides."""
    from rope_patch.models.find_stacks import read_stacks
    from rope_patch.saving.loading import load_model, quiet_transformers

    with quiet_transformers():
        stack = read_stacks(load_model(path, device="cpu"))[0]
    table = next((layer.bias_table for layer in stack.layers if layer.bias_table is not None), None)
    if table is None or stack.native is None:
        raise InvalidField(f"model={path!r} is not allowed; it must be a checkpoint with learned biases, of T5's style")
    native, weights = stack.native.resolve(stack.checkpoint), {"relative_attention_bias": table.weight}
    return native, weights, stack.checkpoint.num_heads, stack.checkpoint.bidirectional


def position_maps(schemes: Sequence[str | Scheme] = (), training_length: int = 64, length: int | None = None) -> Figure:
    """The distance by which each query and key are rotated: light to dark up to L, orange beyond, blank if hidden."""
    import torch
    from matplotlib import colormaps

    from rope_patch.evaluation.charts import COLOURS, SIZE, sheet
    from rope_patch.schemes.slots import Checkpoint

    trained = check("training_length", training_length, 2)
    length = check("length", 4 * trained if length is None else length)
    chosen = few("schemes", [as_scheme(scheme) for scheme in schemes] or mapping_schemes(trained, length), 12)
    columns = min(3, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    caption = f"The distance by which query m and key n are rotated; L = {trained:,}. Blank pairs are not attended."
    figure, *axes = sheet("Position maps", caption, 0.7 + (0.8 + 4 / columns) * rows, rows, columns)
    m, n = torch.arange(length)[:, None], torch.arange(length)
    colours = colormaps["YlGnBu"].with_extremes(over=COLOURS[1], bad="white")
    for panel, scheme in zip(axes, chosen, strict=False):
        resolved = scheme.resolve(Checkpoint(trained, num_heads=1, max_length=length))
        distances = matrices.rotated_distances(resolved, m, n).masked_fill(m < n, math.nan)
        image = panel.imshow(distances.numpy(), cmap=colours, vmin=0, vmax=trained, interpolation="nearest")
        panel.set_title(name_of(resolved).replace(" = ", "=").replace(", ", "\n"), size=SIZE, loc="left")
        panel.grid(False)
        ticks = range(0, length, trained * max(1, math.ceil(length / trained / 4)))
        panel.set(xticks=ticks, yticks=ticks, xlabel="key n", ylabel="query m")
        panel.spines[["top", "right"]].set_visible(False)
        panel.label_outer()
    for spare in axes[len(chosen) :]:
        spare.set_axis_off()
    bar = colour_bar(figure, image, axes, extend="max", shrink=0.6, location="bottom", aspect=30)
    bar.set_ticks([0, trained / 2, trained], labels=["0", f"{trained / 2:g}", f"L = {trained}"])
    return figure


def mapping_schemes(training_length: int, length: int) -> list[Scheme]:
    """RoPE and every registered scheme that fills `segments` to reach a length, as it reaches this one."""
    from rope_patch.schemes import Checkpoint, Scheme, get_scheme, list_schemes, scheme_class
    from rope_patch.schemes.target import takes_target

    kinds = [kind for kind in map(scheme_class, list_schemes()) if kind.segments is not Scheme.segments]
    reaching = [get_scheme(kind.name, target=length) for kind in kinds if takes_target(kind)]
    checkpoint = Checkpoint(training_length, num_heads=1, max_length=length)
    return [as_scheme("rope"), *(scheme.reach(checkpoint) for scheme in reaching)]


def scores_by_distance(
    model: str | None = None,
    text: str | None = None,
    schemes: Sequence[str | Scheme] = (),
    layer: int = 0,
    length: int | None = None,
    documents: int = 8,
    smooth: int = 9,
) -> Figure:
    """The mean score of a layer with its own frequencies and with those of a scheme; default NTK for the length.

    Pairs that turn fully within the training length know every angle; slower ones come past L to angles they were never
    trained on, and there the score of far keys may rise above that of near ones. Raising the base slows them down.
    """
    from rope_patch.evaluation.charts import COLOURS, SIZE, sheet

    states = scores.read_layer(model, text, layer, length, documents)
    trained, length = states.rotary.training_length, len(states.unrotated)
    after = as_scheme(only("schemes", schemes) if schemes else f"ntk:factor={max(1.0, length / trained)}")
    turning = int((states.own.inv_freq * trained >= 2 * math.pi).sum())
    caption = (
        f"Layer {layer}, {len(states.query)} texts of {length:,} tokens, before the softmax, mean of {smooth} "
        f"neighbouring distances. {turning} of {len(states.own.inv_freq)} pairs turn fully within the training length."
    )
    figure, *axes = sheet("Mean attention score by distance", caption, 5.4, rows=3, sharex=True)
    lines = {"the checkpoint": scores.mean_scores(states), name_of(after): scores.mean_scores(states, after)}
    stop = max(2, 7 * length // 8)  # the farthest distances are the mean of few pairs of tokens
    parts = {"fast": "fast half of the pairs", "slow": "slow half of the pairs", "all": "all of the score"}
    for panel, (part, title) in zip(axes, parts.items(), strict=True):
        for colour, (label, values) in zip(COLOURS, lines.items(), strict=False):
            means = values[part].unfold(0, smooth, 1).mean(dim=-1)[: stop - smooth // 2]
            panel.plot(range(smooth // 2, smooth // 2 + len(means)), means, color=colour, linewidth=1.3, label=label)
        panel.set(xlim=(0, stop), ylabel="score (nats)", xticks=range(0, stop, trained))
        panel.set_title(title, size=SIZE, loc="left")
        finish(panel, "x", trained, marked=part == "fast")
    panel.set_xlabel("distance m - n (tokens)")
    return figure


# --- what all pictures share -----------------------------------------------------------------------------------------


def colour_bar(figure: Figure, image: Any, axes: Any, **settings: Any) -> Any:
    """The scale of an image, its words as large as all others."""
    from rope_patch.evaluation.charts import SIZE

    bar = figure.colorbar(image, ax=axes, **settings)
    bar.ax.tick_params(labelsize=SIZE)
    bar.ax.yaxis.label.set_fontsize(SIZE)
    return bar


def finish(axes: Any, tokens: str, training_length: int | None, marked: bool = True) -> None:
    """Of the axis that counts tokens numbers to read and L, and the names of the lines at their ends."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    from rope_patch.evaluation.charts import FAINT, SIZE, name_lines

    upright = tokens == "x"
    axis = axes.xaxis if upright else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_locator(NullLocator())
    low, high = axis.get_view_interval()
    if training_length is not None and low <= check("training_length", training_length) <= high:
        (axes.axvline if upright else axes.axhline)(training_length, color=FAINT, linewidth=1, linestyle=":")
        x, y, edge = (training_length, 0.98, "top") if upright else (0, training_length, "bottom")
        frame = axes.get_xaxis_transform() if upright else axes.get_yaxis_transform()
        axes.text(x, y, " training length" * marked, transform=frame, va=edge, size=SIZE, color=FAINT)
    name_lines(axes, {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")})


def number(value: float) -> str:
    """A number to read: 10,000 and not 1e+04, 1M and not 1,000,000."""
    if value >= 10**6 and value % 10**5 == 0:
        return f"{value / 10**6:g}M"
    return f"{value:,.0f}" if value >= 10**4 or value == round(value) else f"{value:.4g}"


def name_of(scheme: str | Scheme) -> str:
    """The name of a scheme as tables write it, cut where it is long."""
    from rope_patch.evaluation.scheme_specs import display_name

    name = display_name(as_scheme(scheme))
    return name if len(name) < 60 else f"{name[:57]}..."


def as_scheme(scheme: str | Scheme) -> Any:
    from rope_patch.schemes import get_scheme

    return get_scheme(scheme) if isinstance(scheme, str) else scheme


def check(name: str, value: Any, least: float = 1, step: int = 1) -> Any:
    """A number of at least `least`, and a multiple of `step` unless that is 0."""
    if not (math.isfinite(value) and value >= least) or (step and value % step):
        kind = {0: "a number", 1: "a whole number"}.get(step, f"a multiple of {step}")
        raise InvalidField(f"{name}={value!r} is not allowed; it must be {kind} of at least {least}")
    return value


def few(name: str, values: Any, most: int) -> Any:
    """Something to draw, and no more than a reader can tell apart."""
    if not 1 <= len(values) <= most:
        raise InvalidField(f"{name}: {len(values)} were given; one to {most} can be told apart in a picture")
    return values


def only(name: str, values: Sequence[Any]) -> Any:
    if len(values) != 1:
        raise InvalidField(f"{name}: {len(values)} were given; this picture takes one")
    return values[0]


ALL = (sinusoidal, inner_product, decay_bound, wavelengths, biases, position_maps, scores_by_distance)
PICTURES: dict[str, Callable[..., Any]] = {picture.__name__: picture for picture in ALL}

if __name__ == "__main__":
    run(Options, main)
