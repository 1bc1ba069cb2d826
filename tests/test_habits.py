"""What people type from habit: it works, or its error shows the line to write."""

from __future__ import annotations

import copy
import io
import json
import re
import warnings

import numpy
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import rope_patch
from rope_patch import (
    ALiBi,
    AlreadyPatched,
    InvalidField,
    NotPatched,
    PerLayer,
    ReRoPE,
    UnknownScheme,
    UnsupportedModel,
    YaRN,
    current_scheme,
    describe,
    export_rope_parameters,
    patch,
    repatch,
    unpatch,
)
from rope_patch.errors import RopePatchWarning
from rope_patch.schemes.reach import spelled
from tests.families import TRAINING_LENGTH as L
from tests.families import build
from tests.runs import logits as run
from tests.runs import tokens


@pytest.fixture
def model():
    return build("llama")


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def logits(model) -> torch.Tensor:
    return run(model, tokens())


# --- another scheme in its place ---


@pytest.mark.parametrize("put", [lambda *asked, **fields: patch(*asked, **fields, replace=True), repatch])
def test_another_scheme_takes_the_place(put, model):
    plain = logits(model)
    fresh = copy.deepcopy(model)
    patch(model, "rerope:window=5")
    put(model, "yarn:factor=4")
    patch(fresh, "yarn:factor=4")
    assert torch.equal(logits(model), logits(fresh))
    put(model, "self_extend", group_size=2, window=4)
    assert str(current_scheme(model)).startswith("self_extend:")
    unpatch(model)
    assert torch.equal(logits(model), plain)
    put(model, "alibi")  # one without a scheme is patched as ever
    assert current_scheme(model) == ALiBi()


@pytest.mark.parametrize("asked", ["fire", "kerple", "rerope:window=5"])
def test_a_refused_scheme_leaves_the_one_before_with_what_it_learned(asked, model):
    handle = patch(model, asked)
    for name, value in model.named_parameters():
        if "rope_patch" in name:
            value.data.add_(0.25)
    before = logits(model)
    with pytest.raises(InvalidField):
        patch(model, "layers:[99=nope;rest=rerope:window=3]", replace=True)
    assert torch.equal(logits(model), before)
    assert rope_patch.patching.find_handle(model) is handle
    handle.remove()
    assert current_scheme(model) is None


def test_a_model_says_what_it_carries_and_no_more_afterwards(model):
    before = repr(model)
    patch(model, "rerope:window=5+logn")
    assert "(rope_patch): rerope:window=5+logn" in repr(model)
    assert repr(copy.deepcopy(model)) == repr(model)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    assert repr(torch.load(file, weights_only=False)) == repr(model)
    assert current_scheme(model) == rope_patch.schemes.registry.get_scheme("rerope:window=5+logn")
    unpatch(model)
    assert repr(model) == before
    assert "extra_repr" not in vars(model.model)


def test_a_model_that_was_loaded_by_name_carries_its_scheme_before_the_first_call(model, tmp_path):
    patch(model, "rerope:window=5")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="rope_patch")
    assert current_scheme(loaded) == ReRoPE(5)
    assert "its config records rerope:window=5, which its first call mounts" in describe(loaded)
    assert torch.equal(logits(loaded), logits(model))
    assert current_scheme(loaded) == ReRoPE(5)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert current_scheme(plain) is None
    assert "which is not applied: use repatch(model)" in describe(plain)


