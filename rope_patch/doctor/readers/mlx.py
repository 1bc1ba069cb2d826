"""mlx-lm and mlx-vlm: the raw config, through one function for all scalings, and a class for each model."""

from __future__ import annotations

from dataclasses import replace

from ..entries import ORIGINAL, Spelling
from ..reader import Deviation, Layer, Reader
from ..rotation import Rotation
from .cases import (
    BOTH_SPELLINGS,
    EXPORT_BASE,
    EXPORT_LISTS,
    L_IN_ENTRY,
    OLD,
    all_of,
    any_of,
    has_axes,
    is_type,
    is_yarn,
    lacks,
    list_temperature_from,
    long_for_all,
    model_in,
    named,
    new_words_alone,
    null_factor,
    plain,
    ratio,
    refuse,
    taken_as,
    theta_at_top,
    to,
    two_lists,
    unless,
    yarn_temperature,
)

_LM = "mlx-lm 0.32.2 mlx_lm/models"
_LM_ROPE = f"{_LM}/rope_utils.py"
_VLM = "mlx-vlm 0.7.10 mlx_vlm/models/rope_utils.py"
_LISTS = EXPORT_LISTS.replace("{key}", "mlx")

_ENTRY = Spelling(top_theta_first=True, type_first=True, original=("entry",))
_OLD_MLX = replace(OLD, type_first=True, inner_partial=True)

_phi3 = model_in("phi3")
_gemma3 = model_in("gemma3", "gemma3_text")
_reads_new_words = model_in(
    *("exaone_moe", "gemma4_text", "glm_moe_dsa", "granitemoehybrid", "laguna", "lfm2", "lfm2_moe", "mellum"),
    *("minimax_m3_vl", "ministral3", "mistral4", "olmo_hybrid", "qwen3", "qwen3_5", "qwen3_5_text"),
)


def _default_l(lengths: dict[str, int]) -> tuple[Deviation, ...]:
    """The L that both programs assume if the entry has none."""
    words = " and ".join(f"{length} for {name}" for name, length in lengths.items())
    return tuple(
        Deviation(
            f"takes L = {words} if it is not in the entry",
            all_of(is_type(name), lacks(ORIGINAL)),
            to(original=length),
            f"{_LM_ROPE}; {_VLM}",
            L_IN_ENTRY,
        )
        for name, length in lengths.items()
    )


def _gemma3_full(layer: Layer) -> Rotation:
    """Read Gemma 3's layers with full attention: theta from the top, and no parameters by layer type."""
    scaling = layer.source.fields.get("rope_scaling") or {}
    own = isinstance(scaling, dict) and "full_attention" not in scaling and bool(scaling)
    return replace(layer.rotation if own else plain(layer), theta=theta_at_top(layer, "rope_theta", 1e6))


def _gemma3_sliding(layer: Layer) -> Rotation:
    return replace(plain(layer), theta=theta_at_top(layer, "rope_local_base_freq", 1e4))


def _other_pattern(layer: Layer) -> bool:
    """Whether the layers with full attention are not every sixth layer."""
    kinds, pattern = layer.source.fields.get("layer_types"), layer.source.fields.get("sliding_window_pattern")
    pattern = pattern if isinstance(pattern, int) and pattern else 6
    return isinstance(kinds, list) and any(
        kind == "full_attention" and (index + 1) % pattern for index, kind in enumerate(kinds)
    )


