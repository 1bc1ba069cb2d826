"""Defaults of Transformers for fields that a config leaves out: sizes, thetas and layer types of each `model_type`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

THETA = ("rope_theta", "rotary_emb_base", "global_rope_theta")
"""Names of theta at the top of a config, for all layers or for the layers with full attention."""

LOCAL_THETA = ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta")
"""Names of theta at the top of a config, for the layers with a window."""

PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_pct")
"""Names of the share of a head that is rotated, at the top of a config."""

WIDTHS = ("rotary_dim", "qk_rope_head_dim")
"""Names of the dimensions of a head that are rotated, at the top of a config."""


@dataclass(frozen=True)
class Architecture:
    """The defaults of one `model_type`; the defaults of this class are Llama's.

    Attributes:
        known: whether Transformers has the type, so that the other fields hold its own defaults.
        unread: the reason why the reader cannot take positions from this type; empty if it can.
        hidden_size, num_attention_heads, max_position_embeddings: defaults if the config leaves them out.
        head_dim: default if the config leaves it out, also by layer type; None means hidden_size over
            num_attention_heads.
        reads_head_dim: the fields, or sums of fields, that give head_dim, in the order in which they are tried; null
            means hidden_size over num_attention_heads, and not the default.
        names: the config's own names of sizes, by the usual name.
        original: L if the top of the config leaves it out; it wins over an L beside the scaling.
        theta: the base by layer type; one number if all layers are alike.
        reads_theta: the names of theta at the top of the config, by layer type.
        partial: the share of a head that is rotated if the config leaves it out, also by layer type.
        heeds_partial: whether `default` rotates that share; if False it rotates the whole head, whatever the config
            says.
        reads_partial: the names of that share at the top of the config.
        rope_parameters: the parameters if the config has none.
        reads_scaling: whether `rope_scaling` counts, in a model whose layers are alike.
        scaled: the layer types to which one `rope_scaling` applies; None if such a config does not load.
        flat: the layer types to which `rope_parameters` apply if they name no layer type.
        split: whether parameters without a layer type belong to the second type, `compress`, as in DeepSeek V4.
        fixed: whether no field of the config changes or scales the base.
        alpha: whether `dynamic` uses one base for all lengths, theta alpha^(d/(d - 2)).
        sections, interleaved: as in `Rotation`, if the config leaves them out; the model's code has these values.
        only_if: fields with the values that they need so that anything is rotated.
    """

    known: bool = True
    unread: str = ""
    hidden_size: int = 4096
    num_attention_heads: int = 32
    max_position_embeddings: int = 2048
    head_dim: int | Mapping[str, int] | None = None
    reads_head_dim: tuple[str, ...] = ("head_dim",)
    names: Mapping[str, str] = field(default_factory=dict)
    original: int | None = None
    theta: float | Mapping[str, float] = 10000.0
    reads_theta: tuple[str, ...] | Mapping[str, tuple[str, ...]] = ("rope_theta",)
    partial: float | Mapping[str, float] = 1.0
    heeds_partial: bool = False
    reads_partial: tuple[str, ...] = ("partial_rotary_factor",)
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    reads_scaling: bool = True
    scaled: tuple[str, ...] | None = None
    flat: tuple[str, ...] | None = None
    split: bool = False
    fixed: bool = False
    alpha: bool = False
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    only_if: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The layer types that have their own positions; empty if all layers are alike."""
        return tuple(self.theta) if isinstance(self.theta, Mapping) else ()


def architecture_of(model_type: str) -> Architecture | None:
    """The defaults of a type of Transformers; None if it has no such type."""
    if (found := _table().get(model_type)) is None:
        return None
    if isinstance(found, dict) and "text" in found:  # a multimodal model, whose text model has a type of its own
        return architecture_of(found["text"])
    if found is False:
        return Architecture(unread="it has no rotary positions")
    return Architecture(unread=found) if isinstance(found, str) else Architecture(**found)


def unknown_architecture(fields: Mapping[str, Any]) -> Architecture:
    """Llama's defaults, for a type that Transformers lacks; theta and the rotated share may have any known name."""
    kinds = ("full_attention", "sliding_attention")
    has_two = any(fields.get(name) is not None for name in LOCAL_THETA)
    return Architecture(
        known=False,
        max_position_embeddings=0,
        hidden_size=0,
        num_attention_heads=0,
        theta=dict.fromkeys(kinds, 10000.0) if has_two else 10000.0,
        reads_theta=dict(zip(kinds, (THETA, LOCAL_THETA), strict=True)) if has_two else THETA,
        reads_head_dim=("qk_rope_head_dim", "head_dim"),
        heeds_partial=True,
        reads_partial=(*PARTIAL, "rotary_dim"),
        scaled=kinds[:1],
        flat=kinds[:1],
    )


@cache
def _table() -> dict[str, Any]:
    """Read the defaults from the file that `tools/position_defaults.py` writes."""
    return dict(json.loads((Path(__file__).parent / "architectures.json").read_text(encoding="utf-8")))