def test_what_a_handle_says_is_what_you_typed(model):
    handle = patch(model, "yarn:factor=4")
    assert repr(handle) == "<LlamaForCausalLM under yarn:factor=4, mounted rotary>"
    with pytest.raises(AlreadyPatched, match=r"carries yarn:factor=4; unpatch"):
        patch(model, "alibi")
    handle.remove()
    assert repr(handle) == "<LlamaForCausalLM without yarn:factor=4>"
    with pytest.raises(NotPatched, match=r"does not carry yarn:factor=4 any more"):
        handle.remove()
    with pytest.raises(NotPatched, match=r"write patch\(model, SCHEME\)"):
        repatch(model)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model, _: patch(model, "alibi"),
        lambda model, _: patch(model, "alibi", replace=True),
        lambda model, _: repatch(model, "alibi"),
        lambda _, folder: rope_patch.from_pretrained(folder, "alibi", replace=True),
    ],
)
@pytest.mark.parametrize("before", [None, "rerope:window=5"])
def test_a_warning_points_at_your_line(ask, before, model, tmp_path):
    if before:
        patch(model, before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RopePatchWarning)
        model.save_pretrained(tmp_path)
    unpatch(model, missing_ok=True)
    with pytest.warns(RopePatchWarning, match="alibi replaces the rotation") as caught:
        ask(model, tmp_path)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (
            lambda model: patch(model.config, "alibi"),
            "a config alone takes export_rope_parameters",
        ),
        (lambda model: patch(type(model), "alibi"), r"load one, LlamaForCausalLM\.from_pretrained\(FOLDER\)"),
        (lambda model: patch([model, model], "alibi"), "pass one model after the other"),
        (lambda model: rope_patch.save_pretrained("out", model), r"write save_pretrained\(model, 'out'\)"),
    ],
)
def test_what_is_no_model_shows_the_line_to_write(ask, said, model):
    with pytest.raises(UnsupportedModel, match=said):
        ask(model)


def test_other_words_on_a_handle_and_a_text_in_explain(model):
    handle = patch(model, "rerope:window=5")
    with pytest.raises(AttributeError, match=r"no attribute 'unpatch'; handle\.remove\(\) removes the scheme"):
        handle.unpatch()
    with pytest.raises(InvalidField, match=r"write explain\(model, tokenizer\(TEXT, return_tensors='pt'\)"):
        rope_patch.explain(model, "a text")


def test_the_scheme_that_plain_transformers_applies_is_not_another_one(model, tmp_path):
    patch(model, "yarn:factor=4")
    model.save_pretrained(tmp_path)
    with pytest.raises(AlreadyPatched, match=r"To keep yarn:factor=4, write repatch\(model\)$"):
        patch(AutoModelForCausalLM.from_pretrained(tmp_path), "yarn:factor=4")
    with pytest.raises(AlreadyPatched, match="For alibi alone, write"):
        patch(AutoModelForCausalLM.from_pretrained(tmp_path), "alibi")


def test_nothing_to_take_off(model):
    with pytest.raises(NotPatched, match=r"unpatch\(model, missing_ok=True\)"):
        unpatch(model)
    assert unpatch(model, missing_ok=True) is None
    handle = patch(model, "rope")
    assert unpatch(handle, missing_ok=True) is handle
    assert unpatch(handle, missing_ok=True) is None


# --- spellings of schemes ---


