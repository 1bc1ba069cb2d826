"""What is taken for a model, for a scheme and for a path, and what other things are answered."""

from __future__ import annotations

import copy
import io
import pickle
import socket
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaTokenizer, Trainer, TrainingArguments, pipeline

import rope_patch
from rope_patch import (
    AlreadyPatched,
    InvalidField,
    NotPatched,
    UnknownScheme,
    UnsupportedModel,
    describe,
    get_scheme,
    native_scheme,
    patch,
    repatch,
    unpatch,
)
from rope_patch.errors import NoCheckpoint, RopePatchError
from tests.families import build, config_of, from_config
from tests.models import t5_families
from tests.runs import logits, tokens
from tests.snapshots import snapshot

IN_PLACE = "`patch` returns a handle, and the model is patched in place: use the model itself, or handle.model"


def told(error, act, *words, **fields):
    with pytest.raises(error) as caught:
        act(*words, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- handles ----------------------------------------------------------------------------------------------------------


def test_a_handle_taken_for_the_model_is_answered_in_one_line(llama, tmp_path):
    model = patch(llama, "yarn", factor=4)
    assert told(AttributeError, lambda: model.generate(tokens())) == f"{IN_PLACE}.generate"
    assert told(AttributeError, lambda: model.config) == f"{IN_PLACE}.config"
    assert told(TypeError, lambda: model(tokens())) == f"{IN_PLACE}(...)"
    arguments = TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    assert told(AttributeError, Trainer, model, arguments).startswith(IN_PLACE)
    assert told(AttributeError, lambda: model.nonsense) == "'PatchHandle' object has no attribute 'nonsense'"
    assert not hasattr(model, "generate")
    assert not hasattr(model, "__len__")


def test_a_handle_is_taken_where_a_model_is(llama, tmp_path):
    handle = patch(llama, "rerope", window=6)
    assert describe(handle) == describe(llama)
    assert patch(handle, "rerope", window=6) is handle
    llama.save_pretrained(tmp_path)
    assert unpatch(handle) is handle
    told(NotPatched, unpatch, handle)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    again = unpatch(repatch(plain))
    assert again.model is plain
    assert repatch(again).scheme == handle.scheme


def test_a_handle_that_was_removed_takes_nothing_else_off(llama):
    first = patch(llama, "rerope", window=6)
    first.remove()
    second = patch(llama, "yarn", factor=4)
    told(NotPatched, unpatch, first)
    assert describe(first) == describe(second)


def test_a_handle_is_copied_and_pickled(llama):
    handle = patch(llama, "rerope", window=6)
    file = io.BytesIO()
    torch.save(handle, file)
    for other in (copy.deepcopy(handle), torch.load(io.BytesIO(file.getvalue()), weights_only=False)):
        assert str(other) == str(handle)
        assert torch.equal(logits(other.model, tokens()), logits(llama, tokens()))
        with other:
            pass
        assert unpatch(handle) is handle
        handle = patch(llama, "rerope", window=6)
    assert pickle.loads(pickle.dumps(handle)).scheme == handle.scheme


# --- the same patch again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["yarn:factor=4", "rerope:window=6", "kerple", "rerope:target=128+logn"])
def test_the_same_patch_again_is_the_handle_unchanged(spec, llama):
    handle = patch(llama, spec)
    before, expected = snapshot(llama), logits(llama, tokens())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert patch(llama, spec) is handle
        assert patch(llama.model, get_scheme(spec)) is handle
    assert snapshot(llama) == before
    assert torch.equal(logits(llama, tokens()), expected)


def test_another_patch_is_refused(llama):
    patch(llama, "rerope", window=6)
    for others in ({"window": 7}, {"window": 6, "mount": "late"}, {"window": 6, "attention": "oracle"}):
        assert "unpatch it before" in told(AlreadyPatched, patch, llama, "rerope", **others)
    t5 = t5_families.build()
    patch(t5.encoder, "t5:interpolation=2")
    told(AlreadyPatched, patch, t5, "t5:interpolation=2")
    patch(t5.decoder, "t5:interpolation=2")
    told(AlreadyPatched, patch, t5, "t5:interpolation=2")


# --- things that are no model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [describe, unpatch, repatch, native_scheme, lambda model: patch(model, "rope")])
def test_what_is_no_model_is_answered_by_its_class(act, llama):
    pipe = pipeline("text-generation", llama, tokenizer=LlamaTokenizer(vocab={"a": 0, "<unk>": 1}, merges=[]))
    of_config = "pass the model; a config alone takes export_rope_parameters(SCHEME, config)"
    for thing, said in (
        ("folder", "'folder' is not a loaded model: load it with rope_patch.from_pretrained"),
        (None, "None is not a loaded model"),
        (pipe, "TextGenerationPipeline is not a loaded model: pass the one that it holds, as in pipe.model"),
        (pipe.tokenizer, f"{type(pipe.tokenizer).__name__} is not a loaded model"),
        (llama.config, f"LlamaConfig is not a loaded model: {of_config}"),
        (type(llama), "LlamaForCausalLM is not a loaded model: load one, LlamaForCausalLM.from_pretrained(FOLDER)"),
    ):
        assert told(UnsupportedModel, act, thing) == said


# --- missing fields ---------------------------------------------------------------------------------------------------

RULES = {
    "rerope": "window=16 (half of L): target='auto' fills it in",
    "lm_infinite": "local_window=32 (L): target='auto' fills it in",
    "logn+rerope": "window=16 (half of L): target='auto' fills it in",
    "yarn": "factor=4 reaches 128 tokens, as target=128 does",
    "leaky_rerope": "window=16 (half of L), factor=7 reaches 128 tokens, as target=128 does",
    "leaky_rerope:window=8": "factor=5 reaches 128 tokens, as target=128 does",
}


@pytest.mark.parametrize("spec", RULES)
def test_a_field_with_a_rule_is_named_with_its_value(spec, llama):
    said = told(InvalidField, patch, llama, spec)
    assert "needs" in said
    assert said.endswith(f"; on this model {RULES[spec]}")


@pytest.mark.parametrize("spec", ["abf", "longrope", "longrope:short_factor=[1]"])
def test_a_field_without_a_rule_is_only_named(spec, llama):
    assert "on this model" not in told(InvalidField, patch, llama, spec)


def test_fields_that_follow_from_the_model_alone(llama):
    with patch(llama, "rerope", target="auto") as handle:
        assert handle.scheme == get_scheme("rerope:window=16")
    with patch(llama, "rerope:target=auto+logn") as handle:
        assert handle.scheme == get_scheme("rerope:window=16+logn")
    said = told(InvalidField, patch, llama, "yarn", target="auto")
    assert said.startswith("yarn: target='auto' is not allowed, as its fields follow from the length; target must be")
    told(InvalidField, patch, llama, "rerope", target="x4")
    told(InvalidField, patch, llama, "alibi", target="auto")


# --- rope_parameters of Transformers ----------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PARAMETERS = [
    YARN,
    {**YARN, "rope_theta": 1e4, "original_max_position_embeddings": 16, "beta_fast": 16.0, "truncate": False},
    {**YARN, "attention_factor": 1.2, "mscale": None},
    {**YARN, "truncate": None},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
    {**LLAMA3, "original_max_position_embeddings": 16},
    {"rope_type": "default", "rope_theta": 5e5},
    {**LISTS, "factor": 4.0},
    {**LISTS, "original_max_position_embeddings": 16},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]
