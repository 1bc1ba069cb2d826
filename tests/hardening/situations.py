"""Random models, texts and masks, and a model's outputs for them."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import nn
from transformers import PreTrainedModel

from rope_patch import Scheme
from tests.families import build
from tests.hardening.legal import LONGEST, schemes
from tests.runs import left_padded, positions_of, tokens

Inputs = dict[str, torch.Tensor]

_FAMILIES = {
    **{"llama": 8, "llama_mha": 8, "qwen3": 8, "cohere": 8, "gpt_neox": 4, "glm": 4, "helium": 8, "smollm3": 8},
    **{"gemma3": 8, "baichuan": 8, "baichuan_alibi": 8},
}
"""Families whose sizes are those of `tests.families`, with the number of pairs of each head that turn."""


@dataclass(frozen=True)
class Shape:
    """What a model is built from."""

    family: str
    pairs: int
    heads: int = 4
    changes: tuple[tuple[str, Any], ...] = ()

    def build(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """A fresh model, the same every time."""
        return copy.deepcopy(_prototype(self.family, self.changes)).to(dtype)

    @property
    def reference(self) -> PreTrainedModel:
        """The model in float64 for the oracle: one for all cases, and so always to be left as it was."""
        return _reference(self.family, self.changes)


@functools.lru_cache(maxsize=256)
def _prototype(family: str, changes: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    return build(family, **dict(changes))


@functools.lru_cache(maxsize=256)
def _reference(family: str, changes: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    return copy.deepcopy(_prototype(family, changes)).double()


@st.composite
def shapes(draw: DrawFn) -> Shape:
    """A family as it is, or a Llama with heads of any number and width, also of an odd number of pairs."""
    if draw(st.booleans()):
        family = draw(st.sampled_from(sorted(_FAMILIES)))
        return Shape(family, _FAMILIES[family])
    heads, pairs = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from([2, 3, 5, 7, 8]))
    shared = draw(st.sampled_from([divisor for divisor in range(1, heads + 1) if heads % divisor == 0]))
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads // shared, "head_dim": 2 * pairs}
    layers = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": draw(st.integers(1, 3))}
    return Shape("llama", pairs, heads, tuple({**sizes, **layers}.items()))


@dataclass(frozen=True)
class Text:
    """Rows of tokens as a model is given them.

    Attributes:
        kind: of the mask.
        ids: `(rows, length)`.
        inputs: masks and positions beside them.
        shown: the tokens whose logits mean something, `(rows, length)`.
        rows: the texts without pads.
    """

    kind: str
    ids: torch.Tensor
    inputs: Inputs
    shown: torch.Tensor
    rows: tuple[torch.Tensor, ...] = field(repr=False)


@st.composite
def texts(draw: DrawFn, kinds: tuple[str, ...]) -> Text:
    """One to three rows, masked in one of these ways."""
    kind = draw(st.sampled_from(kinds))
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=3))
    rows = tuple(tokens(length, seed=index) for index, length in enumerate(lengths))
    ids, mask = left_padded(list(rows))
    inputs: Inputs = {"attention_mask": mask, "position_ids": positions_of(mask)}
    if kind == "right pads":
        ids, mask = _to_the_left(ids, mask), _to_the_left(mask, mask)
        inputs = {"attention_mask": mask, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
    elif kind != "left pads":
        ids = torch.cat([tokens(max(lengths), seed=index) for index in range(len(lengths))])
        mask, inputs = torch.ones_like(ids), {}
    if kind == "packed":
        begins = torch.zeros(ids.shape[1], dtype=torch.bool)
        begins[[0, *draw(st.lists(st.integers(0, ids.shape[1] - 1), max_size=3))]] = True
        steps = torch.arange(ids.shape[1])
        inputs = {"position_ids": (steps - torch.where(begins, steps, 0).cummax(0).values).expand_as(ids)}
    if kind == "any":
        random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        seen = torch.rand(len(ids), 1, ids.shape[1], ids.shape[1], generator=random) < draw(st.floats(0.2, 1))
        inputs = {"attention_mask": (seen | torch.eye(ids.shape[1], dtype=torch.bool)).tril()}
        inputs["position_ids"] = torch.arange(ids.shape[1]).expand_as(ids)
    return Text(kind, ids, inputs, mask.bool(), rows)


def _to_the_left(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Left pads become right pads."""
    return torch.stack([row.roll(-int((kept == 0).sum())) for row, kept in zip(rows, mask, strict=True)])


@dataclass(frozen=True)
class Situation:
    """A model, a scheme on it, how it is carried out, and a text."""

    shape: Shape
    scheme: Scheme
    mount: str
    attention: str
    text: Text

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in self.shape.changes)
        rows = [len(row[0]) for row in self.text.rows]
        return (
            f"build({self.shape.family!r}, {sizes}) under {self.scheme}, mount={self.mount!r}, "
            f"attention={self.attention!r}, {self.text.kind}, rows of {rows}, {self.text.inputs}"
        )


@st.composite
def situations(draw: DrawFn, *kinds: str) -> Situation:
    """Any model under any scheme, on a text that is masked in one of these ways."""
    shape = draw(shapes())
    return Situation(
        shape,
        draw(schemes(shape.pairs, shape.heads)),
        draw(st.sampled_from(["auto", "auto", "late"])),
        draw(st.sampled_from(["auto", "segmented", "chunked"])),
        draw(texts(kinds)),
    )


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a model, saved or not, as it is now."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_same_weights(found: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    now = weights_of(found)
    assert now.keys() == expected.keys()
    for name, tensor in expected.items():
        assert now[name].dtype == tensor.dtype
        assert torch.equal(now[name], tensor), name
