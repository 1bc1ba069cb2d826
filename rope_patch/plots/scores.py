"""Attention scores by distance: what the fast and the slow pairs of dimensions of a real checkpoint add to them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import nn

from rope_patch.errors import InvalidField, UnsupportedModel
from rope_patch.evaluation.chart import COLOURS, INK, tidy
from rope_patch.models.probe import probing as attention_replaced
from rope_patch.models.reading import read_stack
from rope_patch.plots.checks import require_count
from rope_patch.plots.frequencies import frequencies_of
from rope_patch.plots.style import (
    LINE,
    mark_training_length,
    name_axes,
    panel,
    sheet,
    short_name,
    tokens_axis,
)
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.tools.rotary import RotaryLayout
from rope_patch.typing import Frequencies, RotarySpec


@dataclass(frozen=True, eq=False)
class LayerStates:
    """Queries and keys of one attention layer before their rotation, and what the model does with them.

    Attributes:
        query, key: `(batch, heads, length, head_dim)`, keys repeated where heads share them.
        layout: which dimensions turn together.
        rotary: d, b and L of the layer.
        own: the frequencies by which the layer rotates.
        scaling: what products of queries and keys are multiplied by.
        name: of the layer.
    """

    query: torch.Tensor
    key: torch.Tensor
    layout: RotaryLayout
    rotary: RotarySpec
    own: Frequencies
    scaling: float
    name: str

    @property
    def length(self) -> int:
        """Of the texts in tokens."""
        return self.query.shape[2]

    @cached_property
    def turned(self) -> torch.Tensor:
        """Mean over all m - n = distance of q_m conj(k_n), each pair of dimensions read as a complex number.

        A rotation multiplies it by exp(i theta distance), and its real part is what the pair adds to the mean score:
        exactly so, because the mean is taken at each distance apart. Complex128, `(length, d/2)`.
        """
        first, second = list(self.layout.first), list(self.layout.second)
        query, key = self.query.double(), self.key.double()
        pairs = (torch.complex(states[..., first], states[..., second]) for states in (query, key))
        return self.scaling * _mean_by_distance(*pairs)

    @cached_property
    def unturned(self) -> torch.Tensor:
        """The mean score by distance from dimensions that do not rotate: float64, `(length,)`."""
        rotated = {*self.layout.first, *self.layout.second}
        others = [i for i in range(self.query.shape[-1]) if i not in rotated]
        if not others:
            return torch.zeros(self.length, dtype=torch.float64)
        query, key = self.query.double()[..., others], self.key.double()[..., others]
        return self.scaling * _mean_by_distance(query, key).real.sum(dim=-1)


@dataclass(frozen=True, eq=False)
class MeanScores:
    """Mean attention scores before the softmax, by distance: float64, `(length,)` each, from distance 0.

    Attributes:
        high: from the half of the pairs that turn fastest.
        low: from the other half.
        rest: from dimensions that do not rotate.
    """

    high: torch.Tensor
    low: torch.Tensor
    rest: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """The mean score itself."""
        return self.high + self.low + self.rest


def layer_states(model: nn.Module, input_ids: torch.Tensor, layer: int = 0) -> LayerStates:
    """Run a model on texts up to one attention layer, and take what arrives there.

    Layers before it see the texts as they always do, under a patch too where the model carries one.

    Args:
        model: of Llama's style; it is left as it was.
        input_ids: `(batch, length)`, without pads.
        layer: index of the layer, from 0.

    Raises:
        InvalidField: for a layer that there is not or that does not rotate, or texts of another shape.
        UnsupportedModel: when the model has no rotary positions.
    """
    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise InvalidField(
            f"input_ids of shape {tuple(input_ids.shape)} are not allowed; they must be (batch, length) "
            "with a length of at least 2"
        )
    stack = read_stack(model)
    require_count("layer", layer, minimum=0)
    if layer >= len(stack.layers):
        raise InvalidField(
            f"layer={layer} is not allowed; {type(model).__name__} has layers 0 to {len(stack.layers) - 1}"
        )
    found = stack.layers[layer]
    if found.layout is None or found.rotary is None:
        raise InvalidField(f"layer={layer} is not allowed; {found.name} of {type(model).__name__} rotates nothing")
    query, key, scaling = _capture(stack.module, found.module, input_ids)
    return LayerStates(
        query,
        key.repeat_interleave(query.shape[1] // key.shape[1], dim=1),
        found.layout,
        found.spec,
        Frequencies(found.rotary.inv_freq.cpu().double(), found.rotary.attention_scaling),
        scaling,
        f"layer {layer}",
    )


def mean_scores(states: LayerStates, scheme: Scheme | None = None) -> MeanScores:
    """The mean score at each distance, had the layer rotated its queries and keys by a scheme's frequencies.

    Args:
        states: of the layer; they are the model's own, whatever the scheme.
        scheme: fills `frequencies`; None for the frequencies that the layer has.

    Raises:
        InvalidField: when the scheme has no frequencies.
    """
    used = states.own if scheme is None else frequencies_of(scheme, states.rotary, states.length)
    distance = torch.arange(states.length, dtype=torch.float64)[:, None]
    turn = torch.polar(torch.ones_like(angles := distance * used.inv_freq), angles)
    shares = (states.turned * turn).real * float(used.attention_scaling) ** 2
    if used.decay is not None:
        shares = shares * torch.exp(-used.decay * distance)
    half = shares.shape[-1] // 2
    return MeanScores(shares[:, :half].sum(dim=-1), shares[:, half:].sum(dim=-1), states.unturned)


def plot_scores_by_distance(states: LayerStates, scheme: Scheme, smooth: int = 9) -> Figure:
    """`mean_scores` of a layer with its own frequencies and with those of a scheme, such as a raised base.

    Pairs that turn fully within the training length know every angle; slower ones come past L to angles they were never
    trained on, and there the score of far keys may rise above that of near ones. Raising the base slows them down:
    what they said at a distance within L they say at one past it.

    Args:
        states: as `layer_states` returns them, of texts longer than L.
        scheme: fills `frequencies`, such as `NTKScaling(factor=4)` or `AdjustedBase(base=80000)`.
        smooth: neighbouring distances of which the mean is drawn, odd; 1 for the bare numbers.

    Raises:
        InvalidField: naming the wrong argument.
    """
    require_count("smooth", smooth)
    if smooth % 2 == 0:
        raise InvalidField(f"smooth={smooth} is not allowed; it must be odd, as many neighbours on either side")
    before, after = mean_scores(states), mean_scores(states, scheme)
    texts, length = states.query.shape[0], states.length
    figure = sheet(
        9.4,
        4.1,
        "Mean attention score by distance",
        f"{states.name}, queries and keys of {texts} text{'s' * (texts != 1)} of {length:,} tokens, before the "
        f"softmax, mean of {smooth} neighbouring distances\n{_turning(states)} of {len(states.layout.first)} pairs "
        "turn fully within the training length",
    )
    parts = {"high": "fast half of the pairs", "low": "slow half of the pairs", "total": "all of the score"}
    # the farthest distances are the mean of few pairs of tokens
    stop = max(2, 7 * length // 8)
    left: Any = None
    for i, (part, title) in enumerate(parts.items()):
        axes = panel(figure, 0.75 + 2.85 * i, 0.6, 2.6, 2.25, sharey=left)
        for values, colour, z in ((before, COLOURS[0], 3), (after, COLOURS[1], 4)):
            curve = _smoothed(getattr(values, part), smooth)[:stop]
            axes.plot(range(stop), curve, color=colour, zorder=z, **{**LINE, "linewidth": 1.3})
        name_axes(axes, "distance m \N{MINUS SIGN} n (tokens)", "" if i else "score (nats)", title)
        axes.set_xlim(0, stop)
        tidy(axes)
        trained = states.rotary.training_length
        if stop > trained:
            tokens_axis(axes.xaxis, range(0, stop, trained * max(1, stop // (4 * trained))))
        mark_training_length(axes, trained)
        if left is not None:
            axes.tick_params(labelleft=False)
        left = left or axes
    low, high = left.get_ylim()
    left.set_ylim(low, high + 0.1 * (high - low))  # room for the words at the top
    _name_lines(figure, {"as the checkpoint is": COLOURS[0], short_name(scheme): COLOURS[1]})
    return figure


def _name_lines(figure: Figure, names: dict[str, str]) -> None:
    """Above the panels, where no line can pass."""
    width, height = figure.get_size_inches()
    x = 0.75
    for name, colour in names.items():
        y = 1 - 0.94 / height
        figure.add_artist(Line2D([x / width, (x + 0.25) / width], [y, y], color=colour, linewidth=2))
        figure.text((x + 0.33) / width, y, name, size=8.5, color=INK, va="center")
        x += 0.6 + 0.066 * len(name)


def _turning(states: LayerStates) -> int:
    """How many pairs make a full turn within the training length, by the layer's own frequencies."""
    return int((states.own.inv_freq * states.rotary.training_length >= 2 * math.pi).sum())