EXTENDED = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("native", [{"rope_type": "default"}, EXTENDED], ids=["plain", "extended"])
@pytest.mark.parametrize("given", PARAMETERS, ids=lambda given: ",".join(map(str, given.values()))[:40])
def test_rope_parameters_are_taken_as_transformers_means_them(given, native):
    model, plain = (
        from_config(config_of("llama", rope_parameters={"rope_theta": 1e4, **parameters}))
        for parameters in (native, given)
    )
    legacy = {"type" if name == "rope_type" else name: value for name, value in given.items()}
    expected = logits(plain, tokens(30))
    for words in (given, legacy):
        with patch(model, dict(words)):
            assert torch.equal(logits(model, tokens(30)), expected)


@pytest.mark.parametrize("sliding", [None, {"rope_type": "linear", "factor": 2.0}])
def test_rope_parameters_by_layer_type(sliding):
    model = build("gemma3")
    native = model.config.rope_parameters
    given = {"full_attention": YARN} | ({"sliding_attention": sliding} if sliding else {})
    wanted = {kind: {"rope_theta": entry["rope_theta"], **given.get(kind, entry)} for kind, entry in native.items()}
    expected = logits(from_config(config_of("gemma3", rope_parameters=wanted)), tokens(30))
    with patch(model, given):
        assert torch.equal(logits(model, tokens(30)), expected)
        patch(model, given)
    with patch(model, YARN, "logn") as handle:
        assert handle.scheme == get_scheme("yarn:factor=4+logn")


