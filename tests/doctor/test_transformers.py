"""The doctor reads a config as Transformers does: every model type, in every spelling that its class takes."""

import copy
import json
import logging

import pytest
import transformers
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch.doctor import READERS, Unreadable, read_source, rotations_of
from rope_patch.doctor.architecture import architecture_of
from rope_patch.doctor.versions import older
from tools.position_defaults import attempt, text_of, turned

pytestmark = pytest.mark.filterwarnings("ignore")

YARDSTICK = READERS[0].version
"""Eight types of 5.17 read otherwise: their own code has changed since."""

THETA = 54321.0
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
YARN_WORDS = [
    {"truncate": False},
    {"attention_factor": 0.75},
    {"mscale": 0.7, "mscale_all_dim": 1.0},
    {"mscale": 0.7},
    {"beta_fast": 16, "beta_slow": 2, "factor": 8},
    {"beta_fast": 0, "factor": 0.5},
]


TYPES = sorted(CONFIG_MAPPING._mapping)
"""What Transformers has itself, whatever else was registered."""


def rotating():
    """Types whose positions can be read."""
    for name in TYPES:
        found = architecture_of(name)
        if found is not None and not found.unread and name not in FIXED:
            yield name


def variants(name, kinds, pairs):
    """Configs of a type: what is written, by a word for it."""

    def parameters(entry):
        return {"rope_parameters": {kind: {**entry} for kind in kinds} if kinds else {**entry}}

    lists = {
        "short_factor": [1.0 + 0.01 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.1 * i for i in range(pairs)],
    }
    longrope = {"rope_type": "longrope", **lists, "original_max_position_embeddings": 1024}
    short = {"max_position_embeddings": 4096}
    yield "nothing", {}
    yield "theta at the top", {"rope_theta": THETA}
    yield "empty", {"rope_theta": THETA, "rope_scaling": None, "rope_parameters": None}
    yield "theta of the windows", {"rope_local_base_freq": THETA, "local_rope_theta": THETA}
    yield "theta of the others", {"global_rope_theta": THETA, "rotary_emb_base": THETA}
    yield "theta inside", parameters({"rope_type": "default", "rope_theta": THETA})
    yield (
        "theta inside and at the top",
        {"rope_theta": 3e5, **parameters({"rope_type": "linear", "factor": 2.0, "rope_theta": THETA})},
    )
    yield "theta missing", parameters({**LINEAR})
    yield "linear, version 4", {"rope_theta": THETA, "rope_scaling": {"type": "linear", "factor": 4.0}}
    yield "linear, integer", {"rope_theta": THETA, "rope_scaling": {"type": "linear", "factor": 4}}
    yield "dynamic, version 4", {"rope_theta": THETA, "rope_scaling": {"type": "dynamic", "factor": 4.0}, **short}
    yield "dynamic", {**parameters({"rope_type": "dynamic", "factor": 2.0, "rope_theta": THETA}), **short}
    yield "yarn, version 4", {"rope_theta": THETA, "rope_scaling": YARN, **short}
    yield "yarn, both", {"rope_theta": THETA, "rope_scaling": YARN, "rope_parameters": LINEAR, **short}
    yield "yarn", {**parameters({**YARN, "rope_theta": THETA}), **short}
    yield "yarn without L", {"rope_theta": THETA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    yield "yarn, L at the top", {"original_max_position_embeddings": 2048, "rope_scaling": YARN, **short}
    yield "yarn, factor null", {"rope_scaling": {**YARN, "factor": None}, **short}
    for words in YARN_WORDS:
        if kinds and "truncate" in words:
            continue  # Transformers misses it there: a deviation of its row among the readers
        yield f"yarn, {words}", {**parameters({**YARN, "rope_theta": THETA, **words}), **short}
    yield "llama3, version 4", {"rope_theta": THETA, "rope_scaling": LLAMA3, **short}
    yield "llama3", {**parameters({**LLAMA3, "rope_theta": THETA}), **short}
    yield "longrope", {**parameters({**longrope, "rope_theta": THETA}), **short}
    yield "longrope, version 4", {"rope_theta": THETA, "rope_scaling": longrope, **short}
    yield "longrope, factor", {**parameters({**longrope, "rope_theta": THETA, "factor": 32.0}), **short}
    yield (
        "longrope, attention_factor",
        {**parameters({**longrope, "rope_theta": THETA, "attention_factor": 1.1}), **short},
    )
    yield (
        "longrope, L at the top",
        {"original_max_position_embeddings": 2048, **parameters({**longrope, "rope_theta": THETA})},
    )
    yield "proportional", parameters({"rope_type": "proportional", "rope_theta": THETA, "partial_rotary_factor": 0.5})
    for share in ("partial_rotary_factor", "rotary_pct"):
        yield f"{share} at the top", {share: 0.5, "rope_theta": THETA}
        yield f"{share} at the top of linear", {share: 0.5, "rope_theta": THETA, "rope_scaling": {**LINEAR}}
    yield "partial inside", parameters({"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5})
    yield "partial inside linear", parameters({**LINEAR, "rope_theta": THETA, "partial_rotary_factor": 0.5})
    yield "head_dim", {"head_dim": 48}
    yield "head_dim null", {"head_dim": None, **parameters({"rope_type": "default", "rope_theta": THETA})}
    yield "sizes", {"hidden_size": 1920, "num_attention_heads": 12, "num_key_value_heads": 12}
    yield "rope width", {"qk_rope_head_dim": 48}


def written(tmp_path, fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields, default=str))
    return path


def rotations(tmp_path, fields):
    return rotations_of(read_source(written(tmp_path, fields))).rotations


LEFT_OUT = {
    "mistral4": lambda fields: "rope_scaling" in fields or "rope_parameters" not in fields,
    "zamba2": lambda fields: "hidden_size" in fields,
}
"""Configs that do not count: without `rope_parameters` Mistral 4 forgets which part of a head its attention rotates.
Zamba 2 derives the width of a head, which its checkpoints state, from the two sizes by a rule of its own."""

REORDERED = ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text")
"""Types whose code puts the frequencies of height and width in another order before it takes them apart again."""

FIXED = ("codegen", "gptj", "roformer")
"""Types whose attention rotates without a module: `test_types_without_a_module` has them."""


def disagreement(found, expected, length=0):
    """How rotations differ from what a module has, by layer type; empty if they do not."""
    for kind, (frequencies, scaling) in expected.items():
        rotation = found.get(kind, found.get(""))
        if rotation is None:
            return f"{kind}: nothing was read"
        ours = rotation.frequencies(length)
        if len(ours) != len(frequencies):
            return f"{kind}: {len(ours)} pairs instead of {len(frequencies)}"
        if ours != pytest.approx(frequencies, rel=1e-5, abs=0):
            return f"{kind}: {rotation.rope_type} {rotation.theta:g}: {ours[:3]} instead of {frequencies[:3]}"
        if rotation.temperature() != pytest.approx(scaling, rel=1e-5):
            return f"{kind}: temperature {rotation.temperature()} instead of {scaling}"
    return ""


@pytest.mark.skipif(older(transformers.__version__, YARDSTICK), reason=f"Transformers {YARDSTICK} is the yardstick")
@pytest.mark.parametrize("name", list(rotating()))
def test_every_spelling_is_read_as_transformers_reads_it(tmp_path, name):
    cls, own = CONFIG_MAPPING[name], architecture_of(name)
    plain = cls(**own.only_if)
    expected = turned(text_of(plain))
    if name in REORDERED:
        expected = {
            kind: (sorted(frequencies, reverse=True), scaling) for kind, (frequencies, scaling) in expected.items()
        }
    assert not disagreement(rotations(tmp_path, json.loads(plain.to_json_string(use_diff=False))), expected)
    if type(text_of(plain)) is not cls or name in REORDERED:
        return
    width = next(iter(rotations(tmp_path, {"model_type": name, **own.only_if}).values())).width
    found, loaded = {}, 0
    for word, fields in variants(name, own.kinds, width // 2):
        fields = {**own.only_if, **fields}
        if LEFT_OUT.get(name, lambda fields: False)(fields):
            continue
        config = attempt(cls.from_dict, config_dict=copy.deepcopy(fields))
        expected = None if config is None else turned(config)
        try:
            ours = rotations(tmp_path, {"model_type": name, **fields})
        except Unreadable as error:
            ours = str(error)
        if expected is None:
            continue
        loaded += 1
        if isinstance(ours, str):
            found[word] = ours
        elif difference := disagreement(ours, expected):
            found[word] = difference
    assert not found
    assert loaded > 5


LONGROPE = {
    **{"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0 + i for i in range(32)]},
    **{"original_max_position_embeddings": 512, "rope_theta": THETA},
}


@pytest.mark.parametrize("length", [1, 511, 512, 513, 4095, 4096, 4097, 10000, 100000])
@pytest.mark.parametrize(
    "entry", [LONGROPE, {"rope_type": "dynamic", "factor": 4.0, "rope_theta": THETA}], ids=["longrope", "dynamic"]
)
def test_frequencies_follow_the_length_as_in_transformers(tmp_path, entry, length):
    fields = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 1, "max_position_embeddings": 4096}
    config = CONFIG_MAPPING["llama"](**fields | {"rope_parameters": dict(entry)})
    found, scaling = ROPE_INIT_FUNCTIONS[entry["rope_type"]](config, seq_len=length)
    (rotation,) = rotations(tmp_path, fields | {"rope_parameters": entry}).values()
    assert rotation.frequencies(length) == pytest.approx(found.double().tolist(), rel=1e-5)
    assert rotation.temperature() == pytest.approx(scaling)


@pytest.mark.parametrize(
    ("name", "fields", "width"),
    [
        ("gptj", {}, 64),
        ("gptj", {"n_embd": 512, "n_head": 4, "rotary_dim": 32}, 32),
        ("codegen", {}, 64),
        ("roformer", {}, 64),
        ("roformer", {"rope_theta": THETA, "rope_scaling": LINEAR}, 64),
    ],
)
def test_types_without_a_module_rotate_with_one_base(tmp_path, name, fields, width):
    (rotation,) = rotations(tmp_path, {"model_type": name, **fields}).values()
    assert rotation.frequencies() == pytest.approx([10000.0 ** (-i / width) for i in range(0, width, 2)])


OF_THEIR_OWN = """
    blt chatglm clvp clvp_decoder clvp_encoder cohere_compass cohere_compass_text cohere_compass_vision
    dinov3_vit dots3_note dots3_note_text dots3_note_vision_encoder edgetam_video efficientloftr eomt_dinov3
    ernie4_5_vl_moe_vision esm esmfold2 exaone4_5_vision gemma4_vision glm4v_moe_vision glm4v_vision glm5_next_vision
    glm_ocr_vision inkling2_vision kimi_k25_vision lfm3_vl_vision llama4_vision_model minimax_m3_vl_vision mlcd
    mlcd_vision_model muse_glimmer_vision muse_spark_vision neomme paddleocr_vl_vision pixtral
    qwen2_5_omni_vision_encoder qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision
    qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision sam2_video sam3_tracker_video
    sam3_vit_model sapiens2 seamless_m4t seamless_m4t_v2 step3p5_vision video_llama_3_vision vjepa2 wav2vec2-bert
    wav2vec2-conformer
"""
"""Types that rotate by code of their own: images and audio, and layers whose widths or axes are their own."""


def test_types_with_code_of_their_own_say_so(tmp_path):
    refused = {}
    for name in {*TYPES, *OF_THEIR_OWN.split()}:
        own = architecture_of(name)
        assert own is not None, f"{name} is new: run python -m tools.position_defaults"
        if own.unread and own.unread != "it has no rotary positions":
            refused[name] = own.unread
    assert refused.keys() == set(OF_THEIR_OWN.split())
    for name, reason in refused.items():
        with pytest.raises(Unreadable) as error:
            rotations(tmp_path, {"model_type": name})
        assert str(error.value).endswith(f"model_type={name}: {reason}")


def test_types_without_positions_have_no_parameters_for_them():
    logging.disable(logging.ERROR)
    try:
        for name in TYPES:
            if architecture_of(name).unread == "it has no rotary positions" and (
                plain := attempt(CONFIG_MAPPING[name])
            ):
                assert not getattr(text_of(plain), "rope_parameters", None), name
    finally:
        logging.disable(logging.NOTSET)
