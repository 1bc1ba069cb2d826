"""DeepSpeed's inference: kernel injection, and FastGen."""

from __future__ import annotations

from dataclasses import replace

from ..entries import LARGEST_HEAD, Spelling
from ..reader import Deviation, Layer, Reader
from ..rotation import Rotation
from .cases import all_of, always, is_type, model_in, new_words_alone, plain, refuse, taken_as, to, unless

_INJECTION = "deepspeedai/DeepSpeed deepspeed/module_inject/containers/llama.py, after #8341"
_FIX = "deepspeedai/DeepSpeed#8341, September 2026"
_FIX_2 = "deepspeedai/DeepSpeed#8345, September 2026"


def _head_of_hidden(layer: Layer) -> Rotation:
    """Rotate all hidden_size / num_attention_heads dimensions, whatever head_dim and partial_rotary_factor are."""
    hidden, heads = (layer.source.fields.get(name) for name in ("hidden_size", "num_attention_heads"))
    width = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0
    width = width if 2 <= width <= LARGEST_HEAD else layer.rotation.head_dim
    return replace(layer.rotation, head_dim=width, partial=1.0)


DEEPSPEED = Reader(
    "DeepSpeed kernel injection",
    "deepspeed",
    "#8341",
    "read",
    _INJECTION,
    "rope_theta at the top, else that of rope_parameters; no scaling",
    spelling=Spelling(top_theta_first=True),
    deviations=(
        Deviation(
            "rotates with theta = 10000, whatever the config says",
            always,
            to(theta=10000.0),
            "deepspeedai/DeepSpeed#4480",
            ended="deepspeedai/DeepSpeed#4480, October 2023",
        ),
        Deviation(
            "fails at a config of Transformers 5 (AttributeError: rope_theta)",
            new_words_alone,
            refuse,
            "deepspeedai/DeepSpeed#8341",
            "write rope_theta at the top",
            ended=_FIX,
            silent=False,
        ),
        Deviation(
            "silently drops the scaling",
            unless(is_type("default")),
            plain,
            "deepspeedai/DeepSpeed#8341",
            ended=_FIX,
        ),
        Deviation(
            "refuses the type (ValueError)",
            unless(is_type("default")),
            refuse,
            _INJECTION,
            "serve it without kernel injection",
            begun=_FIX,
            silent=False,
        ),
        Deviation(
            "rotates hidden_size / num_attention_heads dimensions, whatever head_dim and partial_rotary_factor are",
            always,
            _head_of_hidden,
            _INJECTION,
        ),
    ),
    unknown="The first release with #8341. Its rotary operator for inference (#8373): details not read.",
)

FASTGEN = Reader(
    "DeepSpeed FastGen",
    "deepspeed-fastgen",
    "#8345",
    "read",
    "deepspeedai/DeepSpeed deepspeed/inference/v2/model_implementations; #8345",
    "rope_theta, and since #8345 also theta of rope_parameters; no scaling",
    spelling=Spelling(top_theta_first=True),
    deviations=(
        Deviation(
            "does not find theta of rope_parameters, and takes its own default for EXAONE 4",
            all_of(new_words_alone, model_in("exaone4")),
            taken_as(Spelling(keys=("rope_scaling",), inner_theta=False, nested=False, theta=1e6)),
            "deepspeedai/DeepSpeed#8345",
            "write rope_theta at the top",
            ended=_FIX_2,
        ),
        Deviation(
            "fails at a config of Transformers 5 (AttributeError: rope_theta)",
            all_of(new_words_alone, unless(model_in("exaone4"))),
            refuse,
            "deepspeedai/DeepSpeed#8345",
            "write rope_theta at the top",
            ended=_FIX_2,
            silent=False,
        ),
        Deviation(
            "silently drops the scaling",
            unless(is_type("default")),
            plain,
            "deepspeedai/DeepSpeed#8345",
            ended=_FIX_2,
        ),
        Deviation(
            "refuses llama3, linear, dynamic, yarn and longrope",
            is_type("llama3", "linear", "dynamic", "yarn", "longrope"),
            refuse,
            "deepspeedai/DeepSpeed#8345",
            begun=_FIX_2,
            silent=False,
        ),
    ),
    unknown="The first release with #8345. What it does with parameters by layer type.",
)
