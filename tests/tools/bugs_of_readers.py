"""Bugs that threads of 2025 and 2026 report, as changes of the fields that a program reads from a config."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rope_patch.doctor import read_source, rotations_of

Fields = dict[str, Any]


def entry_of(config: Fields) -> Fields:
    """The entry of a config in which nothing is nested, as its file has it."""
    fields = config.get("text_config", config)
    return fields.get("rope_scaling") or fields.get("rope_parameters") or {}


def reader(change: Callable[[Fields], object]) -> Callable[[Fields, str, list[Any]], tuple[Any, Any]]:
    """The tables of a program that changes the text model's fields, and then reads them rightly."""

    def tables(config: Fields, layer_type: str, positions: list[Any]) -> tuple[Any, Any]:
        change(config.get("text_config", config))
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            rotation = rotations_of(read_source(folder)).rotations[layer_type]
        by_axis = np.atleast_2d(positions)
        turning = by_axis[rotation.axes()] if len(by_axis) > 1 else by_axis
        angles = turning.T * rotation.frequencies(by_axis.max() + 1)
        return rotation.temperature() * np.cos(angles), rotation.temperature() * np.sin(angles)

    return tables


REPORTED = {
    *("unsloth#7028", "deepspeed#8341", "deepspeed#8345", "deepspeed#8373", "sglang#26187", "sglang#14745"),
    *("aiter#4742", "omlx#3347", "omlx#3594", "lmdeploy#4304", "keras-hub#2696", "keras-hub#2981", "skyrl#976"),
    *("transformers#38224", "megatron-lm#1418", "unsloth#3083"),
}
"""Of 2026 and late 2025, in eleven projects."""


def older_words_alone(fields: Fields) -> None:
    """Only rope_scaling, and theta at the top."""
    fields.pop("rope_parameters", None)


def newer_words_alone(fields: Fields) -> None:
    """Only rope_parameters."""
    fields.pop("rope_scaling", None)
    fields.pop("rope_theta", None)


def theta_of_the_class(fields: Fields) -> None:
    """Theta stays what the class has, 10000."""
    fields.pop("rope_theta", None)
    entry_of(fields).pop("rope_theta", None)


def without_scaling(fields: Fields) -> None:
    """The type and its fields go, theta and the shape of a rotation stay."""
    entry = entry_of(fields)
    for name in entry.keys() - {"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}:
        del entry[name]


def linear_instead(fields: Fields) -> None:
    fields["rope_parameters"] = {"rope_type": "linear", "factor": 2.0}


def top_theta_wins(fields: Fields) -> None:
    fields["rope_parameters"]["rope_theta"] = fields.get("rope_theta", 10000.0)


def without_temperature(fields: Fields) -> None:
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        entry_of(fields).pop(name, None)


def factor_of_the_lengths(fields: Fields) -> None:
    entry = entry_of(fields)
    if "original_max_position_embeddings" in entry:
        entry["factor"] = fields["max_position_embeddings"] / entry["original_max_position_embeddings"]


def longest_for_trained(fields: Fields) -> None:
    entry_of(fields)["original_max_position_embeddings"] = fields["max_position_embeddings"]


def logarithm_twice(fields: Fields) -> None:
    entry = entry_of(fields)
    if "attention_factor" in entry:
        entry["attention_factor"] = 0.1 * entry["attention_factor"] * math.log(entry["factor"]) + 1


def ramp_of_keras(fields: Fields) -> None:
    """The ramp ends at d/2 - 1, and its ends are not rounded."""
    entry = entry_of(fields)
    if entry.get("rope_type") == "yarn":
        theta, width, trained = entry["rope_theta"], fields["head_dim"], entry["original_max_position_embeddings"]
        latest = trained / (2 * math.pi) * theta ** (-2 * (width // 2 - 1) / width)  # turns of the pair d/2 - 1
        entry["truncate"], entry["beta_slow"] = False, max(entry.get("beta_slow", 1), latest)


def yarn_for_any_entry(fields: Fields) -> None:
    """Every entry is taken for YaRN, which needs L."""
    if entry_of(fields).get("rope_type") == "default":
        raise KeyError("original_max_position_embeddings")


def unknown_arguments(fields: Fields) -> None:
    """The words of a config as arguments that nobody takes."""
    if entry_of(fields).get("rope_type") == "yarn":
        raise TypeError("rope_scaling")


BUGS = {
    "unslothai/unsloth#7028": linear_instead,
    "unslothai/unsloth#6197": without_scaling,
    "unslothai/unsloth#3083": newer_words_alone,
    "modelscope/ms-swift#6056": newer_words_alone,
    "deepspeedai/DeepSpeed#8341": without_scaling,
    "deepspeedai/DeepSpeed#8345": theta_of_the_class,
    "deepspeedai/DeepSpeed#8373": theta_of_the_class,
    "deepspeedai/DeepSpeed#4480": theta_of_the_class,
    "keras-team/keras-hub#2729": older_words_alone,
    "keras-team/keras-hub#2696": without_scaling,
    "keras-team/keras-hub#2981": ramp_of_keras,
    "THUDM/slime#1720": older_words_alone,
    "sgl-project/sglang#14745": theta_of_the_class,
    "sgl-project/sglang#26187": older_words_alone,
    "sgl-project/SpecForge#265": theta_of_the_class,
    "lyogavin/airllm#369": theta_of_the_class,
    "vllm-project/vllm#42624": top_theta_wins,
    "vllm-project/vllm#48621": without_temperature,
    "vllm-project/vllm#25384": without_scaling,
    "huggingface/transformers#38224": factor_of_the_lengths,
    "Open-Athena/MarinFold#184": older_words_alone,
    "ml-explore/mlx-lm#953": older_words_alone,
    "ml-explore/mlx-lm#1507": without_temperature,
    "lablup/mlxcel#1355": without_scaling,
    "InternLM/lmdeploy#4303": older_words_alone,
    "InternLM/lmdeploy#4304": older_words_alone,
    "Blaizzy/mlx-vlm#1478": without_scaling,
    "jundot/omlx#3347": without_scaling,
    "jundot/omlx#3594": without_scaling,
    "ollama/ollama#18262": without_scaling,
    "ModelTC/LightLLM#1582": without_scaling,
    "NVIDIA/TensorRT-LLM#16379": logarithm_twice,
    "NVIDIA/Megatron-LM#1418": longest_for_trained,
    "NVIDIA-NeMo/Megatron-Bridge#5097": without_scaling,
    "NovaSky-AI/SkyRL#976": unknown_arguments,
    "microsoft/onnxruntime-genai#2311": longest_for_trained,
    "ROCm/aiter#4742": yarn_for_any_entry,
}
"""What each thread reports, as a change of the fields that a program reads."""