@pytest.mark.parametrize(
    ("asked", "fields", "meant"),
    [
        ((), {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn:factor=4.0"),
        ((), {"rope_parameters": {"type": "linear", "factor": 2.0}}, "pi:factor=2.0"),
        (({"name": "yarn", "factor": 4},), {}, "yarn:factor=4"),
        (({"name": "ReRoPE", "window": 5},), {}, "rerope:window=5"),
        ((["rerope:window=5", "logn"],), {}, "rerope:window=5+logn"),
        (((ReRoPE(5), "logn"),), {}, "rerope:window=5+logn"),
        (("rerope(window=5)",), {}, "rerope:window=5"),
        (("ReRoPE(window=5) + logn",), {}, "rerope:window=5+logn"),
        (("yarn",), {"target": "4x"}, f"yarn:target={4 * L}"),
        (("yarn:target=1.5x",), {}, f"yarn:target={L + L // 2}"),
        (("self_extend:target=4x,window=4",), {}, f"self_extend:target={4 * L},window=4"),
        (("yarn",), {"target": "4X"}, f"yarn:target={4 * L}"),
        (("yarn",), {"target": numpy.int64(4 * L)}, f"yarn:target={4 * L}"),
        (("rerope",), {"window": numpy.int64(5)}, "rerope:window=5"),
        (("yarn",), {"factor": torch.tensor(4.0)}, "yarn:factor=4.0"),
        ((), {"scheme": "rerope:window=5"}, "rerope:window=5"),
        ((), {"name": "yarn", "factor": 4}, "yarn:factor=4"),
        ((), {"rope_type": "yarn", "factor": 4.0}, "yarn:factor=4.0"),
        ((), {"type": "linear", "factor": 2.0}, "pi:factor=2.0"),
        (("superhot",), {"factor": 4}, "pi:factor=4"),
        (("LongLM:group_size=2,window=4",), {}, "self_extend:group_size=2,window=4"),
        (("rerope:window=5", "logn-scaling"), {}, "rerope:window=5+logn"),
    ],
)
def test_other_spellings(asked, fields, meant, model):
    other = copy.deepcopy(model)
    patch(model, *asked, **fields)
    patch(other, meant)
    assert current_scheme(model) == current_scheme(other)
    json.dumps(current_scheme(model).to_dict())  # in plain numbers


def test_a_target_of_four_tokens_is_meant_as_a_multiple():
    with pytest.raises(InvalidField, match="for 4 times the length that the model reads today, write target='4x'"):
        patch(build(max_position_embeddings=256), "yarn", target=4)


def test_a_multiple_counts_what_the_checkpoint_reads_today():
    """As Llama 3.1: trained at 16, read at 64; twice that is 128."""
    model = build(
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    )
    other = copy.deepcopy(model)
    assert patch(model, "yarn:target=2x").scheme == patch(other, "yarn:target=128").scheme


def test_names_in_lower_case_are_the_classes():
    from rope_patch import Rerope, Yarn, rerope, yarn

    assert (rerope, yarn) == (Rerope, Yarn) == (ReRoPE, YaRN)
    assert not hasattr(rope_patch, "rerop")
    with pytest.raises(AttributeError, match="no attribute 'unpach'; did you mean 'unpatch'"):
        rope_patch.unpach  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'is_patched'$"):
        rope_patch.is_patched  # noqa: B018
    assert "rerope" not in dir(rope_patch)


@pytest.mark.parametrize(
    ("asked", "fields", "written"),
    [
        ((), {"yarn": 4}, "write 'yarn', factor=4"),
        ((), {"self_extend": 4}, "write 'self_extend', group_size=4"),
        (("yarn=4",), {}, "write 'yarn:factor=4'"),
        (("rerope+logn",), {"window": 5}, "write 'rerope:window=5+logn'"),
        (("rerope", "logn"), {"window": 5}, "write 'rerope:window=5+logn'"),
        (("yarn:factor=4",), {"beta_fast": 16}, "write 'yarn:factor=4,beta_fast=16'"),
        (("rerope:window=5",), {"window": 6}, "'NAME:window=6'"),
        (("rerope+logn",), {"spam": 5}, "'NAME:spam=5'"),
        (("rerope:window=5",), {"layers": [0, 1]}, "write 'layers:[0,1=rerope:window=5;rest=none]'"),
        (("rerope",), {"window": 5, "layers": "0-1"}, "write 'layers:[0-1=rerope:window=5;rest=none]'"),
        (("rerope(5)",), {}, "such as window=5"),
        (("yarn:scale=4",), {}, "did you mean 'factor'?"),
        (("rerope:window_size=4",), {}, "did you mean 'window'?"),
        (("yarn",), {"target": "auto"}, "such as '4x'"),
        (("yarn",), {"target": "0.0x"}, "target='0.0x' is not allowed"),
        (("yarn",), {"target": "x"}, "multiple of the training length"),
        (("yarn",), {"target": "9999999x"}, "multiple of the training length"),
        (("yarn",), {"target": "1k"}, "if k is 1024, write target=1024"),
        (("yarn",), {"target": "4"}, "for 4 times the length that the model reads today, write target='4x'"),
        (("yarn",), {"target": "2048"}, "; write target=2048"),
        (("yarn",), {"target": 2048.0}, "; write target=2048"),
        (("yarn", 4), {}, "4 is not a scheme: name its field, 'yarn', factor=4"),
        (("rerope, window=5",), {}, "write 'rerope:window=5'"),
        (("rerope window=5",), {}, "write 'rerope:window=5'"),
        (("rerope:window:5",), {}, "such as window=5"),
        (("rerope:window=5,yarn:factor=4",), {}, "write 'rerope:window=5+yarn:factor=4' for both together"),
        (('{"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}',), {}, "write 'yarn:factor=4.0'"),
        (('{"name": "yarn", "factor": 4, "truncate": false}',), {}, "write 'yarn:factor=4,truncate=False'"),
        (("{'type': 'rope'}",), {}, "write 'rope'"),
        (("{oops",), {}, "such as 'yarn:factor=4'"),
        ((), {"method": "YaRN", "factor": 4}, "write 'yarn', factor=4"),
        ((), {"rope_theta": 1e6}, "write 'abf', base=1000000.0"),
        (("ntk",), {"alpha": 2}, "did you mean 'factor'?"),
        (("ntk",), {"rope_freq_base": 1e6}, "'abf:base=1000000.0' sets the base"),
        (("abf",), {"rope_theta": 1e6}, "did you mean 'base'?"),
        (("yarn",), {"max_position_embeddings": 128}, "did you mean 'target'?"),
        (("yarn",), {}, "write 'yarn:factor=...', or 'yarn:target=4x' for four times the length"),
        (("yarn:factor=4x",), {}, "factor must be a number of at least 1; write 4"),
        (("rerope",), {"window": 16.0}, "window must be an integer of at least 1; write 16"),
        (("rerope",), {"window": "16"}, "; write 16"),
        (("rerope:window=auto",), {}, "target=auto where lengths are measured or it follows from the model alone"),
        (("rerope:window=5",), {"inplace": True}, "rerope has no field 'inplace'; allowed: target, window"),
        (({0: "rerope:window=5"},), {}, "write PerLayer({0: 'rerope:window=5', 'rest': None})"),
        ((), {"rope_scaling": {"factor": 4.0}}, "write {'rope_type': 'yarn', 'factor': 4.0}"),
        (({"scheme": "yarn", "factor": 4},), {}, "write {'name': 'yarn', 'factor': 4}"),
    ],
)
def test_an_error_shows_the_line_to_write(asked, fields, written, model):
    with pytest.raises(InvalidField) as caught:
        patch(model, *asked, **fields)
    assert written in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("yarn4", "write 'yarn:factor=4'"),
        ("yarn 4x", "write 'yarn:factor=4'"),
        ("YaRN-2.5", "write 'yarn:factor=2.5'"),
        ("t5x", "did you mean 't5'"),
        ("randomized", "finetune --layout randomized"),
    ],
)
def test_a_name_that_is_none_shows_the_line_to_write(typed, written, model):
    with pytest.raises(UnknownScheme) as caught:
        patch(model, typed)
    assert written in str(caught.value)


