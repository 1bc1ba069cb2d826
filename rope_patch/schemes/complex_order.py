"""Complex-order: each word is a wave whose phase advances with its position at the word's own frequency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from rope_patch.errors import InvalidField, UnsupportedPositions
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above
from rope_patch.schemes.slots import ModelShape, Tokens
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class ComplexOrder(Scheme):
    """Read dimension j of a word at position k as r_j e^(i (omega_j k + phi_j)): a shift of the text turns it by
    omega_j.

    The paper requires a bounded function of the position that a shift multiplies by a factor of the shift alone. Only
    these waves qualify. Each word learns how fast its dimensions turn, so a word may depend on its position much,
    little or not at all.

    In the paper all layers are complex and have twice the weights. Here the layers stay real and the hidden size stays
    d: the word vector is read as d/2 complex numbers z_j = x_2j + i x_(2j+1), with amplitude |z_j| and a phase, and
    these numbers are rotated. With zero frequencies and phases the result is the word vector itself.

    The released Transformers have no phases; here they are learned and start at zero. The released code reads a real
    vector as the amplitudes of d complex numbers with equal frequencies in pairs (2j, 2j+1); the pairs here are the
    same.

    Args:
        shared_words: use one vector of frequencies and one of phases for all words. By default each word has its own
            vectors, as in the paper; together they are as large as the table of word vectors.
        start: initial frequencies of every word: `"sinusoidal"`, b^(-2j/d) radians per token, as released; or
            `"zeros"`, which leaves a pretrained model unchanged.
        base: b of the sinusoidal start, 10000 as released.
    """

    name = "complex_order"
    summary = "every word learns by itself how fast its dimensions turn with the position"
    title = "complex order"
    equation = "z_j e^(i (omega_(word,j) k + phi_(word,j))), z_j = x_2j + i x_(2j+1)"
    source = Source(
        "Encoding word order in complex embeddings",
        2019,
        "https://arxiv.org/abs/1912.12333",
        "https://github.com/iclr-complex-order/complex-order",
    )
    regime = "from-scratch"
    absolute = True
    shared = ("frequencies", "phases")
    precise = ("frequencies", "phases")  # half precision leaves a large angle no digits

    shared_words: bool = False
    start: Literal["sinusoidal", "zeros"] = "sinusoidal"
    base: Annotated[float, Above(0)] = 10000.0

    @property
    def reads_ids(self) -> bool:  # type: ignore[override]
        return not self.shared_words

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        d = shape.hidden_size
        if d % 2:
            raise InvalidField(f"complex_order: {d} dimensions cannot form complex numbers; an even number is required")
        phases = torch.zeros(1 if self.shared_words else shape.vocab_size, d // 2)
        if self.start == "zeros":
            return {"frequencies": phases.clone(), "phases": phases}
        released = (1 / self.base ** (torch.arange(0, d, 2).double() / d)).float()
        return {"frequencies": released.repeat(len(phases), 1), "phases": phases}

    def embedding(self, tokens: Tokens, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        x = tokens.states
        wide = torch.promote_types(x.dtype, torch.float32)
        frequencies, phases = (self._of_words(weights[name], tokens.ids).to(wide) for name in self.shared)
        angles = frequencies * tokens.positions[..., None] + phases
        cos, sin = angles.cos(), angles.sin()
        real, imaginary = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
        return turned.flatten(-2).to(x.dtype)

    def _of_words(self, table: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        if not self.reads_ids:
            return table
        if ids is None:
            raise UnsupportedPositions(
                "complex_order: each word has its own frequencies, but the model received vectors (inputs_embeds) "
                "instead of token ids; shared_words=True needs no ids"
            )
        return torch.nn.functional.embedding(ids, table)
