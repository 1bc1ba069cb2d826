"""The order of heads for Ms-PoE: how aware of positions each head of a checkpoint is, measured on a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from rope_patch.attention.problem import Problem
from rope_patch.errors import InvalidField, UnsupportedModel
from rope_patch.models.find_stacks import read_stacks
from rope_patch.mounting.layer_state import LayerState
from rope_patch.patching import PatchHandle, check_free, loaded, mount_scheme
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.ms_poe import MsPoE
from rope_patch.schemes.per_layer import REST, PerLayer

OUTLIER = 4.0
"""A weight is an outlier if it is above this many times the mean weight of its query."""


def rank_heads(
    model: nn.Module | PatchHandle,
    input_ids: torch.Tensor,
    *,
    first: int = 2,
    min_factor: float = MsPoE.min_factor,
    max_factor: float = MsPoE.max_factor,
) -> PerLayer:
    """Measure on a text how aware of positions each head is, and return Ms-PoE with the heads of each layer in that
    order.

    The awareness of a head is the share of keys to which the last token gives more than four times the mean weight,
    by queries and keys as they are projected, without a rotation. Source: 2403.04797 and its code, VITA-Group/Ms-PoE
    `utils/modify_arch/llama.py`, which measures each layer for every prompt, on the outputs of already scaled layers.
    Here one pass of the unchanged checkpoint measures all layers, and the order is kept.

    Args:
        model: a model without a scheme; it stays unchanged.
        input_ids: one text or several of equal length, without pads, `(batch, length)`; the awareness of a head is the
            mean over the texts.
        first: index of the first layer that is scaled; 2 in the paper's experiments.
        min_factor, max_factor: the fields of `MsPoE`.

    Raises:
        UnsupportedModel: the model does not rotate queries and keys, or has an encoder and a decoder.
        AlreadyPatched: the model carries a scheme.
        InvalidField: a factor, `first` or the shape of `input_ids` is not allowed.

    Example:
        >>> patch(model, rank_heads(model, tokenizer(text, return_tensors="pt").input_ids))
    """
    scheme = MsPoE(min_factor, max_factor)
    if input_ids.ndim != 2 or not input_ids.numel():
        raise InvalidField(f"input_ids of shape {tuple(input_ids.shape)} is not allowed; (batch, length) is")
    model = loaded(model)
    check_free(model, scheme)
    stacks = read_stacks(model)
    family, native = type(model).__name__, stacks[0].native
    if len(stacks) > 1 or not stacks[0].rotary or native is None:
        raise UnsupportedModel(f"{family}: heads are ranked in one stack that rotates queries and keys in a known way")
    found: dict[int, torch.Tensor] = {}
    training = model.training
    # queries and keys arrive as projected, and are not delegated
    with mount_scheme(model, native, "late", "chunked") as handle, _recorded(handle, found):
        model.eval()
        try:
            with torch.no_grad():
                model(input_ids)
        finally:
            model.train(training)
    if not (ranked := {index: aware for index, aware in found.items() if index >= first}):
        raise InvalidField(f"first={first} is not allowed; layers {', '.join(map(str, sorted(found)))} rotate")
    schemes: dict[str | int, Scheme | None] = {i: _ordered(scheme, aware) for i, aware in sorted(ranked.items())}
    return PerLayer({**schemes, REST: None})


def awareness(query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    """The share of keys that are outliers for the last query, `(heads,)`, as a mean over the batch.

    Shape:
        query `(batch, heads, q_len, head_dim)`, key `(batch, kv_heads, kv_len, head_dim)`, neither rotated.
    """
    last = query[:, :, -1:].float()
    keys = key.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    weights = (last @ keys.mT * scaling).softmax(dim=-1)
    return (weights > OUTLIER / key.shape[2]).double().mean(dim=(0, 2, 3))


def _ordered(scheme: MsPoE, aware: torch.Tensor) -> MsPoE:
    order = aware.argsort(descending=True, stable=True)  # heads that are equally aware stay as they are numbered
    return MsPoE(scheme.min_factor, scheme.max_factor, tuple(order.tolist()))


@contextmanager
def _recorded(handle: PatchHandle, found: dict[int, torch.Tensor]) -> Iterator[None]:
    """Measure the awareness of each layer's heads while it is scored, by the index of the layer."""

    def watch(state: LayerState, _: str, problem: Problem | None) -> None:
        if problem is not None and problem.query is not None and problem.key is not None:
            window = state.layer.sliding_window or problem.key.shape[2]
            found[state.layer.index] = awareness(problem.query, problem.key[:, :, -window:], problem.scaling)

    for state in handle.layer_states:
        state.watch = partial(watch, state)
    yield