def test_a_model_is_no_scheme(model):
    with pytest.raises(UnknownScheme, match=r"^a LlamaForCausalLM is not a scheme; current_scheme\(model\)"):
        rope_patch.get_scheme(model)


def test_what_an_error_advises_is_right(model):
    other = copy.deepcopy(model)
    patch(model, "layers:[0,1=rerope:window=5;rest=none]")
    patch(other, PerLayer({"0,1": "rerope:window=5", "rest": None}))
    assert current_scheme(model) == current_scheme(other)


def test_a_class_without_its_field():
    for make in (lambda: ReRoPE(), lambda: rope_patch.SelfExtend(group_size=2)):
        with pytest.raises(
            rope_patch.errors.MissingField, match=r"needs window: write \w+\(window=\.\.\.\), or patch\("
        ) as caught:
            make()
        assert isinstance(caught.value, ValueError)
    assert ReRoPE(5) == ReRoPE(window=5)


def test_the_entry_of_a_patched_model(model):
    own = export_rope_parameters(YaRN(factor=4), model.config)
    patch(model, "yarn:factor=4")
    assert export_rope_parameters(model) == own
    assert export_rope_parameters("yarn:factor=4", model) == own
    unpatch(model)
    assert export_rope_parameters("yarn:factor=4", model) == own
    assert export_rope_parameters("yarn:target=4x", model.config) == own
    with pytest.raises(NotPatched, match=r"export_rope_parameters\(scheme, model.config\)"):
        export_rope_parameters(model)
    with pytest.raises(InvalidField, match=r"export_rope_parameters\(scheme, model.config\)"):
        export_rope_parameters(YaRN(factor=4))
    for first in (model, model.config):
        for scheme in ("yarn:factor=4", YaRN(factor=4)):
            with pytest.raises(InvalidField, match=r"the scheme comes first: write export_rope_parameters\('yarn:"):
                export_rope_parameters(first, scheme)


