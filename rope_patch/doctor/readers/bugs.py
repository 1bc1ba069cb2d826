"""Bugs in the reading of positions: of programs without a row in the table, and bugs of the other programs that depend
on more than a config.

Each was reported in a thread; versions are given if the thread names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bug:
    """One bug.

    Attributes:
        program: the program that misread a config.
        thread: repository and number.
        misread: the behaviour, as the end of a sentence that begins with "it".
        versions: the versions with the bug, as far as the thread names them.
        config: the fields that show the bug, with numbers as examples.
        vector: the file of `vectors/` that a reader with this bug fails; empty if no file shows it.
    """

    program: str
    thread: str
    misread: str
    versions: str
    config: Mapping[str, Any]
    vector: str = ""


_THETA: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN35: dict[str, Any] = {
    "text_config": {
        "rope_parameters": {
            **_YARN,
            "original_max_position_embeddings": 262144,
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        }
    }
}
_NO_WORDS = "drops the type and the factor of yarn beside mrope_section"

BUGS: tuple[Bug, ...] = (
    Bug("oMLX", "jundot/omlx#3347", f"{_NO_WORDS}, through mlx-vlm", "open on 1 September 2026", _QWEN35, "yarn"),
    Bug("oMLX", "jundot/omlx#3594", f"{_NO_WORDS}, in another class", "open on 12 September 2026", _QWEN35, "yarn"),
    Bug("Ollama, its MLX runner", "ollama/ollama#18262", _NO_WORDS, "0.33.3", _QWEN35, "yarn"),
    Bug(
        "Ollama, its import of a folder",
        "ollama/ollama convert/convert_llama.go@017eb8a",
        "keeps linear and llama3 for Llama's architecture and drops yarn; convert the folder with llama.cpp instead",
        "017eb8a",
        {"rope_parameters": _YARN},
        "yarn",
    ),
    Bug(
        "LightLLM",
        "ModelTC/LightLLM#1582",
        "takes yarn beside mrope_section for a linear factor",
        "until 18 September 2026",
        _QWEN35,
        "yarn",
    ),
    Bug(
        "ROCm aiter, in SGLang",
        "ROCm/aiter#4742",
        "takes any entry for deepseek_yarn and fails without L",
        "until 14 August 2026",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}},
        "default",
    ),
    Bug(
        "KerasHub",
        "keras-team/keras-hub#2981",
        "does not round the ends of yarn's ramp, and cuts its upper end at d/2 - 1",
        "until 24 August 2026",
        {"rope_parameters": {**_YARN, "original_max_position_embeddings": 4096}},
        "yarn",
    ),
    Bug(
        "KerasHub",
        "keras-team/keras-hub#2696",
        "has no yarn in its Mistral",
        "versions not established",
        {"rope_scaling": _YARN},
        "yarn",
    ),
    Bug(
        "KerasHub",
        "keras-team/keras-hub#2729",
        "fails at a config of Transformers 5 (KeyError: rope_theta)",
        "versions not established",
        _THETA,
        "theta_500000",
    ),
    Bug(
        "SkyRL",
        "NovaSky-AI/SkyRL#976",
        "passes rope_scaling and rope_theta as arguments that vLLM and from_pretrained do not have (TypeError)",
        "open on 27 January 2026",
        {"rope_scaling": _YARN, "rope_theta": 1e6},
        "yarn",
    ),
    Bug(
        "slime",
        "THUDM/slime#1720",
        "compares theta as Transformers 4 spells it, which is then 10000, with the checkpoint's theta",
        "versions not established",
        _THETA,
        "theta_500000",
    ),
    Bug(
        "AirLLM, its MLX path",
        "lyogavin/airllm#369",
        "drops theta",
        "open on 17 September 2026",
        {"rope_theta": 5e5},
        "theta_500000",
    ),
    Bug(
        "candle",
        "huggingface/candle#3746",
        "always uses the same theta for Yi",
        "versions not established",
        {"rope_theta": 5e6},
        "theta_500000",
    ),
    Bug(
        "SpecForge",
        "sgl-project/SpecForge#265",
        "trains drafts with theta = 10000",
        "open since October 2025",
        {"rope_theta": 1e6},
        "theta_500000",
    ),
    Bug(
        "mini-SGLang",
        "sgl-project/mini-sglang#13",
        "reads only the fields of Transformers 4",
        "18 December 2025",
        _THETA,
        "theta_500000",
    ),
    Bug(
        "mlxcel",
        "lablup/mlxcel#1355",
        "drops llama3",
        "versions not established",
        {"rope_parameters": _LLAMA3},
        "llama3",
    ),
    Bug(
        "mlxcel",
        "lablup/mlxcel#1358",
        "uses the long factors for all texts, without short_mscale and long_mscale",
        "until August 2026",
        {"rope_scaling": {"rope_type": "longrope"}},
        "longrope",
    ),
    Bug(
        "lalamo and uzu",
        "trymirai/uzu#604",
        "uses one list for all texts, by the exported length",
        "by design, July 2026",
        {"rope_scaling": {"rope_type": "longrope"}},
        "longrope",
    ),
    Bug(
        "Soup",
        "MakazhanAlpamys/Soup#793",
        "writes config.rope_scaling after the model is built, where it has no effect on Transformers 5",
        "until September 2026",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "linear",
    ),
    Bug(
        "TokenSpeed",
        "lightseekorg/tokenspeed#485",
        "reads only text_config.rope_scaling for the context length",
        "19 June 2026",
        _QWEN35,
        "yarn",
    ),
    Bug(
        "MaxText",
        "AI-Hypercomputer/maxtext#4616",
        "rotates the whole head of Qwen3.5, whatever partial_rotary_factor is",
        "open on 26 July 2026",
        _QWEN35,
        "partial_default",
    ),
    Bug(
        "NeMo Automodel",
        "NVIDIA-NeMo/Automodel#2652",
        "fails at yarn without L (KeyError)",
        "until its merge, opened on 20 June 2026",
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "yarn_original_missing",
    ),
    Bug(
        "ROLL, its Megatron adapter",
        "alibaba/ROLL#473",
        "reads theta and partial_rotary_factor at the top, and mrope_section in rope_scaling",
        "until its merge, opened on 14 July 2026",
        _QWEN35,
        "partial_default",
    ),
    Bug(
        "LongLoRA",
        "JIA-Lab-research/LongLoRA#181",
        "trains under linear and does not write it into the published config",
        "open since February 2024",
        {},
        "linear",
    ),
    Bug(
        "Llama's reference code",
        "meta-llama/llama-models#241",
        "always uses the factor 8 (also pytorch/executorch#7265)",
        "until December 2024",
        {"rope_parameters": {**_LLAMA3, "factor": 32.0}},
        "llama3",
    ),
    Bug(
        "gemma.cpp",
        "google/gemma.cpp#986",
        "always uses the same theta on its dense path",
        "open on 22 August 2026; no published model differs",
        {"rope_theta": 5e5},
        "theta_500000",
    ),
    Bug(
        "speculators",
        "vllm-project/speculators#649",
        "uses the plain positions of sliding layers for a draft if parameters are nested",
        "since its merge, opened on 24 June 2026",
        {"rope_parameters": {"full_attention": _YARN, "sliding_attention": {"rope_type": "default"}}},
        "nested_yarn_full",
    ),
    Bug(
        "coreai-models",
        "apple/coreai-models#66",
        "pairs dimensions within the rotated part under proportional",
        "open on 27 June 2026",
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
        "proportional",
    ),
    Bug(
        "Atlas",
        "Avarok-Cybersecurity/atlas#276",
        "uses one table for both types of DeepSeek V4's layers",
        "until 6 July 2026",
        {"rope_parameters": {"full_attention": _YARN, "sliding_attention": {"rope_type": "default"}}},
        "nested_yarn_sliding",
    ),
    Bug(
        "vLLM Ascend",
        "vllm-project/vllm-ascend#5201",
        "documents a wrong theta",
        "versions not established",
        _THETA,
        "theta_500000",
    ),
    Bug(
        "vLLM with Transformers 4",
        "vllm-project/vllm#42624",
        "replaces theta of rope_parameters by the 10000 of Transformers 4's class (also #44158)",
        "until 0.24",
        _THETA,
        "theta_500000",
    ),
    Bug(
        "vLLM",
        "vllm-project/vllm#56066",
        "drops theta at the top of BailingMoeV2 if rope_parameters has none",
        "open on 9 September 2026",
        {"model_type": "bailing_moe_v2", "rope_theta": 6e5, "rope_parameters": {"rope_type": "default"}},
        "theta_500000",
    ),
    Bug(
        "vLLM",
        "vllm-project/vllm#52675",
        "computes NaN for dynamic if max_trained_positions is beyond max_model_len",
        "open on 18 August 2026",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 2048}},
        "dynamic",
    ),
    Bug(
        "vLLM",
        "vllm-project/vllm#29111",
        "scales the sliding layers of Gemma 3, too",
        "November 2025, between #28542 and #29111",
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "nested_linear_sliding",
    ),
    Bug(
        "vLLM",
        "vllm-project/vllm#29966",
        "applies partial_rotary_factor twice for Apertus",
        "until #29966, opened in December 2025",
        {"model_type": "apertus", "partial_rotary_factor": 0.5},
        "partial_default",
    ),
    Bug(
        "Transformers 5",
        "huggingface/transformers#47435",
        "does not multiply the scores of DeepSeek V2 and Mistral 4 by g(mscale_all_dim)^2",
        "until its merge, opened on 20 July 2026",
        {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    Bug(
        "Transformers 5, its conversion of Gemma 3",
        "huggingface/transformers#41922",
        "writes rope_parameters in the wrong shape",
        "until 30 October 2025",
        {"model_type": "gemma3_text"},
        "nested_linear_full",
    ),
    Bug(
        "Transformers 5",
        "huggingface/transformers#45945",
        "scales the sliding layers of OLMo 3, too (vllm-project/vllm#43419: vLLM did not)",
        "since 5.0; 5.23 not established",
        {"model_type": "olmo3", "rope_parameters": _YARN},
    ),
    Bug(
        "llama.cpp",
        "ggml-org/llama.cpp#18013",
        "does not read rope_parameters, so theta is 10000 and there is no scaling",
        "until 14 December 2025 (that this was so before is inferred)",
        _THETA,
        "theta_500000",
    ),
    Bug(
        "llama.cpp",
        "ggml-org/llama.cpp#22612",
        "reads apply_scale of a Mistral params.json as if it switched the scale off",
        "until its merge, opened on 2 May 2026",
        {},
    ),
    Bug(
        "llama.cpp",
        "ggml-org/llama.cpp#17945",
        "computes a wrong temperature for Mistral 3",
        "until December 2025",
        {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "yarn_mscale_equal",
    ),
    Bug(
        "Megatron-Core",
        "NVIDIA/Megatron-LM#1418",
        "takes max_position_embeddings for L in latent attention",
        "open since May 2025",
        {
            "max_position_embeddings": 163840,
            "rope_scaling": {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
        },
        "yarn",
    ),
    Bug(
        "Megatron-LM",
        "NVIDIA/Megatron-LM#6305",
        "ignores --rope-scaling-factor and takes 8",
        "until August 2026",
        {"rope_parameters": {**_LLAMA3, "factor": 32.0}},
        "llama3",
    ),
    Bug(
        "Megatron-Bridge",
        "NVIDIA-NeMo/Megatron-Bridge#4195",
        "pairs other dimensions of Gemma 4 under proportional",
        "until its fix, opened on 7 June 2026",
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}},
        "proportional",
    ),
    Bug(
        "TensorRT-LLM",
        "NVIDIA/TensorRT-LLM#16378",
        "rotates twice with rope_fusion=False",
        "until its merge, opened on 14 July 2026",
        {"rope_parameters": _YARN},
        "yarn",
    ),
    Bug(
        "TensorRT-LLM, its quantize.py",
        "NVIDIA/TensorRT-LLM#1676",
        "does not export linear",
        "May 2024",
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        "rope_scaling_linear",
    ),
    Bug(
        "ONNX Runtime GenAI",
        "microsoft/onnxruntime-genai#2076",
        "misreads theta, mscale and yarn's frequencies for Ministral 3",
        "until April 2026",
        {"rope_scaling": {**_YARN, "rope_theta": 1e6}},
        "yarn",
    ),
    Bug(
        "DeepSpeed, its rotary operator",
        "deepspeedai/DeepSpeed#8373",
        "does not read theta",
        "versions not established",
        _THETA,
        "theta_500000",
    ),
    Bug(
        "Unsloth",
        "unslothai/unsloth#7028",
        "replaces llama3 by linear without theta if max_seq_length is beyond max_position_embeddings",
        "until 9 July 2026",
        {"rope_parameters": _LLAMA3, "max_position_embeddings": 131072},
        "llama3",
    ),
    Bug(
        "Unsloth",
        "unslothai/unsloth#3083",
        "does not pass rope_scaling to vLLM with fast_inference",
        "2025.8.1, open",
        {"rope_scaling": _YARN},
        "yarn",
    ),
    Bug(
        "ms-swift, its Megatron path",
        "modelscope/ms-swift#6056",
        "does not receive rope_scaling",
        "until #6056",
        {"rope_scaling": _YARN},
        "yarn",
    ),
)
"""All bugs; programs without a row come first."""
