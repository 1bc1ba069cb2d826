"""The configs of the vectors, each with the one sentence that says what it traps: `tools/vectors.py` writes them.

Sizes are small where nothing depends on them.
"""

from __future__ import annotations

import math

from tools.vector_cases import (
    EQUAL,
    HEAD,
    LISTS,
    LLAMA3,
    LONG,
    MSCALES,
    OPTIONS,
    ORIGINAL,
    SHORT,
    TEMPERATURE,
    TEXTS,
    YARN,
    Case,
    L,
    llama,
    nested,
    older,
)
from tools.vector_configs_of_models import AXES, PUBLISHED

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
