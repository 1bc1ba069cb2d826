"""Attention scores by distance: what the fast and the slow pairs of dimensions of a checkpoint add to them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.errors import InvalidField, UnsupportedModel
from rope_patch.models.probe import probing
from rope_patch.models.reading import read_stack
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Checkpoint
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
        first, second = list(self.layout.first), list(self.layout.second)
        query, key = (
            torch.complex(states[..., first].double(), states[..., second].double())
            for states in (self.query, self.key)
        )
        return self.scaling * mean_by_distance(query, key)

    @functools.cached_property
    def rest(self) -> torch.Tensor:
        """The mean score by distance from dimensions that do not rotate: float64, `(length,)`."""
        rotated = {*self.layout.first, *self.layout.second}
        others = [i for i in range(self.query.shape[-1]) if i not in rotated]
        if not others:
            return torch.zeros(self.query.shape[2], dtype=torch.float64)
        query, key = (states[..., others].double() for states in (self.query, self.key))
        return self.scaling * mean_by_distance(query, key).real.sum(dim=-1)


def layer_states(model: nn.Module, input_ids: torch.Tensor, layer: int = 0) -> LayerStates:
    """Run a model on texts up to one attention layer, and take what arrives there.

    Layers before it see the texts as they always do, under a patch too where the model carries one.

    Args:
        model: of Llama's style; it is left as it was.
        input_ids: `(batch, length)`, without pads.
        layer: index of the layer, from 0.

    Raises:
        InvalidField: there is no such layer, it does not rotate, or the texts have another shape.
        UnsupportedModel: the model has no rotary positions.
    """
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
        raise _Arrived

    with _without_rotation(found.module), probing(found.module, take), torch.no_grad():
        try:
            stack.module(input_ids=input_ids.to(next(stack.module.parameters()).device), use_cache=False)
        except _Arrived:
            query, key, scaling = arrived
        else:
            raise UnsupportedModel(f"{type(model).__name__}: a forward did not reach {found.name}")
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    own = Frequencies(found.rotary.inv_freq.cpu().double(), found.rotary.attention_scaling)
    return LayerStates(query, key, found.layout, found.spec, own, scaling)


def mean_scores(states: LayerStates, scheme: Scheme | None = None) -> dict[str, torch.Tensor]:
    """The mean score at each distance, had the layer rotated its queries and keys by a scheme's frequencies.

    Args:
        states: of the layer; they are the model's own, whatever the scheme.
        scheme: fills `frequencies`; None for the frequencies that the layer has.

    Returns:
        from distance 0, before the softmax, float64, `(length,)`: `fast` from the half of the pairs that turn fastest,
        `slow` from the other half, and `all`, the mean score itself, dimensions that do not rotate included.

    Raises:
        InvalidField: the scheme has no frequencies.
    """
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
    """f of a scheme for a text of so many tokens, by default L, without a model: float64, `(d/2,)`.

    Raises:
        InvalidField: the scheme has no frequencies.
    """
    if "frequencies" not in scheme.methods:
        raise InvalidField(f"{scheme} fills {', '.join(sorted(scheme.slots))} and has no frequencies, as yarn has")
    length = length or rotary.training_length
    checkpoint = Checkpoint(rotary.training_length, num_heads=1, max_length=max(length, rotary.training_length))
    resolved = scheme.resolve(checkpoint)
    found = resolved.frequencies(rotary, torch.tensor([length]) if resolved.length_dependent else None)
    decay = None if found.decay is None else found.decay.double()
    return Frequencies(found.inv_freq.double().view(-1), float(found.attention_scaling), decay)


def mean_by_distance(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Mean over batch, heads and all m - n = distance of q_m conj(k_n), `(length, dimensions)`.

    A correlation, by the fast Fourier transform: the sum over every pair of tokens would take a thousand times as long.

    Shape:
        query, key `(batch, heads, length, dimensions)`.
    """
    batch, heads, length = query.shape[:3]
    spectra = (torch.fft.fft(states, n=2 * length, dim=2) for states in (query, key))
    product = next(spectra) * next(spectra).conj()
    sums = torch.fft.ifft(product.sum(dim=(0, 1)), dim=0)[:length]
    return sums / (batch * heads * torch.arange(length, 0, -1, dtype=torch.float64)[:, None])


class _Arrived(Exception):
    """Queries and keys are there; the rest of the forward is not needed."""


@contextmanager
def _without_rotation(module: nn.Module) -> Iterator[None]:
    """Give a module cos = 1 and sin = 0."""

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
