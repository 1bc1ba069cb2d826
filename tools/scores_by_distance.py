"""Print the mean attention score of a layer by distance, and how much fast and slow pairs of dimensions add to it.

    python -m tools.scores_by_distance --layer 5 --scheme yarn:factor=4
    rope-patch plot scores_by_distance --layer 5 --scheme yarn:factor=4

A rotation turns each pair of dimensions by itself, so its share of the mean score at a distance is known for any
frequencies from one forward pass. `pictures.py` draws the same numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rope_patch.cli.options import Specs, print_json, run
from rope_patch.errors import InvalidField, UnsupportedModel

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rope_patch.schemes import Scheme
    from rope_patch.schemes.tools.rotary import RotaryLayout
    from rope_patch.typing import Frequencies, RotarySpec


@dataclass(kw_only=True)
class Options:
    model: str | None = None  # a checkpoint; default the small one that comes with the recipes
    text: str | None = None  # a text file or a folder; default Python's own source
    schemes: Specs = ()  # whose frequencies to compare with those of the checkpoint; default NTK for the length
    layer: int = 0  # of the checkpoint, from 0
    length: int | None = None  # of each text in tokens; default four times the training length
    documents: int = 8  # texts at most
    json: bool = False  # print one JSON document instead of a table


def main(options: Options) -> None:
    """Means over distances from one power of two to the next."""
    from rich.console import Console
    from rich.table import Table

    from rope_patch.schemes import get_scheme

    states = read_layer(options.model, options.text, options.layer, options.length, options.documents)
    length = len(states.unrotated)
    schemes = options.schemes or (f"ntk:factor={max(1.0, length / states.rotary.training_length)}",)
    lines = {"checkpoint": mean_scores(states)}
    lines |= {spec: mean_scores(states, get_scheme(spec)) for spec in schemes}
    edges = [0, *(2**power for power in range(math.ceil(math.log2(length)))), length]
    averages: list[dict[str, Any]] = [
        {"line": line, "distance": [start, stop - 1], **{part: float(s[start:stop].mean()) for part, s in of.items()}}
        for line, of in lines.items()
        for start, stop in pairwise(edges)
    ]
    if options.json:
        print_json(averages)
        return
    shown = Table("frequencies of", "distances", "fast half", "slow half", "all")
    for row in averages:
        numbers = (f"{row[part]:.3f}" for part in ("fast", "slow", "all"))
        shown.add_row(row["line"], "{} to {}".format(*row["distance"]), *numbers)
    Console().print(shown)


@dataclass(frozen=True, eq=False)
class LayerStates:
    """Queries and keys of one attention layer before their rotation, and what the model does with them.

    `query` and `key` are `(batch, heads, length, head_dim)`, keys repeated where heads share them. `own` are the
    frequencies by which the layer rotates; `scaling` multiplies the products of queries and keys.
    """

    query: torch.Tensor
    key: torch.Tensor
    layout: RotaryLayout
    rotary: RotarySpec
    own: Frequencies
    scaling: float

    @functools.cached_property
    def unrotated(self) -> torch.Tensor:
        """Mean over all m - n = distance of q_m conj(k_n), each pair of dimensions read as a complex number.

        A rotation multiplies it by exp(i theta distance), and its real part is what the pair adds to the mean score:
        exactly so, because the mean is taken at each distance apart. Complex128, `(length, d/2)`.
        """
        import torch

        first, second = list(self.layout.first), list(self.layout.second)
        query, key = (
            torch.complex(states[..., first].double(), states[..., second].double())
            for states in (self.query, self.key)
        )
        return self.scaling * mean_by_distance(query, key)

    @functools.cached_property
    def rest(self) -> torch.Tensor:
        """The mean score by distance from dimensions that do not rotate: float64, `(length,)`."""
        import torch

        rotated = {*self.layout.first, *self.layout.second}
        others = [i for i in range(self.query.shape[-1]) if i not in rotated]
        if not others:
            return torch.zeros(self.query.shape[2], dtype=torch.float64)
        query, key = (states[..., others].double() for states in (self.query, self.key))
        return self.scaling * mean_by_distance(query, key).real.sum(dim=-1)


def read_layer(model: str | None, text: str | None, layer: int, length: int | None, documents: int) -> LayerStates:
    """The states of one layer of a checkpoint, over texts of so many tokens."""
    import torch

    from rope_patch.data.corpora import load_text
    from rope_patch.data.windows import select_windows
    from rope_patch.models.find_stacks import read_stack
    from rope_patch.saving.loading import default_checkpoint, load_model, load_tokenizer, quiet_transformers

    path = model or default_checkpoint()
    with quiet_transformers():
        loaded, tokenizer = load_model(path, device="cpu"), load_tokenizer(path)
    length = length or 4 * read_stack(loaded).training_length
    selection = select_windows(load_text(text), tokenizer, longest=length, targets=length, documents=documents)
    return layer_states(loaded, torch.stack([window.context(length)[:-1] for window in selection.windows]), layer)


def layer_states(model: nn.Module, input_ids: torch.Tensor, layer: int = 0) -> LayerStates:
    """Run a model on texts, `(batch, length)` without pads, up to one attention layer, and take what arrives there.

    Layers before it see the texts as they always do, under a patch too where the model carries one.
    """
    import torch

    from rope_patch.models.find_stacks import read_stack
    from rope_patch.models.probe import probing
    from rope_patch.typing import Frequencies

    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise InvalidField(
            f"input_ids of shape {tuple(input_ids.shape)} are not allowed; they must be (batch, length) "
            "with a length of at least 2"
        )
    stack = read_stack(model)
    if not 0 <= layer < len(stack.layers):
        raise InvalidField(
            f"layer={layer} is not allowed; {type(model).__name__} has layers 0 to {len(stack.layers) - 1}"
        )
    found = stack.layers[layer]
    if found.layout is None or found.rotary is None:
        raise InvalidField(f"layer={layer} is not allowed; {found.name} of {type(model).__name__} rotates nothing")
    arrived: list[Any] = []

    def take(_: nn.Module, query: torch.Tensor, key: torch.Tensor, *__: Any, **settings: Any) -> None:
        scaling = settings.get("scaling")
        arrived.extend((query.cpu(), key.cpu(), float(query.shape[-1] ** -0.5 if scaling is None else scaling)))
        raise Arrived

    with without_rotation(found.module), probing(found.module, take), torch.no_grad():
        try:
            stack.module(input_ids=input_ids.to(next(stack.module.parameters()).device), use_cache=False)
        except Arrived:
            query, key, scaling = arrived
        else:
            raise UnsupportedModel(f"{type(model).__name__}: a forward did not reach {found.name}")
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    own = Frequencies(found.rotary.inv_freq.cpu().double(), found.rotary.attention_scaling)
    return LayerStates(query, key, found.layout, found.spec, own, scaling)


class Arrived(Exception):
    """Queries and keys are there; the rest of the forward is not needed."""


@contextmanager
def without_rotation(module: nn.Module) -> Iterator[None]:
    """Give a module cos = 1 and sin = 0."""
    import torch

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


def mean_scores(states: LayerStates, scheme: Scheme | None = None) -> dict[str, torch.Tensor]:
    """The mean score at each distance, had the layer rotated its queries and keys by a scheme's frequencies.

    From distance 0, before the softmax, float64, `(length,)`: `fast` from the half of the pairs that turn fastest,
    `slow` from the other half, and `all`, the mean score itself, dimensions that do not rotate included. Without a
    scheme, by the frequencies that the layer has.
    """
    import torch

    length = len(states.unrotated)
    used = states.own if scheme is None else frequencies_of(scheme, states.rotary, length)
    distance = torch.arange(length, dtype=torch.float64)[:, None]
    turn = torch.polar(torch.ones_like(angles := distance * used.inv_freq), angles)
    shares = (states.unrotated * turn).real * float(used.attention_scaling) ** 2
    if used.decay is not None:
        shares = shares * torch.exp(-used.decay * distance)
    fast, slow = (half.sum(dim=-1) for half in shares.tensor_split([shares.shape[-1] // 2], dim=-1))
    return {"fast": fast, "slow": slow, "all": fast + slow + states.rest}


def frequencies_of(scheme: Scheme, rotary: RotarySpec, length: int | None = None) -> Frequencies:
    """f of a scheme for a text of so many tokens, by default L, without a model: float64, `(d/2,)`."""
    import torch

    from rope_patch.schemes.slots import Checkpoint
    from rope_patch.typing import Frequencies

    if "frequencies" not in scheme.methods:
        raise InvalidField(f"{scheme} fills {', '.join(sorted(scheme.slots))} and has no frequencies, as yarn has")
    length = length or rotary.training_length
    checkpoint = Checkpoint(rotary.training_length, num_heads=1, max_length=max(length, rotary.training_length))
    resolved = scheme.resolve(checkpoint)
    of_scheme = resolved.frequencies(rotary, torch.tensor([length]) if resolved.length_dependent else None)
    decay = None if of_scheme.decay is None else of_scheme.decay.double()
    return Frequencies(of_scheme.inv_freq.double().view(-1), float(of_scheme.attention_scaling), decay)


def mean_by_distance(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Mean over batch, heads and all m - n = distance of q_m conj(k_n), `(length, dimensions)`.

    Both are `(batch, heads, length, dimensions)`. A correlation, by the fast Fourier transform: the sum over every pair
    of tokens would take a thousand times as long.
    """
    import torch

    batch, heads, length = query.shape[:3]
    spectra = (torch.fft.fft(states, n=2 * length, dim=2) for states in (query, key))
    product = next(spectra) * next(spectra).conj()
    sums = torch.fft.ifft(product.sum(dim=(0, 1)), dim=0)[:length]
    return sums / (batch * heads * torch.arange(length, 0, -1, dtype=torch.float64)[:, None])


if __name__ == "__main__":
    run(Options, main)
