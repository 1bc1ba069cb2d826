"""The configs of the vectors, each with the one sentence that says what it traps: `tools/vectors.py` writes them.

Sizes are small where nothing depends on them. Those of published checkpoints are real in what positions read: the
width of a head, theta, L and the scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

L, HEAD = 64, 32
FAR = (131_071, 1_000_000)
"""The last positions of a text of 128K, and of one of a million tokens."""

SHORT, LONG = [1 + i / 16 for i in range(16)], [1 + i / 2 for i in range(16)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": L}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": L}
EQUAL = {"short_factor": LONG, "long_factor": LONG}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.5}
TEMPERATURE = {"attention_factor": 1.1, "short_mscale": 1.1, "long_mscale": 1.1}
OPTIONS = {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.2}
LLAMA_3_1 = {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}
QWEN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

SIZES: dict[str, Any] = {
    **{"hidden_size": 2 * HEAD, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD},
    **{"num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 8, "rms_norm_eps": 1e-6},
}

Text = tuple[tuple[int, ...], ...]
"""Positions of some tokens of one text, by axis."""


@dataclass(frozen=True)
class Case:
    """One vector before its numbers.

    Attributes:
        says: one sentence, what a reader that fails it does.
        config: as a checkpoint has it.
        layer_type: the layers that it is about; empty if all are alike.
        traps: threads about programs that it would have caught.
        known: what a program that was held to it is known to do otherwise, by its name.
        texts: the texts whose rows it has.
    """

    says: str
    config: dict[str, Any]
    layer_type: str = ""
    traps: tuple[str, ...] = ()
    known: Mapping[str, str] = field(default_factory=dict)
    texts: tuple[Text, ...] = ()


def texts_of(trained: int, longest: int) -> tuple[Text, ...]:
    """A short text, a long one, and one of a million tokens; the first two tokens have the positions 0 and 1."""
    return (
        ((0, 1, trained - 1),),
        ((0, 1, trained - 1, trained, longest - 1),),
        ((0, 1, *FAR),),
    )


TEXTS = texts_of(L, 4 * L)
IMAGES: tuple[Text, ...] = (
    # two words, a video of two frames with places by height and width, a word
    ((0, 1, 2, 2, 2, 3, 5), (0, 1, 2, 2, 3, 3, 5), (0, 1, 2, 4, 3, 2, 5)),
    ((0, 1, FAR[0], FAR[1]), (0, 1, FAR[0] + 9, FAR[1] - 10), (0, 1, FAR[0] + 6, FAR[1] - 17)),
)


def llama(says: str, entry: dict[str, Any], *traps: str, longest: int | None = None, **config: Any) -> Case:
    """A Llama with the words of Transformers 5; other keys of its config are `config`, and None takes one away."""
    entry = {"rope_type": "default", "rope_theta": 10000.0, **entry}
    if longest is None:
        longest = L if entry["rope_type"] in ("default", "dynamic") else 4 * L
    fields = {"model_type": "llama", **SIZES, "max_position_embeddings": longest, "rope_parameters": entry} | config
    return Case(says, {key: value for key, value in fields.items() if value is not None}, traps=traps, texts=TEXTS)


def older(says: str, entry: dict[str, Any], *traps: str, theta: float | None = 5e5, **config: Any) -> Case:
    """A Llama with the words of Transformers before 5: `rope_scaling`, and theta at the top."""
    fields = {"rope_scaling": entry, "rope_theta": theta, "rope_parameters": None, "max_position_embeddings": 4 * L}
    return llama(says, {}, *traps, **(fields | config))


def sized(
    says: str, head: int, trained: int, longest: int, *traps: str, model_type: str = "llama", **config: Any
) -> Case:
    """A model with the head, L and limit of a published checkpoint."""
    sizes = SIZES | {"hidden_size": 2 * head, "head_dim": head, "max_position_embeddings": longest}
    return Case(says, {"model_type": model_type, **sizes, **config}, traps=traps, texts=texts_of(trained, longest))


def nested(says: str, kind: str, full: dict[str, Any], *traps: str, known: str = "", **config: Any) -> Case:
    """A Gemma 3 whose full attention has parameters of its own."""
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    parameters = {"full_attention": {"rope_type": "default", "rope_theta": 1e6, **full}, "sliding_attention": sliding}
    fields = {"model_type": "gemma3_text", **SIZES, "max_position_embeddings": 4 * L, "rope_parameters": parameters}
    fields |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], **config}
    fields = {key: value for key, value in fields.items() if value is not None}
    return Case(says, fields, kind, traps, {"Transformers": known} if known else {}, TEXTS)


PLAIN = {
    "default": llama("Plain RoPE: a reader that fails this one fails all.", {}),
    "theta_500000": llama(
        "Theta stands beside the scaling alone: a reader that looks at the top of the config takes 10000.",
        {"rope_theta": 5e5},
        *("unslothai/unsloth#7028", "deepspeedai/DeepSpeed#8373", "keras-team/keras-hub#2729", "THUDM/slime#1720"),
    ),
    "theta_integer": llama("Theta is an integer.", {"rope_theta": 1000000}),
    "theta_at_top": older(
        "Theta stands at the top, and rope_scaling is null, as files from before Transformers 5 have it.",
        {},
        *("sgl-project/sglang#14745", "sgl-project/SpecForge#265", "lyogavin/airllm#369", "deepspeedai/DeepSpeed#4480"),
        theta=1e6,
        rope_scaling=None,
        max_position_embeddings=L,
    ),
    "theta_in_two_places": llama(
        "Theta beside the scaling counts, not the smaller one at the top.",
        {"rope_theta": 5e5},
        "vllm-project/vllm#42624",
        rope_theta=10000.0,
    ),
    "theta_in_two_places_larger_at_top": llama(
        "Theta beside the scaling counts, not the larger one at the top.", {"rope_theta": 10000.0}, rope_theta=5e5
    ),
    "theta_missing": older("Nothing names theta: it is 10000.", {}, theta=None, rope_scaling=None),
    "theta_missing_beside_linear": older(
        "The scaling is there and theta is not: it is 10000.", {"rope_type": "linear", "factor": 4.0}, theta=None
    ),
    "theta_missing_of_an_architecture": older(
        "Nothing names theta, and the default of this architecture is not 10000 but 1000000.",
        {"type": "mrope", "mrope_section": [4, 6, 6]},
        theta=None,
        model_type="qwen2_vl_text",
    ),
    "linear": llama("Positions are divided by the factor.", {"rope_type": "linear", "factor": 4.0}),
    "linear_integer_factor": llama("The factor is an integer.", {"rope_type": "linear", "factor": 4}),
    "dynamic": llama(
        "The base follows the length of the text, from max_position_embeddings on.",
        {"rope_type": "dynamic", "factor": 2.0},
    ),
    "dynamic_factor_1": llama(
        "With the factor 1 the base still grows with the text.", {"rope_type": "dynamic", "factor": 1.0}
    ),
}

YARNS = {
    "yarn": llama(
        "YaRN as most write it: the ends of the ramp are rounded, and cos and sin have the factor 0.1 ln k + 1.",
        YARN,
        "keras-team/keras-hub#2981",
    ),
    "yarn_integer_factor": llama("The factor is an integer.", YARN | {"factor": 4}),
    "yarn_factor_1": llama(
        "With the factor 1 nothing changes, and the factor on cos and sin is 1.", YARN | {"factor": 1.0}
    ),
    "yarn_factor_null": llama(
        "The factor is null: max_position_embeddings / L takes its place.", YARN | {"factor": None}
    ),
    "yarn_factor_not_the_ratio": llama(
        "The factor is 4 though max_position_embeddings / L is 1.25: the factor that is written counts.",
        YARN,
        "huggingface/transformers#38224",
        longest=80,
    ),
    "yarn_attention_factor": llama(
        "attention_factor is 1.0: cos and sin have no factor.",
        YARN | {"attention_factor": 1.0},
        *("vllm-project/vllm#48621", "ml-explore/mlx-lm#1507"),
    ),
    "yarn_attention_factor_above": llama("attention_factor is 1.3.", YARN | {"attention_factor": 1.3}),
    "yarn_attention_factor_written_out": llama(
        "attention_factor is what 0.1 ln k + 1 gives: a reader that takes it for mscale applies the logarithm twice.",
        YARN | {"factor": 64.0, "attention_factor": 0.1 * math.log(64) + 1},
        "NVIDIA/TensorRT-LLM#16379",
        longest=64 * L,
    ),
    "yarn_attention_factor_and_mscale": llama(
        "attention_factor counts where mscale and mscale_all_dim are there, too.",
        YARN | MSCALES | {"attention_factor": 1.2},
    ),
    "yarn_mscale": llama(
        "The factor on cos and sin is the quotient of the two mscales.", YARN | MSCALES, "vllm-project/vllm#48621"
    ),
    "yarn_mscale_equal": llama(
        "Equal mscales: cos and sin have no factor.", YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "yarn_mscale_alone": llama("One mscale alone does not count.", YARN | {"mscale": 0.7}),
    "yarn_mscale_all_dim_alone": llama("mscale_all_dim alone does not count.", YARN | {"mscale_all_dim": 0.7}),
    "yarn_mscale_zero": llama("An mscale of 0 counts as not given.", YARN | {"mscale": 0.0, "mscale_all_dim": 0.7}),
    "yarn_truncate_false": llama("The ends of the ramp are not rounded.", YARN | {"truncate": False}),
    "yarn_truncate_false_mscale": llama(
        "The ends of the ramp are not rounded, and the mscales count.", YARN | MSCALES | {"truncate": False}
    ),
    "yarn_betas": llama("Both ends of the ramp are moved.", YARN | {"beta_fast": 8.0, "beta_slow": 0.5}),
    "yarn_betas_integers": llama("The ends of the ramp are integers.", YARN | {"beta_fast": 8, "beta_slow": 2}),
    "yarn_beta_fast_alone": llama("The fast end of the ramp is moved.", YARN | {"beta_fast": 4.0}),
    "yarn_beta_slow_alone": llama("The slow end of the ramp is moved.", YARN | {"beta_slow": 0.25}),
    "yarn_betas_truncate_false": llama(
        "Both ends of the ramp are moved, and not rounded.",
        YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
    ),
    "yarn_all_options": llama("Both ends moved and not rounded, and a factor on cos and sin.", YARN | OPTIONS),
    "yarn_original_missing": llama(
        "L is missing: it is max_position_embeddings.", {"rope_type": "yarn", "factor": 4.0}
    ),
    "yarn_original_at_top": llama(
        "L stands at the top of the config.", {"rope_type": "yarn", "factor": 4.0}, original_max_position_embeddings=L
    ),
    "yarn_original_in_two_places": llama(
        "L stands in two places: the one at the top counts.",
        YARN | {"original_max_position_embeddings": L // 2},
        original_max_position_embeddings=L,
    ),
    "yarn_theta_500000": llama("Theta beside YaRN counts in its ramp, too.", YARN | {"rope_theta": 5e5}),
    "yarn_ramp_beyond_the_last_pair": llama(
        "L is so long that the slow end of the ramp lies beyond the last pair; it is cut at d - 1, not at d/2 - 1.",
        YARN | {"original_max_position_embeddings": 2**17},
        "keras-team/keras-hub#2981",
        longest=2**19,
    ),
}

LLAMA3S = {
    "llama3": llama("The ramp of Llama 3.1.", LLAMA3 | ORIGINAL),
    "llama3_original_missing": llama("L is missing: it is max_position_embeddings.", LLAMA3),
    "llama3_original_at_top": llama("L stands at the top of the config.", LLAMA3, original_max_position_embeddings=L),
    "llama3_bounds": llama(
        "Both ends of the ramp are moved.", LLAMA3 | ORIGINAL | {"low_freq_factor": 0.5, "high_freq_factor": 2.0}
    ),
}

LONGROPES = {
    "longrope": llama("Two lists of factors: the long one serves texts beyond L alone.", LISTS | ORIGINAL),
    "longrope_rows": Case(
        "A short and a long text in one batch: each has the list of its own length.",
        llama("", LISTS | ORIGINAL).config,
        known={"Transformers, one batch": "gives the short row the long list; alone it has the short one"},
        texts=(((0, 1, L - 2, L - 1),), ((0, 1, L - 1, L),)),
    ),
    "longrope_attention_factor": llama("attention_factor is written.", LISTS | ORIGINAL | {"attention_factor": 1.25}),
    "longrope_factor_missing": llama(
        "The factor is missing: max_position_embeddings / L takes its place.",
        {name: value for name, value in LISTS.items() if name != "factor"} | ORIGINAL,
    ),
    "longrope_equal_lists": llama("Two equal lists: any frequencies, whatever the length.", LISTS | ORIGINAL | EQUAL),
    "longrope_equal_lists_temperature": llama(
        "Two equal lists and a factor on cos and sin, under each name that programs read.",
        LISTS | ORIGINAL | EQUAL | TEMPERATURE,
    ),
    "longrope_original_at_top": llama("L stands at the top of the config.", LISTS, original_max_position_embeddings=L),
    **{
        f"longrope_older_{name}": Case(
            says,
            older(
                "",
                {"type": name, "short_factor": SHORT, "long_factor": LONG},
                theta=10000.0,
                model_type="phi3",
                original_max_position_embeddings=L,
                pad_token_id=0,
            ).config,
            known={"Transformers": known} if known else {},
            texts=TEXTS,
        )
        for name, says, known in (
            ("longrope", "As Phi-3 was published: rope_scaling, L at the top, no factor.", ""),
            (
                "su",
                "As the first files of Phi-3 have it: longrope is called su.",
                "5.17 to 5.23 refuse the type su: they do not find L for it",
            ),
        )
    },
}

PARTS = {
    "proportional": llama(
        "A quarter of the pairs turn, with the frequencies of the whole head.",
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    ),
    "proportional_factor": llama(
        "Half of the pairs turn, and more slowly by the factor.",
        {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 4.0},
    ),
    **{
        f"partial_{name}": llama(
            f"Half of a head is rotated, under {entry.get('rope_type', 'default')}: frequencies spread over that half.",
            entry | {"partial_rotary_factor": 0.5},
            model_type="phi",
        )
        for name, entry in {
            "default": {},
            "linear": {"rope_type": "linear", "factor": 4.0},
            "dynamic": {"rope_type": "dynamic", "factor": 2.0},
            "yarn": YARN,
            "llama3": LLAMA3 | ORIGINAL,
            "longrope": LISTS | ORIGINAL | {"short_factor": SHORT[:8], "long_factor": LONG[:8]},
        }.items()
    },
    "partial_at_top": older(
        "partial_rotary_factor stands at the top, as files from before Transformers 5 have it.",
        {"type": "linear", "factor": 4.0},
        model_type="phi",
        partial_rotary_factor=0.5,
    ),
    "partial_rotary_pct": older(
        "The share is called rotary_pct and theta rotary_emb_base, as GPT-NeoX has them.",
        {},
        theta=None,
        model_type="gpt_neox",
        rope_scaling=None,
        rotary_pct=0.25,
        rotary_emb_base=25000,
        layer_norm_eps=1e-5,
        use_parallel_residual=True,
    ),
}

NESTED = {
    **{
        f"nested_{name}_{kind}": nested(says.format(entry["rope_type"]), f"{kind}_attention", entry)
        for name, entry in {
            "linear": {"rope_type": "linear", "factor": 4.0},
            "yarn": YARN,
            "llama3": LLAMA3 | ORIGINAL,
            "longrope": LISTS | ORIGINAL,
            "longrope_equal_lists": LISTS | ORIGINAL | EQUAL,
        }.items()
        for kind, says in (
            ("full", "Parameters by layer type: full attention has {} and a theta of its own."),
            ("sliding", "Parameters by layer type: sliding attention stays plain beside {}."),
        )
    },
    "nested_yarn_truncate_false_full": nested(
        "truncate stands by layer type.",
        "full_attention",
        YARN | {"truncate": False},
        known="5.17 to 5.23 round the ends of the ramp: they look for truncate beside the layer types",
    ),
    **{
        f"nested_proportional_{kind}": nested(
            says,
            f"{kind}_attention",
            {"rope_type": "proportional", "partial_rotary_factor": 0.25},
            model_type="gemma4_text",
            global_head_dim=2 * HEAD,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=8,
        )
        for kind, says in (
            ("full", "As Gemma 4: full attention is proportional, with heads of another width."),
            ("sliding", "As Gemma 4: sliding attention is plain, with heads of another width."),
        )
    },
    **{
        f"gemma3_older_{kind}": nested(
            says,
            f"{kind}_attention",
            {},
            rope_parameters=None,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
            rope_theta=1e6,
            rope_local_base_freq=10000.0,
        )
        for kind, says in (
            ("full", "As Gemma 3 was published: rope_scaling and rope_theta are for full attention."),
            ("sliding", "As Gemma 3 was published: sliding attention is plain, with rope_local_base_freq."),
        )
    },
    **{
        f"modernbert_older_{kind}": nested(
            says,
            f"{kind}_attention",
            {},
            model_type="modernbert",
            rope_parameters=None,
            global_rope_theta=160000.0,
            local_rope_theta=10000.0,
            pad_token_id=0,
        )
        for kind, says in (
            ("full", "As ModernBERT was published: global_rope_theta is for full attention."),
            ("sliding", "As ModernBERT was published: local_rope_theta is for sliding attention."),
        )
    },
}

FORMS = {
    **{
        f"rope_scaling_{entry['rope_type']}": older(
            f"The words of Transformers before 5, with type and rope_type: {entry['rope_type']} in rope_scaling.",
            {"type": entry["rope_type"], **entry},
            *traps,
        )
        for entry, traps in (
            ({"rope_type": "linear", "factor": 4.0}, ("NVIDIA-NeMo/Megatron-Bridge#5097",)),
            (YARN, ("unslothai/unsloth#3083", "keras-team/keras-hub#2696", "modelscope/ms-swift#6056")),
            (LLAMA3 | ORIGINAL, ()),
            (LISTS | ORIGINAL, ()),
        )
    },
    "rope_scaling_type_alone": older(
        "The scaling is named by type alone.",
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": L},
    ),
    "rope_scaling_rope_type_alone": older("The scaling is named by rope_type alone, in rope_scaling.", YARN),
    "rope_scaling_beside_rope_parameters": llama(
        "Both words are there and differ: rope_scaling counts, and theta at the top.",
        {"rope_theta": 5e5},
        longest=4 * L,
        rope_scaling=YARN,
        rope_theta=5e5,
    ),
    "rope_scaling_as_rope_parameters": llama(
        "Both words are there and agree, as a file for old and new readers has them.",
        YARN | {"rope_theta": 5e5},
        rope_scaling={"type": "yarn", **YARN, "rope_theta": 5e5},
        rope_theta=5e5,
    ),
    "rope_scaling_null": llama("rope_scaling is null beside rope_parameters.", YARN),
    "text_config_llama3": Case(
        "The text model's fields are in text_config; those beside it are not its own.",
        {
            "model_type": "llava",
            "rope_theta": 10000.0,
            "max_position_embeddings": 16,
            "image_token_id": 7,
            "text_config": llama("", LLAMA3 | ORIGINAL | {"rope_theta": 5e5}).config,
            "vision_config": {
                "model_type": "clip_vision_model",
                **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
                **{"image_size": 8, "patch_size": 4, "projection_dim": 8},
            },
        },
        texts=TEXTS,
    ),
}
FORMS["rope_scaling_null"].config["rope_scaling"] = None

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

CASES: dict[str, Case] = {
    **PLAIN,
    **YARNS,
    **LLAMA3S,
    **LONGROPES,
    **PARTS,
    **NESTED,
    **FORMS,
    **AXES,
    **PUBLISHED,
}
"""Every vector by its name, which is the name of its file."""