def _smoothed(values: torch.Tensor, width: int) -> torch.Tensor:
    """Centred means of `width` neighbours, of fewer at the ends."""
    kernel = torch.ones(1, 1, width, dtype=values.dtype)
    sums = torch.nn.functional.conv1d(
        torch.stack([values, torch.ones_like(values)])[:, None], kernel, padding=width // 2
    )
    return sums[0, 0] / sums[1, 0]


def _mean_by_distance(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Mean over batch, heads and all m - n = distance of q_m conj(k_n), `(length, dimensions)`.

    A correlation, by the fast Fourier transform: the sum over every pair of tokens would take a thousand times as long.
    """
    batch, heads, length = query.shape[:3]
    spectra = (torch.fft.fft(states, n=2 * length, dim=2) for states in (query, key))
    product = next(spectra) * next(spectra).conj()
    sums = torch.fft.ifft(product.sum(dim=(0, 1)), dim=0)[:length]
    return sums / (batch * heads * torch.arange(length, 0, -1, dtype=torch.float64)[:, None])


class _Arrived(Exception):
    """Queries and keys are there, and the rest of the forward is not needed."""


def _capture(stack: nn.Module, module: nn.Module, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Unrotated queries and keys of a module on the CPU, and its scaling."""
    found: list[Any] = []

    def take(_: nn.Module, query: torch.Tensor, key: torch.Tensor, *__: Any, **settings: Any) -> None:
        scaling = settings.get("scaling")
        found.extend((query.cpu(), key.cpu(), query.shape[-1] ** -0.5 if scaling is None else scaling))
        raise _Arrived

    device = next(stack.parameters()).device
    with _unrotated(module), attention_replaced(module, take), torch.no_grad():
        try:
            stack(input_ids=input_ids.to(device), use_cache=False)
        except _Arrived:
            return found[0], found[1], float(found[2])
    raise UnsupportedModel(f"{type(stack).__name__}: {type(module).__name__} was not reached by a forward")


@contextmanager
def _unrotated(module: nn.Module) -> Iterator[None]:
    """Hand a module the identity in place of its rotary tables."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "position_embeddings" not in kwargs:
            raise UnsupportedModel(f"{type(module).__name__} is not given `position_embeddings` by name")
        cos, sin = kwargs["position_embeddings"]
        return args, {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
