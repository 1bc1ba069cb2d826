"""SGLang: the config as Transformers 5 reads it, then `get_rope`."""

from __future__ import annotations

from ..reader import Deviation, Limit, Reader
from .cases import (
    BOTH_SPELLINGS,
    DEEPSEEK_CLASSES,
    EXPORT_BASE,
    EXPORT_LISTS,
    OLD,
    all_of,
    any_of,
    as_yarn,
    base_of_longest,
    class_in,
    is_type,
    list_temperature_from,
    long_for_all,
    model_in,
    mscales,
    new_words_alone,
    plain,
    ratio,
    taken_as,
    to,
    two_lists,
    unless,
)
from .transformers import BY_CONFIG

_SRT = "sglang 0.5.23 sglang/srt"
_ROPE = f"{_SRT}/layers/rotary_embedding"
_deepseek = class_in(*DEEPSEEK_CLASSES)
_laguna = model_in("laguna")

SGLANG = Reader(
    "SGLang",
    "sglang",
    "0.5.23",
    "read",
    f"{_ROPE}/factory.py get_rope; {_SRT}/utils/hf_transformers/common.py get_rope_config",
    "the config as Transformers 5 reads it; for a checkpoint with code of its own, rope_theta and rope_scaling",
    start="--context-length {length}",
    limits=(Limit(("yarn", "llama3", "longrope"), with_l=True),),
    deviations=(
        *BY_CONFIG,
        Deviation(
            "reads only rope_theta and rope_scaling at the top in its class for Qwen3",
            all_of(model_in("qwen3"), new_words_alone),
            taken_as(OLD),
            "sgl-project/sglang#14745",
            BOTH_SPELLINGS,
            ended="December 2025",
        ),
        Deviation(
            "reads only rope_theta and rope_scaling at the top in its class for MiniMax",
            all_of(model_in("minimax*"), new_words_alone),
            taken_as(OLD),
            "sgl-project/sglang#21241",
            BOTH_SPELLINGS,
            ended="March 2026",
        ),
        Deviation(
            "drops the scaling in its class for LFM2-MoE",
            all_of(model_in("lfm2_moe"), new_words_alone),
            plain,
            "sgl-project/sglang#26187",
            BOTH_SPELLINGS,
            ended="23 May 2026",
        ),
        Deviation(
            "takes every type for yarn in its code for DeepSeek, without attention_factor and truncate",
            all_of(_deepseek, unless(is_type("default"))),
            as_yarn(ratio(1.0, 0.0, times="attn_factor")),
            f"{_SRT}/models/deepseek_v2.py; {_ROPE}/rope_variant.py DeepseekScalingRotaryEmbedding",
        ),
        Deviation(
            "multiplies attention_factor by 0.1 ln k + 1 in its class for Laguna",
            all_of(_laguna, is_type("yarn")),
            ratio(None, None, times="attention_factor"),
            "sgl-project/sglang#33558",
            ended="August 2026",
        ),
        Deviation(
            "ignores mscale and mscale_all_dim, and computes 0.1 ln k + 1",
            all_of(mscales, unless(_deepseek)),
            to(mscale=None, mscale_all_dim=None),
            "sgl-project/sglang#22711",
            ended="a release after April 2026",
        ),
        Deviation(
            "ignores attention_factor, reads attn_factor instead, which multiplies 0.1 ln k + 1, and takes an mscale "
            "of 0 as given",
            all_of(is_type("yarn"), unless(any_of(_deepseek, _laguna))),
            ratio(None, None, times="attn_factor"),
            f"{_ROPE}/yarn.py YaRNScalingRotaryEmbedding",
            "write attn_factor = attention_factor / (0.1 ln k + 1)",
        ),
        Deviation(
            "gives all texts of a batch the long factors if one of them is beyond L",
            two_lists,
            long_for_all,
            f"{_ROPE}/rope_variant.py Phi3LongRoPEScaledRotaryEmbedding",
            partly=True,
        ),
        Deviation(
            "reads short_mscale and long_mscale, not attention_factor; without them it computes "
            "sqrt(1 + ln k / ln L), k = max_position_embeddings / L",
            is_type("longrope"),
            list_temperature_from("long_mscale"),
            f"{_ROPE}/rope_variant.py Phi3LongRoPEScaledRotaryEmbedding",
            "write short_mscale and long_mscale with the value of attention_factor",
        ),
        Deviation(
            "ignores the factor",
            is_type("proportional"),
            to(factor=1.0),
            f"{_ROPE}/factory.py get_rope",
            EXPORT_LISTS.replace("{key}", "sglang"),
        ),
        Deviation(
            "uses one base, for the longest text that it serves",
            is_type("dynamic"),
            base_of_longest,
            f"{_ROPE}/rope_variant.py DynamicNTKScalingRotaryEmbedding",
            EXPORT_BASE,
        ),
    ),
    unknown="Which share of the dimensions each model class hands over, and how its class for Laguna takes yarn since "
    "August 2026. Its wheel needs CUDA, so it was read and not run.",
)
