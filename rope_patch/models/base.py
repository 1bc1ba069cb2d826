"""What is read off a model before it is patched: its stacks, their attention layers and their rotary tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Checkpoint
from rope_patch.schemes.tools.rotary import RotaryLayout
from rope_patch.typing import RotarySpec

_LIMITS = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions")
"""Under these names configs and modules say how long a text may be; some count the reserved rows, some do not."""


@dataclass(frozen=True)
class RotaryTables:
    """One set of rotary tables of a model: its rotary module, or one layer type's share of it.

    Attributes:
        module: holds `inv_freq` and `attention_scaling`, with the layer type in front where there are several sets.
        layer_type: such as `full_attention`; None where all layers share one set.
        base: `rope_theta` of the checkpoint, as it was read before any scheme was named in the config.
        as_declared: whether the module's frequencies are those that its config describes.
        axes: on how many axes the module reads positions (mRoPE, for images); on text all of them are equal.
        is_complex: whether its attention reads one complex table, cos + i sin, in place of two.
    """

    module: nn.Module
    layer_type: str | None
    base: float
    as_declared: bool = True
    axes: int = 1
    is_complex: bool = False

    def spec(self, training_length: int) -> RotarySpec:
        """What a frequency scheme may know of this set."""
        return RotarySpec(2 * self.inv_freq.shape[-1], self.base, training_length)

    def attribute(self, name: str) -> str:
        """The name under which the module keeps `name` for this set."""
        return name if self.layer_type is None else f"{self.layer_type}_{name}"

    @property
    def inv_freq(self) -> torch.Tensor:
        """The model's own frequencies, `(d/2,)`."""
        return getattr(self.module, self.attribute("inv_freq"))

    @property
    def attention_scaling(self) -> float:
        """The model's own factor on cos and sin."""
        return getattr(self.module, self.attribute("attention_scaling"))

    def given(self, position_ids: torch.Tensor, like: torch.Tensor | None = None) -> Any:
        """What the module itself computes and hands to attention.

        Args:
            position_ids: `(batch, length)`, also fractional.
            like: has the wanted dtype and device; default float32 where the frequencies are.
        """
        if like is None:
            like = torch.zeros((), dtype=torch.float32, device=self.inv_freq.device)
        if self.axes > 1:
            position_ids = position_ids.expand(self.axes, -1, -1)
        extra = () if self.layer_type is None else (self.layer_type,)
        return self.module(like, position_ids.to(like.device), *extra)

    def tables(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions `(batch, length)` as the model itself computes them, `(batch, length, width)`."""
        given = self.given(position_ids)
        return (given.real, given.imag) if self.is_complex else given

    def joined(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        """cos and sin, `(batch, length, width)`, in the form in which attention reads them."""
        return torch.complex(cos.float(), sin.float()) if self.is_complex else (cos, sin)


class Heads(NamedTuple):
    """The queries of one attention module.

    Attributes:
        num: how many heads there are of them.
        dim: dimensions of a head.
        value_dim: dimensions of one head's values.
    """

    num: int
    dim: int
    value_dim: int


@dataclass(frozen=True)
class AttentionLayer:
    """One self-attention module.

    Attributes:
        index: `layer_idx`, the place in the cache.
        spec: its rotary embedding; where it has none, the one that a scheme would bring.
        heads: their number and sizes.
        kind: its layer type in the config; without one, `full_attention` or `sliding_attention` by its window.
        layout: how it pairs dimensions, or would; None where the module rotates in other layers, but not in this one.
        rotary: the tables that the module rotates by; None where it takes none.
        sliding_window: its window in tokens; None where it attends to everything before.
        bias_table: the learned biases by bucket of distance, `(num_buckets, heads)`; None where it has none.
        told: whether its block hands it the positions of its tokens.
        normed: whether a norm without weights follows the rotation; it turns too, and undoes a scale of cos and sin.
    """

    name: str
    module: nn.Module
    index: int
    spec: RotarySpec
    layout: RotaryLayout | None
    heads: Heads
    rotary: RotaryTables | None = None
    sliding_window: int | None = None
    bias_table: nn.Embedding | None = None
    kind: str = "full_attention"
    told: bool = True
    normed: bool = False

    @property
    def layer_type(self) -> str | None:
        """Of its rotary tables; None where all layers share one set, or have none."""
        return None if self.rotary is None else self.rotary.layer_type

    @property
    def is_causal(self) -> bool:
        """Whether a token sees the keys up to its own alone."""
        return getattr(self.module, "is_causal", True)


@dataclass(frozen=True)
class AbsoluteTable:
    """The learned absolute positions of one stack, and all that limits a text to as many.

    Attributes:
        name: path of the table inside it.
        embedding: the table, `(reserved + n, hidden)`.
        reserved: rows in front that stand for no position: `padding_idx + 1` in RoBERTa, two in OPT, else none.
        buffers: owner and name of each buffer with a place per row: `position_ids`, `token_type_ids`.
    """

    module: PreTrainedModel
    name: str
    embedding: nn.Embedding
    reserved: int
    buffers: tuple[tuple[nn.Module, str], ...]

    @property
    def rows(self) -> torch.Tensor:
        """The rows that stand for positions, `(n, hidden)`, detached."""
        return self.embedding.weight.detach()[self.reserved :]

    @property
    def capacity(self) -> int:
        """n: the longest text in tokens."""
        return len(self.rows)

    @property
    def checkpoint(self) -> Checkpoint:
        """What a scheme's defaults are read from."""
        return Checkpoint(self.capacity, self.config.num_attention_heads, self.capacity, has_table=True)

    @property
    def config(self) -> Any:
        """The config of the stack, as it is now."""
        return self.module.config

    def limits(self) -> Iterator[tuple[Any, str, int]]:
        """Holder, name and value of each number that says how long a text may be: in the config and on modules."""
        said = (self.capacity, self.capacity + self.reserved)
        for holder in (self.config, *self.module.modules()):
            for name in _LIMITS:
                if vars(holder).get(name) in said:
                    yield holder, name, vars(holder)[name]


@dataclass(frozen=True)
class Stack:
    """A stack of layers with what its config says.

    Attributes:
        native: the scheme of the checkpoint itself; None where no scheme here stands for it.
        part: `encoder` or `decoder` where a model may have both.
        replacements: module, name and value of what wants to be set before schemes can be mounted in its attention.
        others: further layers, which are under another scheme.
        absolute: its learned absolute positions; None where it has none, or where positions enter elsewhere too.
    """

    module: PreTrainedModel
    checkpoint: Checkpoint
    native: Scheme | None
    layers: tuple[AttentionLayer, ...] = ()
    rotary: tuple[RotaryTables, ...] = ()
    part: str = ""
    replacements: tuple[tuple[nn.Module, str, Any], ...] = ()
    absolute: AbsoluteTable | None = None
    others: tuple[AttentionLayer, ...] = ()

    @property
    def config(self) -> Any:
        """The config of the stack, as it is now."""
        return self.module.config

    @property
    def num_cached(self) -> int:
        """How many layers of a cache are for the layers of the stack, attention or not."""
        return max(layer.index for layer in (*self.layers, *self.others)) + 1

    @property
    def training_length(self) -> int:
        """L in tokens."""
        return self.checkpoint.training_length
