"""The configs of the vectors that have the axes or the sizes of published models.

Sizes are real in what positions read: the width of a head, theta, L and the scaling.
"""

from __future__ import annotations

from typing import Any

from tools.vector_cases import (
    IMAGES,
    LLAMA_3_1,
    QWEN_YARN,
    Case,
    L,
    llama,
    older,
    sized,
)

_CHUNKED = {"mrope_section": [4, 6, 6]}
_INTERLEAVED = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
_QWEN_3_5 = {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
_QWEN_3_5_SIZES: dict[str, Any] = {
    **{
        "full_attention_interval": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    **{"layer_types": ["linear_attention", "full_attention"]},
}


def qwen_3_5(says: str, entry: dict[str, Any], longest: int, *traps: str) -> Case:
    """Positions of Qwen3.5: a quarter of 256 dimensions, three axes that alternate, theta 10^7."""
    parameters = {"rope_type": "default", "rope_theta": 1e7, **_QWEN_3_5, **entry}
    return sized(
        says, 256, 262144, longest, *traps, model_type="qwen3_5_text", rope_parameters=parameters, **_QWEN_3_5_SIZES
    )


AXES = {
    "mrope_chunked": older(
        "Three axes, one after another: of text all three positions are alike, and nothing differs from plain RoPE.",
        {"type": "mrope", **_CHUNKED},
        theta=1e6,
        model_type="qwen2_vl_text",
    ),
    "mrope_interleaved": llama(
        "Three axes that alternate from pair to pair: of text all three positions are alike.",
        {"rope_theta": 5e6, **_INTERLEAVED},
        model_type="qwen3_vl_text",
        tie_word_embeddings=False,
        longest=4 * L,
    ),
    "mrope_interleaved_partial": qwen_3_5(
        "As Qwen3.5: a quarter of the head is rotated, and three axes alternate in it.", {}, 262144
    ),
    "mrope_chunked_yarn": sized(
        "As Qwen2.5-VL for long texts: YaRN with three axes.",
        128,
        32768,
        131072,
        "vllm-project/vllm#25384",
        model_type="qwen2_5_vl_text",
        rope_theta=1e6,
        rope_scaling={**QWEN_YARN, "type": "yarn", "mrope_section": [16, 24, 24]},
    ),
    "mrope_interleaved_partial_yarn": qwen_3_5(
        "As Qwen3.5 for long texts: YaRN on a quarter of the head, with three axes.",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144},
        1048576,
    ),
}
AXES["text_config_mrope_yarn"] = Case(
    "As Qwen3.5 for long texts, whole: the text model's fields are in text_config.",
    {
        "model_type": "qwen3_5",
        "text_config": AXES["mrope_interleaved_partial_yarn"].config,
        "vision_config": {
            **{"depth": 1, "hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 512},
            **{"num_position_embeddings": 16, "deepstack_visual_indexes": []},
        },
    },
    traps=(
        *("Blaizzy/mlx-vlm#1478", "jundot/omlx#3347", "jundot/omlx#3594", "ollama/ollama#18262"),
        "ModelTC/LightLLM#1582",
    ),
    texts=AXES["mrope_interleaved_partial_yarn"].texts,
)
for _name, _order in (
    ("mrope_chunked", "The axes come one after another"),
    ("mrope_interleaved", "The axes alternate from pair to pair"),
    ("mrope_interleaved_partial", "The axes alternate in a quarter of the head"),
    ("mrope_chunked_yarn", "The axes come one after another under YaRN"),
):
    AXES[f"{_name}_image"] = Case(
        f"{_order}, and an image has places by height and width: each pair turns with its own axis.",
        AXES[_name].config,
        texts=IMAGES,
    )

PUBLISHED = {
    "llama_3_1_8b": sized(
        "Llama 3.1 8B in the words of Transformers 5: neither llama3 nor theta may be dropped.",
        128,
        8192,
        131072,
        *("unslothai/unsloth#7028", "unslothai/unsloth#6197", "deepspeedai/DeepSpeed#8341"),
        *("deepspeedai/DeepSpeed#8345", "Open-Athena/MarinFold#184", "ml-explore/mlx-lm#953", "lablup/mlxcel#1355"),
        rope_parameters={**LLAMA_3_1, "rope_theta": 5e5},
    ),
    "llama_3_1_8b_older": sized(
        "Llama 3.1 8B as it was published: rope_scaling, and theta at the top.",
        128,
        8192,
        131072,
        "deepspeedai/DeepSpeed#8341",
        rope_scaling=LLAMA_3_1,
        rope_theta=5e5,
    ),
    "llama_3_2_3b": sized(
        "Llama 3.2 3B: the factor is 32.",
        128,
        8192,
        131072,
        rope_parameters={**LLAMA_3_1, "factor": 32.0, "rope_theta": 5e5},
    ),
    "qwen3_8b": sized(
        "Qwen3 8B in the words of Transformers 5: theta is 1000000, and nothing else is there.",
        128,
        32768,
        40960,
        *("InternLM/lmdeploy#4304", "InternLM/lmdeploy#4303", "vllm-project/vllm#42624"),
        model_type="qwen3",
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3_8b_yarn": sized(
        "Qwen3 8B with YaRN as its card advises, in the words of Transformers 5; max_position_embeddings is 40960.",
        128,
        32768,
        40960,
        *("huggingface/transformers#38224", "NovaSky-AI/SkyRL#976", "microsoft/onnxruntime-genai#2311"),
        model_type="qwen3",
        tie_word_embeddings=False,
        rope_parameters={**QWEN_YARN, "rope_theta": 1e6},
    ),
    "lfm2_yarn": sized(
        "LFM2 with YaRN in the words of Transformers 5: a reader that looks at rope_scaling drops it.",
        64,
        32768,
        131072,
        "sgl-project/sglang#26187",
        model_type="lfm2",
        layer_types=["conv", "full_attention"],
        **{"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 128, "block_multiple_of": 8},
        **{"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
        rope_parameters={**QWEN_YARN, "rope_theta": 1e6},
    ),
    "mla_default": sized(
        "As GLM-4.7-Flash: an entry of type default and latent attention; no code for YaRN may take it.",
        64,
        32768,
        202752,
        "ROCm/aiter#4742",
        model_type="deepseek_v3",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
    ),
    "deepseek_v3_yarn": sized(
        "DeepSeek-V3: the rotated part of a head is qk_rope_head_dim, L is 4096, and the mscales cancel out.",
        64,
        4096,
        163840,
        "NVIDIA/Megatron-LM#1418",
        model_type="deepseek_v3",
        rope_theta=10000.0,
        rope_scaling={
            **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}
for _name in ("mla_default", "deepseek_v3_yarn"):
    PUBLISHED[_name].config.update(
        qk_rope_head_dim=64, qk_nope_head_dim=8, v_head_dim=8, q_lora_rank=8, kv_lora_rank=8, first_k_dense_replace=2
    )
    del PUBLISHED[_name].config["head_dim"]
