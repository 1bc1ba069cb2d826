"""The doctor reads a config as Transformers does: every model type, in every spelling that its class takes."""

import copy
import json
import warnings

import pytest
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch.doctor import Unreadable, read_source, rotations_of
from rope_patch.doctor.architecture import architecture_of
from tools.position_defaults import OWN, attempt, text_of, turned

pytestmark = pytest.mark.filterwarnings("ignore")

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


def rotating():
    """Types whose config is that of their text model, and whose positions can be read."""
    for name in sorted(CONFIG_MAPPING.keys()):
        found = architecture_of(name)
        if found is not None and not found.unread:
            yield name


def variants(name, kinds, pairs):
    """Configs of a type: what is written, by a word for it."""

    def parameters(entry):
        return {"rope_parameters": {kind: {**entry} for kind in kinds} if kinds else {**entry}}

    lists = {"short_factor": [1.0 + 0.01 * i for i in range(pairs)], "long_factor": [1.0 + 0.1 * i for i in range(pairs)]}
    longrope = {"rope_type": "longrope", **lists, "original_max_position_embeddings": 1024}
    short = {"max_position_embeddings": 4096}
    yield "nothing", {}
    yield "theta at the top", {"rope_theta": THETA}
    yield "empty", {"rope_theta": THETA, "rope_scaling": None, "rope_parameters": None}
    yield "theta of the windows", {"rope_local_base_freq": THETA, "local_rope_theta": THETA}
    yield "theta of the others", {"global_rope_theta": THETA, "rotary_emb_base": THETA}
    yield "theta inside", parameters({"rope_type": "default", "rope_theta": THETA})
    yield "theta inside and at the top", {"rope_theta": 3e5, **parameters({"rope_type": "linear", "factor": 2.0, "rope_theta": THETA})}
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
    yield "longrope, attention_factor", {**parameters({**longrope, "rope_theta": THETA, "attention_factor": 1.1}), **short}
    yield "longrope, L at the top", {"original_max_position_embeddings": 2048, **parameters({**longrope, "rope_theta": THETA})}
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


@pytest.mark.parametrize("name", list(rotating()))
def test_every_spelling_is_read_as_transformers_reads_it(tmp_path, name):
    cls = CONFIG_MAPPING[name]
    plain = cls()
    assert not disagreement(rotations(tmp_path, json.loads(plain.to_json_string(use_diff=False))), turned(text_of(plain)))
    if type(text_of(plain)) is not cls:
        return
    own = architecture_of(name)
    width = next(iter(rotations(tmp_path, {"model_type": name, **own.only_if}).values())).width
    found, loaded = {}, 0
    for word, fields in variants(name, own.kinds, width // 2):
        fields = {**own.only_if, **fields}
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
