"""Trainers: they read a config through Transformers, and some rewrite it.

A factor that follows from a requested length depends on the run, so `Reader.writes` describes it in words.
"""

from __future__ import annotations

from dataclasses import replace

from ..entries import Spelling
from ..reader import Deviation, Layer, Reader
from ..rotation import Rotation
from .cases import all_of, is_type, model_in, plain, two_lists

_AS_TRANSFORMERS = "the config as the installed Transformers reads it"
_FAST = model_in("llama", "mistral", "qwen2", "qwen3")
_UNSLOTH = "unsloth 2026.10.9 unsloth/models/llama.py"


def _short_for_all(layer: Layer) -> Rotation:
    return replace(layer.rotation, long_factor=layer.rotation.short_factor)


TRL = Reader(
    "TRL",
    "trl",
    "1.16.0",
    "read",
    "trl 1.16.0, all of its Python: no file names a field of positions",
    _AS_TRANSFORMERS,
    by_layer=("*",),
    writes="nothing: max_length only truncates texts",
)

UNSLOTH = Reader(
    "Unsloth",
    "unsloth",
    "2026.10.9",
    "read",
    f"{_UNSLOTH} FastLlamaModel.from_pretrained, _extended_rope_scaling; unsloth/import_fixes.py",
    f"{_AS_TRANSFORMERS}; rope_theta at the top before that of the entry",
    spelling=Spelling(top_theta_first=True),
    by_layer=("*",),
    writes="where max_seq_length is beyond max_position_embeddings: linear with the factor max_seq_length / "
    "max_position_embeddings and the theta of before in place of the entry, also of a native yarn, longrope or "
    "dynamic; a native llama3 stays. max_position_embeddings becomes max_seq_length. Until 9 July 2026 "
    "(unslothai/unsloth#7028) llama3 was replaced, too, and theta was lost with Transformers 5. It patches "
    "Transformers so that config.rope_scaling = ... keeps theta (unslothai/unsloth#11192)",
    deviations=(
        Deviation(
            "drops llama3 and yarn on its fast path, FastLanguageModel",
            is_type("llama3", "yarn"),
            plain,
            "unslothai/unsloth#6197",
            until="2026.6",
        ),
        Deviation(
            "computes the frequencies only once on its fast path, so dynamic does not grow",
            all_of(_FAST, is_type("dynamic")),
            plain,
            _UNSLOTH,
        ),
        Deviation(
            "computes the frequencies only once on its fast path, so long texts get the short factors",
            all_of(_FAST, two_lists),
            _short_for_all,
            _UNSLOTH,
        ),
    ),
    unknown="Which release of June 2026 has #6197: those of that month are taken to have it. Which models beside "
    "Llama, Mistral, Qwen2 and Qwen3 take the fast path.",
)

AXOLOTL = Reader(
    "axolotl",
    "axolotl",
    "0.21.0",
    "read",
    "axolotl-ai-cloud/axolotl src/axolotl/loaders/utils.py load_model_config; axolotl 0.21.0, searched for "
    "rope_scaling",
    _AS_TRANSFORMERS,
    by_layer=("*",),
    writes="each key of overrides_of_model_config as it is: a rope_scaling there replaces the entry whole, and "
    "max_position_embeddings does not change with it",
    unknown="Whether theta survives a rope_scaling without it on Transformers 5 (inferred: it does not).",
)

LLAMA_FACTORY = Reader(
    "LLaMA-Factory",
    "llamafactory",
    "0.9.5",
    "read",
    "llamafactory 0.9.5 llamafactory/model/model_utils/rope.py configure_rope",
    _AS_TRANSFORMERS,
    by_layer=("*",),
    writes="with the option rope_scaling, where cutoff_len is beyond L: rope_type, the factor cutoff_len / L rounded "
    "up (2 without training), L for dynamic, yarn and llama3, and 1 and 4 for llama3, in place of the whole entry; "
    "max_position_embeddings becomes L times the factor, as a float. L is that of the entry, else "
    "max_position_embeddings. Until 19 May 2025 (hiyouga/LLaMA-Factory#8101) yarn was written without L",
    unknown="Whether theta survives on Transformers 5, where the new entry has none (inferred: it does not).",
)

MS_SWIFT = Reader(
    "ms-swift",
    "ms-swift",
    "4.6.0",
    "read",
    "ms-swift 4.6.0 swift/arguments/base_args/model_args.py _init_rope_scaling, swift/model/register.py",
    _AS_TRANSFORMERS,
    by_layer=("*",),
    writes="with --rope_scaling: type, L and the factor max_model_len / L rounded up, or the JSON that is given, with "
    "theta and partial_rotary_factor of rope_parameters, in place of the entry; max_model_len becomes the maximum. "
    "4.5.3 wrote type without rope_type, at which Transformers 5.12 stopped. Its Megatron path was not given "
    "rope_scaling until modelscope/ms-swift#6056",
)

VERL = Reader(
    "verl",
    "verl",
    "0.9.1",
    "read",
    "verl 0.9.1 verl/utils/model.py, verl/utils/megatron_utils.py; verl-project/verl#1522",
    _AS_TRANSFORMERS,
    by_layer=("*",),
    writes="each key of actor_rollout_ref.model.override_config as it is; the rollout engine is not told and needs the "
    "same in its own options, such as hf_overrides",
    unknown="Which theta a rollout has under such an override.",
)

TRAINERS = (TRL, UNSLOTH, AXOLOTL, LLAMA_FACTORY, MS_SWIFT, VERL)
