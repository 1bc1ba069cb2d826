"""Defaults of Transformers for fields that a config leaves out: sizes, thetas and layer types of each `model_type`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

THETA = ("rope_theta", "rotary_emb_base", "global_rope_theta")
"""Names of theta at the top of a config, for all layers or for those of full attention."""

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
        known: whether Transformers has the type, so that the other fields are its own.
        unread: why its positions cannot be read here; empty if they can.
        hidden_size, num_attention_heads, max_position_embeddings: where the config does not say.
        head_dim: where the config does not say, also by layer type; None follows from the two sizes.
        reads_head_dim: the fields that say it, in their order, and sums of fields; null is not the default, it follows
            from the two sizes.
        names: what the config calls a size, by its usual name.
        original: L where the top of the config does not say; it wins over the one beside the scaling.
        theta: the base by layer type; one number if all layers are alike.
        reads_theta: the names of theta at the top of the config, by layer type.
        partial: the share of a head that is rotated where the config does not say, also by layer type.
        heeds_partial: whether `default` rotates that share; else all of the head, whatever the config says.
        reads_partial: the names of that share at the top of the config.
        rope_parameters: taken where the config has none.
        reads_scaling: whether `rope_scaling` counts, where all layers are alike.
        scaled: the layer types to which one `rope_scaling` applies; None if such a config does not load.
        flat: the layer types to which `rope_parameters` apply that do not name any.
        split: whether parameters of no layer type belong to the second one, `compress`, as in DeepSeek V4.
        fixed: whether no word of the config changes the base or scales it.
        alpha: whether `dynamic` takes one base for all lengths, theta alpha^(d/(d - 2)).
        sections, interleaved: as in `Rotation`, where the config does not say; they are the code's own.
        only_if: fields and the values without which nothing is rotated.
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
        """The layer types that have positions of their own; empty if all layers are alike."""
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
    """Llama's defaults, for a type that Transformers lacks; it reads theta and the rotated share under any known
    name.
    """
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
