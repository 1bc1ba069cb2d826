"""Recurrent positions: one recurrent layer before the stack reads the text in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import ModelShape, Tokens
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class Recurrent(Scheme):
    """Add the state of a GRU to each token: x_m + W_o h_m with h_m = GRU(x_m, h_(m-1)).

    A recurrent network sees the order of its input, so the layers above need no positions and the length has no limit.
    The price is that tokens are read one after the other. The GRU is PyTorch's (reset gate, update gate, candidate);
    z h_(m-1) + (1 - z) n_m.

    A text begins, with h = 0, at every position 0. This rule alone separates packed documents. Pads leave the state as
    it is. The GRU looks back only, even in a bidirectional model.

    The post names the layer without details. The GRU, the sum with x_m and the small start of W_o, which nearly
    preserves a pretrained model, are our choices.

    The split of a batch into texts depends on the values of the positions, so `torch.compile` leaves the GRU out of
    its graph.

    Args:
        width: width of h; default the hidden size.
        initial_std: upper bound for the initial standard deviation of W_o h_m; default 0.001. With zeros no gradient
            would reach the GRU.
    """

    name = "rnn"
    summary = "adds what a recurrent network remembers of the text before"
    title = "RNN"
    equation = "x_m + W_o h_m, h_m = GRU(x_m, h_(m-1)), h_(-1) = 0"
    source = Source(
        "The position encodings of Transformers that researchers rack their brains over (in Chinese)",
        2021,
        "https://kexue.fm/archives/8130",
    )
    regime = "fine-tune"
    stateful = True
    breaks_graph = True
    shared = ("gru_input", "gru_hidden", "gru_input_bias", "gru_hidden_bias", "gru_output")
    sweep = None  # learned: there is nothing to measure before it is trained

    width: Annotated[int, AtLeast(1)] | None = None
    initial_std: Annotated[float, Above(0)] = 0.001

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        d, width = shape.hidden_size, self.width or shape.hidden_size
        sizes = ((3 * width, d), (3 * width, width), (3 * width,), (3 * width,))
        bound = width**-0.5  # the bound of torch.nn.GRU
        values = [bound * (2 * torch.rand(size, generator=random) - 1) for size in sizes]
        values.append(self.initial_std * bound * torch.randn(d, width, generator=random))
        return dict(zip(self.shared, values, strict=True))

    def embedding(self, tokens: Tokens, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        return self.advance(tokens, None, weights)[0]

    def advance(
        self, tokens: Tokens, state: torch.Tensor | None, weights: Weights = NO_WEIGHTS
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = tokens.states
        wide = torch.promote_types(x.dtype, torch.float32)
        *gru, output = (weights[name].to(wide) for name in self.shared)
        if state is None:
            state = x.new_zeros(len(x), output.shape[1])
        starts = (tokens.positions == 0).expand(x.shape[:2])
        # the sizes of its tensors depend on the values of the positions
        uncompiled = torch.compiler.disable(_read_tokens)
        seen = None if tokens.seen is None else tokens.seen.expand(x.shape[:2])
        remembered = uncompiled(x.to(wide), starts, state.to(wide), gru, seen)
        return (x + remembered @ output.T).to(x.dtype), remembered


def _read_tokens(
    x: torch.Tensor, starts: torch.Tensor, state: torch.Tensor, gru: list[torch.Tensor], seen: torch.Tensor | None
) -> torch.Tensor:
    """Like `_read_texts`, but it skips pads, which are false in `seen` `(batch, length)`; at a pad, h is that of the
    last token before it.
    """
    if seen is None or seen.all():
        return _read_texts(x, starts, state, gru)
    pads_last = (~seen).long().argsort(dim=1, stable=True)
    starts = (starts | ~seen).gather(1, pads_last)
    read = _read_texts(x.gather(1, pads_last[..., None].expand_as(x)), starts, state, gru)
    last = seen.cumsum(dim=1)[..., None] - 1
    return torch.where(last < 0, state[:, None], read.gather(1, last.clamp(min=0).expand_as(read)))


def _read_texts(x: torch.Tensor, starts: torch.Tensor, state: torch.Tensor, gru: list[torch.Tensor]) -> torch.Tensor:
    """Compute the state h after every token.

    The texts of all rows are read in parallel, packed as `torch.nn.utils.rnn` packs sequences: short texts need no
    padding to the longest, and a pad is a text of one token.

    Args:
        x: `(batch, length, hidden)`.
        starts: where a text begins, `(batch, length)`; a row that does not begin with one continues from its state.
        state: `(batch, width)`.
        gru: weights and biases of the GRU, in PyTorch's order.

    Returns:
        `(batch, length, width)`.
    """
    if not starts.numel():  # PyTorch's GRU crashes without a text
        return state.new_zeros(*starts.shape, state.shape[1])
    begins = starts.clone()
    begins[:, 0] = True
    text = begins.flatten().cumsum(0) - 1
    firsts = begins.flatten().nonzero().squeeze(-1)
    place = torch.arange(len(text), device=x.device) - firsts[text]

    longest_first = text.bincount().argsort(descending=True, stable=True)
    rank = longest_first.argsort()
    order = (place * len(firsts) + rank[text]).argsort()  # by place, and at each place the longest text first
    at_each_place = place.bincount().cpu()  # PyTorch requires batch sizes on the CPU

    carried = torch.where(starts[:, :1], torch.zeros_like(state), state)
    start = state.new_zeros(len(firsts), state.shape[1]).index_copy(0, rank[text.view_as(starts)[:, 0]], carried)
    read, _ = torch.gru(
        x.flatten(0, 1)[order], at_each_place, start[None], gru, True, 1, 0.0, torch.is_grad_enabled(), False
    )
    return read[order.argsort()].unflatten(0, starts.shape)
