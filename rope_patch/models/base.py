"""A model's structure, read before patching: its stacks, their attention layers and their rotary tables."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch.models.rounding import Rounding
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Checkpoint
from rope_patch.schemes.tools.rotary import RotaryLayout
from rope_patch.typing import Frequencies, RotarySpec

_LIMITS = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions")
"""Names of the maximum length in configs and modules; some include the reserved rows, some do not."""


@dataclass(frozen=True)
class RotaryTables:
    """One set of rotary tables of a model: its rotary module, or one layer type's share of it.

    Attributes:
        module: the module that holds `inv_freq` and `attention_scaling`, prefixed with the layer type if there are
            several sets.
        layer_type: the layer type, such as `full_attention`; None if all layers share one set.
        base: `rope_theta` of the checkpoint, before a scheme changed the config.
        as_declared: whether the module's frequencies are those that its config describes.
        axes: number of axes on which the module reads positions (mRoPE, for images); on text they are all equal.
        is_complex: whether its attention reads one complex table, cos + i sin, instead of two.
        rotating_pairs: see `RotarySpec`.
        fixed: the frequencies of a module whose tables do not depend on its `inv_freq` and `attention_scaling`; None if
            they do.
        rounding: the rounding of the frequencies by a cast; None if they were not rounded.
        copies: modules inside attention layers that have the same tables, and rotate further keys by them.
        choices: the names of all sets, if attention receives them in one dict and takes this set out of it.
    """

    module: nn.Module
    layer_type: str | None
    base: float
    as_declared: bool = True
    axes: int = 1
    is_complex: bool = False
    rotating_pairs: int | None = None
    fixed: Frequencies | None = field(default=None, compare=False)
    rounding: Rounding | None = None
    copies: tuple[nn.Module, ...] = ()
    choices: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """All modules that have these tables."""
        return (self.module, *self.copies)

    def spec(self, training_length: int) -> RotarySpec:
        """The facts about this set that a frequency scheme needs."""
        return RotarySpec(2 * self.inv_freq.shape[-1], self.base, training_length, self.rotating_pairs)

    def attribute(self, name: str) -> str:
        """The attribute in which the module stores `name` for this set."""
        return name if self.layer_type is None else f"{self.layer_type}_{name}"

    @property
    def inv_freq(self) -> torch.Tensor:
        """The model's own frequencies, `(d/2,)`."""
        current = getattr(self.module, self.attribute("inv_freq"))
        return current if self.fixed is None else self.fixed.inv_freq.to(current.device)

    @property
    def attention_scaling(self) -> float:
        """The model's own factor on cos and sin."""
        fixed = self.fixed
        return cast(
            float,
            getattr(self.module, self.attribute("attention_scaling")) if fixed is None else fixed.attention_scaling,
        )

    def compute(self, position_ids: torch.Tensor, like: torch.Tensor | None = None) -> Any:
        """Compute the tables as the module does for attention.

        Args:
            position_ids: `(batch, length)`, also fractional.
            like: a tensor of the desired dtype and device; default float32 on the device of the frequencies.
        """
        if like is None:
            like = torch.zeros((), dtype=torch.float32, device=self.inv_freq.device)
        if self.axes > 1:
            position_ids = position_ids.expand(self.axes, -1, -1)
        extra = () if self.layer_type is None else (self.layer_type,)
        return self.module(like, position_ids.to(like.device), *extra)

    def tables(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own cos and sin at positions `(batch, length)`, `(batch, length, width)`."""
        tables = self.compute(position_ids)
        return (tables.real, tables.imag) if self.is_complex else tables

    def joined(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        """Join cos and sin, `(batch, length, width)`, in the form that attention reads: a pair, or one complex
        tensor.
        """
        return torch.complex(cos.float(), sin.float()) if self.is_complex else (cos, sin)

    def offered(self, tables: Any) -> Any:
        """Wrap tables of any shape as the argument of an attention module, which may take them out of a dict."""
        return dict.fromkeys(self.choices, tables) if self.choices else tables


def is_causal(attention: nn.Module, argument: bool | None = None) -> bool:
    """Whether a token sees only the keys up to its own: by the `argument` of the forward, else by the config or, if
    that does not specify it, by the attention module, in the order of Transformers.
    """
    if argument is None:
        argument = getattr(getattr(attention, "config", None), "is_causal", None)
    return bool(getattr(attention, "is_causal", True) if argument is None else argument)


class Heads(NamedTuple):
    """The number of query heads of one attention module, and the dimensions of a query head and of a value head."""

    num: int
    dim: int
    value_dim: int


@dataclass(frozen=True)
class AttentionLayer:
    """One self-attention module, as measured before patching.

    Attributes:
        index: `layer_idx` when the layer was read, or a count for layers without one.
        spec: its rotary embedding, or the embedding that a scheme would add.
        kind: its layer type in the config; without one, `full_attention` or `sliding_attention` by its window.
        layout: the pairs of dimensions that rotate, or would rotate; None if the module rotates in other layers, but
            not in this one, or if it is `unscored` and could not be measured.
        rotary: the tables that rotate its queries and keys; None without rotation.
        sliding_window: the window in tokens.
        bias_table: the learned biases by bucket of distance, `(num_buckets, heads)`.
        gets_positions: whether its block passes position ids to it.
        normed: whether a norm follows the rotation and undoes a scale of cos and sin.
        turns_values: whether its values rotate with its keys, so that a scale of cos and sin scales them, too.
        unscored: the reason why this library cannot score its queries and keys, so that only its tables can be
            replaced; empty if it can.
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
    gets_positions: bool = True
    normed: bool = False
    turns_values: bool = False
    unscored: str = ""

    @property
    def cache_index(self) -> int:
        """The index of the layer in a cache: the current `layer_idx`, which changes when earlier layers are removed."""
        now = getattr(self.module, "layer_idx", None)
        return self.index if now is None else cast(int, now)

    @property
    def rotates(self) -> bool:
        """Whether the layer rotates queries and keys, or may do so."""
        return self.layout is not None or (bool(self.unscored) and self.rotary is not None)

    @property
    def layer_type(self) -> str | None:
        """The layer type of its rotary tables; None if all layers share one set, or have none."""
        return None if self.rotary is None else self.rotary.layer_type


@dataclass(frozen=True)
class AbsoluteTable:
    """The learned absolute positions of one stack, and everything that limits a text to their number.

    Attributes:
        name: path of the table in the stack.
        embedding: the table, `(reserved + n, hidden)`.
        reserved: leading rows without a position: `padding_idx + 1` in RoBERTa, two in OPT, else none.
        buffers: owner and name of each buffer with one entry per row: `position_ids`, `token_type_ids`.
        first: the position of a text's first token, as the model's `position_ids` count, if the model counts slots,
            pads included; None if it counts tokens, or takes no positions.
    """

    module: PreTrainedModel
    name: str
    embedding: nn.Embedding
    reserved: int
    buffers: tuple[tuple[nn.Module, str], ...]
    first: int | None = None

    @property
    def rows(self) -> torch.Tensor:
        """The rows of positions, `(n, hidden)`, detached."""
        return self.embedding.weight.detach()[self.reserved :]

    @property
    def capacity(self) -> int:
        """The maximum length n in tokens."""
        return len(self.rows)

    @property
    def checkpoint(self) -> Checkpoint:
        """The properties from which a scheme takes its defaults."""
        return Checkpoint(self.capacity, self.config.num_attention_heads, self.capacity, has_table=True)

    @property
    def config(self) -> Any:
        """The current config of the stack."""
        return self.module.config

    def limits(self) -> Iterator[tuple[Any, str, int]]:
        """The holder, name and value of each maximum length, in the config and on modules."""
        lengths = (self.capacity, self.capacity + self.reserved)
        for holder in (self.config, *self.module.modules()):
            for name in _LIMITS:
                if vars(holder).get(name) in lengths:
                    yield holder, name, vars(holder)[name]


@dataclass(frozen=True)
class Stack:
    """A stack of layers with the facts from its config.

    Attributes:
        native: the scheme of the checkpoint itself; None if the library does not know it.
        part: `encoder` or `decoder`, if a model may have both.
        replacements: module, name and value of attributes to set before schemes can be mounted in its attention.
        others: further layers, which are under another scheme.
        absolute: its learned absolute positions; None without them, or if positions also enter elsewhere.
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
        """The current config of the stack."""
        return self.module.config

    @property
    def training_length(self) -> int:
        """The original length in tokens, before the checkpoint's own scaling."""
        return self.checkpoint.training_length

    @property
    def max_length(self) -> int:
        """The length L in tokens as users count it: what the checkpoint reads today, under its own scaling."""
        return self.checkpoint.max_length

    @property
    def has_positions(self) -> bool:
        """Whether the tokens of the stack have positions already; a scheme that rotates counts its own positions."""
        return bool(self.rotary) or "position_ids" in inspect.signature(self.module.forward).parameters