REFUSED = {
    "cannot set rope_theta=500000.0; here it is 10000.0": {**YARN, "rope_theta": 5e5},
    "cannot set partial_rotary_factor=0.5; here it is 1.0": {**YARN, "partial_rotary_factor": 0.5},
    "cannot set beta=3; here it is None; did you mean 'beta_slow'": {**YARN, "beta": 3},
    "names no rope_type; write {'rope_type': 'yarn', 'rope_theta'": {"rope_theta": 5e5, "factor": 2.0},
    "no rope_parameters of 'full_attention'; it has one entry": {"full_attention": YARN},
    "Transformers has no rope_type='rerope'": {"rope_type": "rerope", "window": 4},
    "yarn needs factor": {"rope_type": "yarn"},
    "factor='4' is not allowed": {"rope_type": "yarn", "factor": "4"},
    "rope_parameters={} name no rope_type": {},
}


@pytest.mark.parametrize("said", REFUSED)
def test_rope_parameters_that_no_scheme_means_are_refused(said, llama):
    before = snapshot(llama)
    assert said in told(InvalidField, patch, llama, REFUSED[said])
    assert snapshot(llama) == before


def test_rope_parameters_of_other_models():
    assert "did you mean 'yarn'" in told(UnknownScheme, patch, build(), {"rope_type": "yarm", "factor": 4.0})
    said = told(InvalidField, patch, build("gemma3"), {"full_atention": YARN})
    assert "has no rope_parameters of 'full_atention'; did you mean 'full_attention'?" in said
    share = {"rope_type": "proportional", "partial_rotary_factor": 0.5}
    assert "this checkpoint rotates a share itself" in told(InvalidField, patch, build("gpt_neox"), share)
    assert "does not rotate" in told(UnsupportedModel, patch, t5_families.build(), YARN)


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch):
    """A network that nobody may ask."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: False)

    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize(
    "typed", ["/no/such", "./missing", "../missing", "~/missing", "runs/mine/last", "runs/last", "runs/", "a\\b"]
)
def test_a_mistyped_folder_is_told_at_once(typed, no_network, monkeypatch, tmp_path):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    said = told(NoCheckpoint, rope_patch.from_pretrained, typed)
    assert said.startswith(f"there is no checkpoint {'in ' * (typed == 'runs/')}{typed!r}")
    assert "the Hub" not in said


def test_what_is_no_path(llama):
    ending = "is not a checkpoint; pass the path of a folder or of a GGUF file, or a Hub ID"
    assert told(NoCheckpoint, rope_patch.from_pretrained, None) == f"None {ending}"
    line = "it is loaded already: write patch(model, SCHEME)"
    assert told(NoCheckpoint, rope_patch.from_pretrained, llama) == f"a LlamaForCausalLM is not a checkpoint; {line}"
    assert isinstance(NoCheckpoint(), RopePatchError)


@pytest.mark.parametrize("spec", [None, "rerope:window=6"])
def test_an_argument_that_from_pretrained_does_not_know_is_named(spec, llama, tmp_path):
    if spec is not None:
        patch(llama, spec)
    llama.save_pretrained(tmp_path)
    for load in (type(llama).from_pretrained, rope_patch.from_pretrained):
        with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense_argument'"):
            load(tmp_path, nonsense_argument=1)
