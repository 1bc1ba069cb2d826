"""Two checkpoints: trainer and rollout, adapters and their base, both spellings."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rope_patch
from rope_patch.doctor import Unreadable, read_source
from rope_patch.doctor.command import main
from rope_patch.doctor.comparing import as_numbers_of_pair, compare, words_of_pair
from rope_patch.saving.loading import default_checkpoint

BASE = {
    **{"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "max_position_embeddings": 32768},
    "rope_theta": 1000000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GEMMA_4 = {
    **{"model_type": "gemma3_text", "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
GEMMA_5 = {
    "model_type": "gemma3_text",
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def folder(path, fields, name="config.json"):
    path.mkdir(exist_ok=True)
    (path / name).write_text(json.dumps(fields))
    return path


def pair(tmp_path, trained, served):
    return compare(read_source(folder(tmp_path / "one", trained)), read_source(folder(tmp_path / "other", served)))


def without(fields, *names):
    return {name: value for name, value in fields.items() if name not in names}


V5 = {**without(BASE, "rope_theta"), "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
V5_YARN = {**without(BASE, "rope_theta"), "rope_parameters": {**YARN, "rope_theta": 1000000.0}}


@pytest.mark.parametrize(
    ("trained", "served"),
    [
        (BASE, BASE),
        (BASE, V5),
        ({**BASE, "rope_scaling": YARN}, V5_YARN),
        ({**BASE, "rope_scaling": {**YARN, "factor": 4}}, {**BASE, "rope_scaling": {**YARN, "factor": 4.0}}),
        (V5_YARN, {**V5_YARN, "original_max_position_embeddings": 32768}),
        (BASE, {**BASE, "head_dim": 128}),
        (BASE, {**BASE, "num_hidden_layers": 3, "vocab_size": 7}),
        (BASE, {**BASE, "rope_scaling": {"rope_type": "linear", "factor": 1.0}}),
        (GEMMA_4, GEMMA_5),
        (BASE, {"model_type": "llava", "text_config": BASE}),
    ],
)
def test_the_same_positions_in_other_words_agree(tmp_path, trained, served):
    for one, other in ((trained, served), (served, trained)):
        found = pair(tmp_path, one, other)
        assert found.agrees, words_of_pair(found)
        assert words_of_pair(found).endswith("both state the same positions")
        assert main([str(tmp_path / "one"), str(tmp_path / "other")]) == 0


@pytest.mark.parametrize(
    ("trained", "served", "words"),
    [
        (BASE, without(BASE, "rope_theta"), "theta = 10000 instead of 1000000"),  # unsloth 7028
        (V5, {**V5, "rope_parameters": {"rope_type": "default"}}, "theta = 10000 instead of 1000000"),
        (V5_YARN, BASE, "rope_type = default instead of yarn"),
        (BASE, {**BASE, "rope_scaling": YARN}, "rope_type = yarn instead of default, factor = 4 instead of 1"),
        ({**BASE, "rope_scaling": YARN}, {**BASE, "rope_scaling": {**YARN, "factor": 2.0}}, "factor = 2 instead of 4"),
        (BASE, {**BASE, "head_dim": 64}, "turns 64 of 64 dimensions instead of 128 of 128"),
        (BASE, {**BASE, "num_attention_heads": 56}, "turns 64 of 64 dimensions instead of 128 of 128"),
        (
            GEMMA_4,
            {**GEMMA_4, "rope_local_base_freq": 5e3},
            "sliding_attention from position 1 on it turns with theta =",
        ),
        (GEMMA_5, {**GEMMA_5, "rope_parameters": None}, "full_attention from position 1 on it turns with rope_type ="),
        (
            {**GEMMA_5, "rope_parameters": {**GEMMA_5["rope_parameters"], "sliding_attention": None}},
            GEMMA_5,
            "sliding_attention from position 0 on it turns layers of a type that the first does not name",
        ),
        (
            GEMMA_5,
            {**GEMMA_5, "rope_parameters": {**GEMMA_5["rope_parameters"], "sliding_attention": None}},
            "sliding_attention from position 0 on it has no layers of this type",
        ),
        (GEMMA_5, BASE, "full_attention from position"),
        (
            {**BASE, "rope_scaling": YARN},
            {**BASE, "rope_scaling": {**YARN, "attention_factor": 1.0}},
            "multiplies cos and sin by 1 instead of 1.139",
        ),
    ],
)
def test_where_two_part_is_said(tmp_path, trained, served, words):
    found = pair(tmp_path, trained, served)
    assert not found.agrees
    assert words in words_of_pair(found)
    assert main([str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    numbers = json.loads(json.dumps(as_numbers_of_pair(found)))
    assert (numbers["agrees"], bool(numbers["differences"])) == (False, True)


def test_a_dropped_theta_is_seen_from_an_early_position(tmp_path):
    found = pair(tmp_path, BASE, without(BASE, "rope_theta"))
    (difference,) = found.differences
    angles = [1e4 ** (-i / 128) - 1e6 ** (-i / 128) for i in range(0, 128, 2)]
    assert difference.first == 1
    assert difference.angles[32768] == pytest.approx(max(angles) * 32768)


def test_another_maximum_alone_agrees_with_a_note(tmp_path):
    found = pair(tmp_path, BASE, {**BASE, "max_position_embeddings": 131072})
    assert found.agrees
    assert "the longest texts differ: 32768 and 131072 tokens" in words_of_pair(found)
    assert as_numbers_of_pair(found)["lengths"] == [32768, 131072]


def test_another_maximum_is_another_base_under_dynamic(tmp_path):
    entry = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    found = pair(tmp_path, {**BASE, **entry}, {**BASE, **entry, "max_position_embeddings": 65536})
    (difference,) = found.differences
    assert 32768 < difference.first < 33768


def test_adapters_are_compared_by_their_base(tmp_path):
    base = folder(tmp_path / "base", BASE)
    for place in (str(base), "../base"):
        adapters = folder(tmp_path / "adapters", {"base_model_name_or_path": place}, "adapter_config.json")
        assert compare(read_source(adapters), read_source(base)).agrees
    served = folder(tmp_path / "served", {**BASE, "rope_scaling": YARN})
    assert not compare(read_source(adapters), read_source(served)).agrees
    folder(tmp_path / "adapters", {"base_model_name_or_path": "../nowhere"}, "adapter_config.json")
    with pytest.raises(Unreadable, match=r"has adapters of '\.\./nowhere', which is no folder here"):
        read_source(adapters)


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """The small checkpoint, saved under a scheme that its config cannot express."""
    path = tmp_path_factory.mktemp("patched")
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32)
    rope_patch.patch(model, "rerope:window=64")
    model.save_pretrained(path)
    return path


def test_a_scheme_of_one_alone_is_said(patched, tmp_path):
    plain = tmp_path / "plain"
    AutoConfig.from_pretrained(default_checkpoint()).save_pretrained(plain)
    found = compare(read_source(patched), read_source(plain))
    assert (found.agrees, found.records, found.differences) == (False, True, ())
    assert "a scheme of rope_patch, in config.rope_patch, which the other lacks" in words_of_pair(found)
    assert compare(read_source(patched), read_source(patched)).agrees
    settings = {"base_model_name_or_path": str(plain)}
    record = json.loads((patched / "config.json").read_text())["rope_patch"]
    adapters = folder(tmp_path / "adapters", {**settings, "rope_patch": record}, "adapter_config.json")
    assert compare(read_source(adapters), read_source(plain)).records
    assert compare(read_source(adapters), read_source(patched)).agrees


def test_one_that_cannot_be_read_ends_in_one_line(tmp_path, capsys):
    folder(tmp_path / "one", BASE)
    folder(tmp_path / "other", {"model_type": "bert"})
    assert main([str(tmp_path / "one"), str(tmp_path / "other")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