@pytest.mark.parametrize("share", ["L", "L/2"])
@pytest.mark.parametrize(
    ("asked", "fields"), [("rerope", {}), ("window", {}), ("string", {"shift": 9}), ("self_extend", {"group_size": 2})]
)
def test_a_window_as_a_share_of_the_training_length_asks_for_the_number(asked, fields, share, model):
    with pytest.raises(InvalidField, match=f"window='{share}' is not allowed; .*shows L: write the number$"):
        patch(model, asked, window=share, **fields)


@pytest.mark.parametrize("function", [describe, current_scheme, unpatch, patch])
def test_a_scheme_where_a_model_belongs(function):
    with pytest.raises(UnsupportedModel, match=r"'yarn:factor=4' is a scheme.*write patch\(model, 'yarn:factor=4'\)"):
        function("yarn:factor=4")


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50)),
        lambda: BertModel(
            BertConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32, vocab_size=50)
        ),
    ],
)
def test_a_table_of_positions_names_the_scheme_that_extends_it(make):
    with pytest.raises(UnsupportedModel, match="'hierarchical' does"):
        patch(make(), "rerope:window=5")


def small_t5():
    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 1, "d_ff": 32, "vocab_size": 50}
    return T5ForConditionalGeneration(T5Config(**sizes))


@pytest.mark.parametrize("scheme", ["yarn:factor=4", "pi:factor=2", "dynamic_ntk:factor=2", "yarn:factor=4+logn"])
def test_a_rotation_is_scaled_where_there_is_none_only_if_you_say_so(scheme):
    model = small_t5()
    with pytest.raises(
        UnsupportedModel, match=f"it was trained with a learned bias.*{re.escape(scheme)}', allow_untrained=True"
    ):
        patch(model, scheme)
    assert current_scheme(model) is None
    with pytest.warns(RopePatchWarning, match="needs training under"):
        patch(model, scheme, allow_untrained=True)
    with pytest.raises(UnsupportedModel, match="trained with a learned bias"):
        patch(model, "ntk:factor=2", replace=True)
    assert spelled(current_scheme(model)) == scheme


@pytest.mark.parametrize("scheme", ["rope", "rerope:window=8", "yarn:factor=2+t5", "alibi", "logn", "nope"])
def test_what_needs_no_trained_rotation_is_put_into_a_t5(scheme):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RopePatchWarning)
        assert patch(small_t5(), scheme).scheme is not None
