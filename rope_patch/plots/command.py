"""Pictures by name, with options in words: what `rope-patch plot` and a notebook's first cell want."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure

from rope_patch.errors import InvalidField, did_you_mean
from rope_patch.evaluation.corpora import load_corpus
from rope_patch.evaluation.loading import default_checkpoint, load_model, load_tokenizer, quiet_transformers
from rope_patch.evaluation.texts import select_windows
from rope_patch.models.reading import read_stack, read_stacks
from rope_patch.plots.biases import plot_biases
from rope_patch.plots.decay_bound import plot_decay_bound
from rope_patch.plots.inner_product import plot_inner_product
from rope_patch.plots.position_maps import plot_position_maps
from rope_patch.plots.scores import layer_states, plot_scores_by_distance
from rope_patch.plots.sinusoidal import plot_sinusoidal
from rope_patch.plots.wavelengths import plot_wavelengths
from rope_patch.schemes import get_scheme
from rope_patch.schemes.ntk import NTKScaling
from rope_patch.typing import RotarySpec


def draw(name: str, options: Mapping[str, Any]) -> Figure:
    """One of the pictures.

    Args:
        name: such as `wavelengths`.
        options: those that were given, by their names on the command line; `scheme`, `base` and `dim` are lists.

    Raises:
        InvalidField: there is no such picture, or it takes no such option, or the option is wrong.
        UnknownScheme, UnsupportedModel, EvaluationError, CorpusError: a scheme, a checkpoint or a text is wrong.
    """
    if name not in PICTURES:
        raise InvalidField(f"there is no picture {name!r}; {did_you_mean(name, PICTURES)}")
    taken = inspect.signature(PICTURES[name]).parameters
    for option in options:
        if option not in taken:
            raise InvalidField(f"{name} takes no option {option!r}; {did_you_mean(option, taken)}")
    return PICTURES[name](**options)


def _sinusoidal(dim: Sequence[int] = (128,), length: int = 128, base: Sequence[float] = (10000,)) -> Figure:
    return plot_sinusoidal(length, _only("dim", dim), _only("base", base))


def _inner_product(
    dim: Sequence[int] = (32, 128, 512),
    length: int = 16384,
    base: Sequence[float] = (10000,),
    training_length: int | None = None,
) -> Figure:
    return plot_inner_product(dim, length, _only("base", base), training_length)


def _decay_bound(
    dim: Sequence[int] = (128,),
    length: int = 16384,
    base: Sequence[float] = (100, 10000, 500000, 10000000),
    training_length: int | None = None,
) -> Figure:
    return plot_decay_bound(base, length, _only("dim", dim), training_length)


def _wavelengths(
    dim: Sequence[int] = (128,),
    base: Sequence[float] = (10000, 500000, 10000000),
    scheme: Sequence[str] = (),
    length: int | None = None,
    training_length: int = 4096,
) -> Figure:
    """The schemes are drawn for the first base."""
    rotary = RotarySpec(_only("dim", dim), base[0], training_length)
    return plot_wavelengths(rotary, base, [get_scheme(words) for words in scheme], length)


def _scores(
    model: str | None = None,
    text: str = "stdlib",
    scheme: Sequence[str] = (),
    layer: int = 0,
    length: int | None = None,
    documents: int = 8,
) -> Figure:
    """By default the base is raised as NTK does for the length, which by default is four training lengths."""
    path = model or default_checkpoint()
    with quiet_transformers():
        loaded, tokenizer = load_model(path, device="cpu"), load_tokenizer(path)
    trained = read_stack(loaded).training_length
    length = length or 4 * trained
    selection = select_windows(load_corpus(text), tokenizer, longest=length, targets=length, documents=documents)
    input_ids = torch.stack([window.context(length)[:-1] for window in selection.windows])
    after = get_scheme(_only("scheme", scheme)) if scheme else NTKScaling(factor=max(1.0, length / trained))
    return plot_scores_by_distance(layer_states(loaded, input_ids, layer), after)


def _biases(
    scheme: Sequence[str] = ("alibi", "sandwich"), model: str | None = None, heads: int = 4, length: int = 64
) -> Figure:
    """With a checkpoint of T5's style, its own learned biases come last, and the others take its number of heads."""
    schemes = [get_scheme(words) for words in scheme]
    if model is None:
        return plot_biases(schemes, heads, length)
    with quiet_transformers():
        stack = read_stacks(load_model(model, device="cpu"))[0]
    table = next((layer.bias_table for layer in stack.layers if layer.bias_table is not None), None)
    if table is None or stack.native is None:
        raise InvalidField(
            f"model={model!r} is not allowed; it must be a checkpoint with learned biases, of T5's style"
        )
    own = stack.native.resolve(stack.checkpoint)
    return plot_biases(
        [*schemes, own],
        stack.checkpoint.num_heads,
        length,
        {own.name: {"relative_attention_bias": table.weight}},
        [own.name] if stack.checkpoint.bidirectional else [],
    )


def _position_maps(scheme: Sequence[str] = (), training_length: int = 64, length: int | None = None) -> Figure:
    return plot_position_maps([get_scheme(words) for words in scheme], training_length, length)


PICTURES: dict[str, Callable[..., Figure]] = {
    "sinusoidal": _sinusoidal,
    "inner_product": _inner_product,
    "wavelengths": _wavelengths,
    "decay_bound": _decay_bound,
    "scores_by_distance": _scores,
    "biases": _biases,
    "position_maps": _position_maps,
}
"""What can be drawn by name."""


def _only(option: str, values: Sequence[Any]) -> Any:
    if len(values) != 1:
        raise InvalidField(f"{option}: {len(values)} were given; this picture takes one")
    return values[0]