MLX = Reader(
    "mlx-lm",
    "mlx",
    "0.32.2",
    "run",
    f"{_LM_ROPE} initialize_rope",
    "config.json itself, with type before rope_type. Most classes, such as Llama's, take only rope_scaling and "
    "rope_theta at the top; 17 of them, such as Qwen3's, take rope_parameters if those are missing",
    spelling=_ENTRY,
    by_layer=("gemma3*",),
    deviations=(
        Deviation(
            "fails in its class for Qwen3 without rope_theta at the top (TypeError)",
            all_of(model_in("qwen3"), new_words_alone, lambda layer: "rope_theta" not in layer.source.fields),
            refuse,
            "ml-explore/mlx-lm#1563",
            BOTH_SPELLINGS,
            ended="ml-explore/mlx-lm#1898, September 2026",
            silent=False,
        ),
        Deviation(
            "reads only rope_scaling and rope_theta at the top, as most of its model classes do",
            unless(any_of(_reads_new_words, _gemma3)),
            taken_as(_OLD_MLX),
            f"{_LM}/llama.py ModelArgs; ml-explore/mlx-lm#953",
            BOTH_SPELLINGS,
        ),
        Deviation(
            "reads no parameters by layer type in its class for Gemma 3",
            _gemma3,
            _gemma3_full,
            f"{_LM}/gemma3_text.py",
            "write rope_theta, rope_local_base_freq and rope_scaling at the top",
            layers=("full_attention",),
        ),
        Deviation(
            "takes every sixth layer of Gemma 3 for full attention, whatever layer_types says",
            all_of(_gemma3, _other_pattern),
            _gemma3_sliding,
            f"{_LM}/gemma3_text.py",
            layers=("full_attention",),
        ),
        Deviation(
            "takes theta of sliding layers from rope_local_base_freq at the top",
            _gemma3,
            _gemma3_sliding,
            f"{_LM}/gemma3_text.py",
            "write rope_local_base_freq at the top",
            layers=("sliding_attention",),
        ),
        Deviation("has no class for ModernBERT (ValueError)", model_in("modernbert*"), refuse, f"{_LM}", silent=False),
        Deviation(
            "reads L at the top of the config in its class for Phi-3",
            _phi3,
            taken_as(replace(_OLD_MLX, original=("top", "entry"))),
            f"{_LM}/phi3.py",
        ),
        Deviation("reads no scaling in its class for LFM2", model_in("lfm2"), plain, f"{_LM}/lfm2.py"),
        Deviation(
            "fails at yarn whose factor is null (TypeError)",
            null_factor,
            refuse,
            f"{_LM_ROPE} YarnRoPE",
            "write the factor, max_position_embeddings / L",
            silent=False,
        ),
        Deviation(
            "gives every token a single position, so positions in images are lost",
            has_axes,
            to(sections=()),
            f"{_LM}/qwen2_vl.py",
            "mlx-vlm serves models of images",
            partly=True,
        ),
        Deviation("reads no scaling in its class for Phi", model_in("phi"), plain, f"{_LM}/phi.py"),
        Deviation(
            "fails, because it does not know this type (ValueError)",
            all_of(named("su"), unless(_phi3)),
            refuse,
            _LM_ROPE,
            'write "longrope"',
            silent=False,
        ),
        *_default_l({"yarn": 4096, "llama3": 8192}),
        Deviation(
            f"fails, because {ORIGINAL} is not in the entry (KeyError)",
            all_of(is_type("longrope"), lacks(ORIGINAL), unless(_phi3)),
            refuse,
            _LM_ROPE,
            L_IN_ENTRY,
            silent=False,
        ),
        Deviation(
            "ignores attention_factor and computes 0.1 ln k + 1",
            yarn_temperature,
            to(attention_factor=None),
            f"{_LM_ROPE} YarnRoPE; ml-explore/mlx-lm#1507",
            _LISTS,
        ),
        Deviation(
            "uses mscale and mscale_all_dim even if one is missing, and takes 1 for a missing mscale and 0 for a "
            "missing mscale_all_dim",
            is_type("yarn"),
            ratio(1.0, 0.0),
            f"{_LM_ROPE} YarnRoPE",
            "write both, or none",
        ),
        Deviation("rounds the ends of the ramp", is_yarn(truncate=False), to(truncate=True), _LM_ROPE, _LISTS),
        Deviation("uses the long factors for short texts, too", two_lists, long_for_all, _LM_ROPE, partly=True),
        Deviation(
            "computes the temperature sqrt(1 + ln k / ln L), k = max_position_embeddings / L, without "
            "attention_factor, factor, short_mscale and long_mscale",
            is_type("longrope"),
            list_temperature_from(),
            f"{_LM_ROPE} SuScaledRoPE",
            _LISTS,
        ),
        Deviation(
            "grows the base beyond max_position_embeddings with the length of the text so far; cached keys keep their "
            "old base",
            is_type("dynamic"),
            plain,
            f"{_LM_ROPE} DynamicNTKScalingRoPE",
            EXPORT_BASE,
        ),
    ),
    unknown="Which release first has ml-explore/mlx-lm#1898; 0.32.2 has it. What the classes with rope_parameters "
    "other than Qwen3's do if both spellings differ.",
)

MLX_VLM = Reader(
    "mlx-vlm",
    "mlx-vlm",
    "0.7.10",
    "run",
    f"{_VLM} initialize_rope, MRoPERotaryEmbedding",
    "config.json itself, with type before rope_type; which of the two spellings depends on the model's class",
    spelling=Spelling(type_first=True, original=("entry",)),
    deviations=(
        Deviation(
            "drops the scaling in its classes for Llama 3.2 Vision, Gemma 3 and eight others",
            model_in("mllama*", "gemma3*"),
            plain,
            "Blaizzy/mlx-vlm#1927 (issues 1709 and 1710)",
            ended="Blaizzy/mlx-vlm#1927, opened in August 2026",
        ),
        Deviation(
            "drops the type if there is an mrope_section (Qwen2-VL to Qwen3.5, GLM), and keeps the plain frequencies",
            all_of(is_type("yarn", "linear", "llama3"), lambda layer: bool(layer.rotation.sections)),
            plain,
            f"{_VLM} MRoPERotaryEmbedding; Blaizzy/mlx-vlm#1478",
        ),
        Deviation(
            "fails, because it does not know this type (ValueError)",
            any_of(is_type("dynamic"), named("su")),
            refuse,
            _VLM,
            EXPORT_BASE,
            silent=False,
        ),
        *_default_l({"yarn": 4096, "llama3": 8192}),
        Deviation(
            "ignores attention_factor and computes 0.1 ln k + 1",
            yarn_temperature,
            to(attention_factor=None),
            f"{_VLM} YarnRoPE",
            EXPORT_LISTS.replace("{key}", "mlx-vlm"),
        ),
        Deviation(
            "uses mscale and mscale_all_dim even if one is missing, and takes 1 for a missing mscale and 0 for a "
            "missing mscale_all_dim",
            is_type("yarn"),
            ratio(1.0, 0.0),
            f"{_VLM} YarnRoPE",
            "write both, or none",
        ),
        Deviation(
            "rounds the ends of the ramp",
            is_yarn(truncate=False),
            to(truncate=True),
            f"{_VLM} YarnRoPE",
            EXPORT_LISTS.replace("{key}", "mlx-vlm"),
        ),
        Deviation(
            "reads short_mscale and long_mscale, not attention_factor; without them it computes "
            "sqrt(1 + ln k / ln L), k = max_position_embeddings / L",
            is_type("longrope"),
            list_temperature_from("long_mscale"),
            f"{_VLM} SuScaledRoPE",
            "write short_mscale and long_mscale with the value of attention_factor",
        ),
    ),
    unknown="Which of its classes still build plain positions after #1927 (lablup/mlxcel#1385 names five), and which "
    "spelling each class takes.",
)
