"""Tiny random models of images and text whose text has positions on three axes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.families import FAMILIES as OF_TEXT
from tests.families import GENERIC, from_config

IMAGE, VIDEO, START, END = 90, 91, 92, 93

_VISION: dict[str, Any] = {
    **{"depth": 1, "num_hidden_layers": 1, "num_heads": 2, "num_attention_heads": 2},
    **{"embed_dim": 16, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 32, "in_channels": 3},
    **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "image_size": 16},
    **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def _text(sections: list[int], **others: Any) -> dict[str, Any]:
    entry = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **others}
    return {**GENERIC, "num_hidden_layers": 2, "head_dim": 16, "rope_parameters": entry}


_TEXTS = {
    "qwen2_vl": _text([2, 3, 3]),
    "qwen2_5_vl": _text([2, 3, 3]),
    "qwen3_vl": _text([4, 2, 2], mrope_interleaved=True),
    "qwen3_vl_moe": _text([4, 2, 2], mrope_interleaved=True),
    "qwen3_5": OF_TEXT.get("qwen3_5_text", {}),
    "qwen3_5_moe": OF_TEXT.get("qwen3_5_moe_text", {}),
    "glm4v": _text([2, 3, 3], partial_rotary_factor=1.0),
    "glm46v": _text([1, 1, 2], partial_rotary_factor=0.5),
    "glm4v_moe": _text([1, 1, 2], partial_rotary_factor=0.5),
    "glm_ocr": _text([2, 3, 3], partial_rotary_factor=1.0),
    "paddleocr_vl": _text([2, 3, 3]),
    "cosmos3_edge": _text([2, 3, 3]),
    "cosmos3_omni": _text([4, 2, 2], mrope_interleaved=True),
}

FAMILIES = [family for family in _TEXTS if family in CONFIG_MAPPING]
"""Every family whose text has positions on three axes and whose rotation is understood."""


def build(family: str, **entry: Any) -> PreTrainedModel:
    """A fresh model in evaluation mode, the same weights every time; with values of its `rope_parameters` changed."""
    return _made(family, entry) if entry else copy.deepcopy(_prototype(family))


@functools.cache
def _prototype(family: str) -> PreTrainedModel:
    return _made(family, {})


def sized(family: str, tokens: dict[str, int] | None = None, **sizes: Any) -> PreTrainedModel:
    """A fresh model whose text has these sizes, and images these tokens."""
    return _made(family, {}, sizes, tokens or _TOKENS)


def _made(
    family: str, entry: dict[str, Any], sizes: dict[str, Any] | None = None, tokens: dict[str, int] = _TOKENS
) -> PreTrainedModel:
    text = {key: value for key, value in _TEXTS[family].items() if key != "model_type"} | (sizes or {})
    text["rope_parameters"] = {**text["rope_parameters"], **entry}
    vision = {**_VISION, **dict.fromkeys(("hidden_size", "out_hidden_size"), text["hidden_size"])}
    # some classes of configs write into what they are given
    config = AutoConfig.for_model(family, text_config=copy.deepcopy(text), vision_config=vision, **tokens)
    return from_config(config, AutoModelForImageTextToText)


def with_image(length: int = 36) -> dict[str, torch.Tensor]:
    """Inputs of one row of text with an image of four tokens in it, two by two."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, IMAGE, (1, length), generator=random)
    ids[0, 6], ids[0, 7:11], ids[0, 11] = START, IMAGE, END
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=random),
    }
