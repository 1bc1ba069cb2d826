"""`target=`: a length fills the fields that are open, by rules from papers, released configs and arithmetic by hand."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch

import rope_patch
from rope_patch import (
    InvalidField,
    LogN,
    PositionInterpolation,
    ReRoPE,
    RoPE,
    SelfExtend,
    YaRN,
    describe,
    get_scheme,
    list_schemes,
    patch,
    plan_mounts,
    unpatch,
)
from rope_patch.models.find_stacks import read_stack
from rope_patch.schemes import Checkpoint, scheme_class, scheme_from_dict
from rope_patch.schemes.slots import Target
from rope_patch.schemes.target import LONGEST, reached, takes_target
from tests.cases import CASES
from tests.families import TRAINING_LENGTH, build
from tests.models import absolute_families
from tests.recipes import run_script
from tests.runs import logits, tokens
from tools import pictures, position_matrices

TAKERS = [name for name in list_schemes() if takes_target(scheme_class(name))]

TABLE = {"has_table": True}


def trained_at(length, **changes):
    return Checkpoint(length, num_heads=4, max_length=length, **changes)


def filled_by(name, target):
    """The fields that a length fills on a checkpoint trained at 512 tokens."""
    return scheme_class(name).fields_for(Target(name, target, trained_at(512), {}))


def spelled(name, target, **given):
    """A scheme that is to reach a length, with the fields that no length fills as in its tests."""
    usual = get_scheme(CASES[name])
    needed = {field.name for field in dataclasses.fields(usual) if field.default is dataclasses.MISSING}
    others = {field: getattr(usual, field) for field in needed - filled_by(name, target).keys()}
    return get_scheme(name, target=target, **{**others, **given})


# --- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "trained", "filled"),
    [
        # released: Yarn-Llama-2-7b-64k and -128k, Qwen2.5 at 128k, LLaMA-2-7B-32K, Phi-3-mini-128k
        ("yarn:target=65536", 4096, "yarn:factor=16.0"),
        ("yarn:target=131072", 4096, "yarn:factor=32.0"),
        ("yarn:target=131072", 32768, "yarn:factor=4.0"),
        ("pi:target=32768", 4096, "pi:factor=8.0"),
        (
            "longrope:target=131072,short_factor=[1.0],long_factor=[2.0]",
            4096,
            "longrope:factor=32.0,short_factor=[1.0],long_factor=[2.0]",
        ),
        # k = l / L
        ("ntk:target=1024", 256, "ntk:factor=4.0"),
        ("ntk:target=384,variant=old", 256, "ntk:factor=1.5,variant=old"),
        ("ntk_by_parts:target=1024", 256, "ntk_by_parts:factor=4.0"),
        ("ntk_mixed:target=1024,exponent=0.75", 256, "ntk_mixed:factor=4.0,exponent=0.75"),
        ("llama3:target=131072", 8192, "llama3:factor=16.0"),
        ("proportional:target=1024", 256, "proportional:factor=4.0"),
        ("t5:target=2048", 512, "t5:interpolation=4.0"),
        # at most L: nothing shrinks
        ("pi:target=100", 256, "pi:factor=1.0"),
        ("leaky_rerope:target=100", 256, "leaky_rerope:window=128,factor=1.0"),
        ("self_extend:target=256", 256, "self_extend:window=128,group_size=1"),
        # w + (l - w) / k = 128 + 896 / 7 = 256; the paper's longest text, (4096 - 1024) * 8 + 1024 = 25600
        ("leaky_rerope:target=1024", 256, "leaky_rerope:window=128,factor=7.0"),
        ("leaky_rerope:target=1024,window=64", 256, "leaky_rerope:window=64,factor=5.0"),
        ("self_extend:target=1024", 256, "self_extend:window=128,group_size=7"),
        ("self_extend:target=25600,window=1024", 4096, "self_extend:window=1024,group_size=8"),
        ("self_extend:target=25601,window=1024", 4096, "self_extend:window=1024,group_size=9"),
        # any length
        ("rerope:target=100000", 256, "rerope:window=128"),
        ("lm_infinite:target=100000", 256, "lm_infinite:local_window=256"),
        ("giraffe:target=100000", 256, "giraffe:cutoff_length=256"),
        ("dca:target=100000", 256, "dca"),
        ("window:target=100000", 256, "window"),
        ("dynamic_ntk:target=100000", 256, "dynamic_ntk"),
        ("dynamic_yarn:target=100000", 256, "dynamic_yarn"),
        # tables without rows behind their last one
        ("hierarchical:target=1000", 64, "hierarchical:num_positions=1000"),
        ("hierarchical:target=10", 64, "hierarchical:num_positions=64"),
        ("multiplicative:target=1000", 64, "multiplicative:num_positions=1000"),
        ("sinusoidal:target=1000", 64, "sinusoidal:num_positions=1000"),
        ("learned:target=1000", 64, "learned:num_positions=1000"),
        ("learned:target=64", 64, "learned"),
    ],
)
def test_a_length_fills_the_open_fields(spec, trained, filled):
    assert get_scheme(spec).reach(trained_at(trained)) == get_scheme(filled)


def test_a_table_of_the_checkpoint_is_extended():
    scheme = get_scheme("learned:target=1000,seed=3")
    assert scheme.reach(trained_at(64, **TABLE)) == get_scheme("learned:extend=1000,seed=3")
    assert get_scheme("learned:target=64").reach(trained_at(64, **TABLE)) == get_scheme("learned")
    given = get_scheme("learned:target=1000,num_positions=500")
    assert given.reach(trained_at(64, **TABLE)) == get_scheme("learned:num_positions=500")


@pytest.mark.parametrize("name", list_schemes())
def test_every_scheme_takes_a_target_or_refuses_it(name):
    if name in TAKERS:
        found = spelled(name, 4096).reach(trained_at(512))
        assert type(found) is scheme_class(name)
        assert found.resolve(trained_at(512)) == spelled(name, 4096).resolve(trained_at(512))
    else:
        takers = f"target=64 means nothing to {name}; schemes that take it: {', '.join(TAKERS)}"
        with pytest.raises(InvalidField, match=re.escape(takers)):
            get_scheme(name, target=64)


@pytest.mark.parametrize("name", TAKERS)
def test_given_fields_win(name):
    for field, value in filled_by(name, 4096).items():
        given = value // 2 if isinstance(value, int) else value + 1
        assert getattr(spelled(name, 4096, **{field: given}).reach(trained_at(512)), field) == given != value


def test_the_training_length_that_is_given_counts():
    scheme = get_scheme("yarn:target=8192,original_max_position_embeddings=1024").reach(trained_at(4096))
    assert scheme == YaRN(8.0, original_max_position_embeddings=1024)


# --- schemes that wait for a checkpoint ------------------------------------------------------------------------------


def test_a_scheme_that_waits_is_read_back_and_declares_what_it_becomes():
    scheme = get_scheme("yarn:target=8192,beta_fast=16")
    assert str(scheme) == "yarn:target=8192,beta_fast=16"
    assert scheme.to_dict() == {"name": "yarn", "target": 8192, "beta_fast": 16}
    same = (get_scheme(str(scheme)), scheme_from_dict(scheme.to_dict()), get_scheme("yarn", beta_fast=16, target=8192))
    assert all(other == scheme and hash(other) == hash(scheme) for other in (*same, copy.deepcopy(scheme)))
    assert scheme not in (get_scheme("yarn:target=8192"), get_scheme("yarn:target=8191,beta_fast=16"), YaRN(2.0))
    assert (scheme.name, scheme.slots, scheme.source) == ("yarn", frozenset({"frequencies"}), YaRN.source)
    assert get_scheme("pi:target=9").regime == PositionInterpolation.regime == "fine-tune"
    assert YaRN(2.0).reach(trained_at(4)) == YaRN(2.0)


def test_lists_survive():
    scheme = get_scheme("longrope:short_factor=[1.0,1.0],long_factor=[2.0,4.0]", target=512)
    assert scheme_from_dict(scheme.to_dict()) == get_scheme(str(scheme)) == scheme
    assert scheme.reach(trained_at(64)).long_factor == (2.0, 4.0)


@pytest.mark.parametrize("schemes", [("rerope+logn",), ("rerope", "logn"), ("logn", "rerope:window=4")])
def test_a_target_goes_to_every_part_that_it_means_something_to(llama, schemes):
    window = 4 if "window" in schemes[-1] else TRAINING_LENGTH // 2
    with patch(llama, *schemes, target=100) as handle:
        assert set(handle.scheme.parts()) == {ReRoPE(window), LogN()}
    both = get_scheme("yarn+self_extend", target=128)
    assert both.reach(trained_at(32)).parts() == (YaRN(4.0), SelfExtend(7, 16))


def test_each_part_may_have_a_target_of_its_own():
    scheme = get_scheme("yarn:target=64+self_extend:target=128")
    assert scheme.reach(trained_at(32)).parts() == (YaRN(2.0), SelfExtend(7, 16))
    assert scheme.resolve(trained_at(32)) == scheme.reach(trained_at(32))


def test_parts_of_a_model_need_the_same():
    scheme = get_scheme("yarn:target=64")
    assert reached(scheme, [trained_at(32), trained_at(32)]) == YaRN(2.0)
    assert reached(scheme, []) == scheme
    with pytest.raises(InvalidField, match=r"parts .* need yarn:factor=2\.0.* and yarn:factor=4\.0.*; set the fields"):
        reached(scheme, [trained_at(32), trained_at(16)])


# --- on models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "filled"),
    [
        ("yarn:target=128,beta_fast=16", "yarn:factor=4.0,beta_fast=16"),
        ("self_extend:target=128", "self_extend:window=16,group_size=7"),
        ("leaky_rerope:target=128+logn", "leaky_rerope:window=16,factor=7.0+logn"),
        ("dca:target=128", "dca"),
    ],
)
def test_a_patched_model_names_the_scheme_that_it_carries(llama, waiting, filled, tmp_path):
    with patch(llama, filled):
        expected = logits(llama, tokens())
    with patch(llama, waiting) as handle:
        assert handle.scheme == get_scheme(filled)
        assert "target" not in str(llama.config.rope_patch) + describe(llama) + repr(handle)
        assert torch.equal(logits(llama, tokens()), expected)
        llama.save_pretrained(tmp_path)
    loaded = rope_patch.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded, tokens()), expected)
    assert loaded.config.rope_patch["scheme"] == get_scheme(filled).to_dict()
    assert (
        plan_mounts(get_scheme(waiting), read_stack(llama)).scheme.parts()[0]
        == (get_scheme(filled).resolve(read_stack(llama).checkpoint).parts()[0])
    )


def test_a_longer_table_of_a_checkpoint():
    model, n = absolute_families.build("bert"), absolute_families.CAPACITY
    for spec, rows in (("learned", 3 * n), ("hierarchical", 3 * n), ("sinusoidal", 3 * n)):
        patch(model, spec, target=3 * n)
        assert len(absolute_families.table_of(model).weight) == rows
        unpatch(model)
    with pytest.raises(InvalidField, match=f"target={n * n + 1} is out of reach; .* {n} positions .* at most {n * n}"):
        patch(model, "hierarchical", target=n * n + 1)
    assert len(absolute_families.table_of(model).weight) == n


def test_a_model_without_a_table_gets_one(llama):
    ids = tokens(2 * TRAINING_LENGTH)
    with patch(llama, "learned", target=2 * TRAINING_LENGTH):
        assert logits(llama, ids).isfinite().all()


def test_the_command_line_knows_the_word(tmp_path, capsys):
    build("llama").save_pretrained(tmp_path)
    assert rope_patch.cli.main(["describe", "--model", str(tmp_path), "--scheme", "yarn:target=128"]) == 0
    assert "yarn:factor=4.0" in capsys.readouterr().out
    assert rope_patch.cli.main(["export", str(tmp_path), "--scheme", "ntk:target=128", "--json"]) == 0
    exported = capsys.readouterr().out
    assert '"ntk:factor=4.0' in exported
    assert '"length": 128' in exported
    assert pictures.name_of("yarn:target=128+logn") == "YaRN, target = 128, log-n"
    assert run_script(position_matrices, ["rerope:target=64", "--length", "40", "--training-length", "8"]) == 0
    assert capsys.readouterr().out.split()[-40] == "4"  # the distance from the last token to the first


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schemes", "fields", "said"),
    [
        *((("yarn",), {"target": value}, [f"yarn: target={value!r}", "whole number of tokens from 1"])
          for value in (0, -4, 2.5, 64.0, True, None, "64", "auto", LONGEST + 1, 10**400, float("nan"))),
        (("rope",), {"target": 64}, ["target=64 means nothing to rope", "self_extend"]),
        (("abf",), {"target": 64}, ["target=64 means nothing to abf", "ntk"]),
        (("alibi+logn",), {"target": 64}, ["target=64 means nothing to alibi and logn"]),
        (("alibi", "logn"), {"target": 64}, ["target=64 means nothing to alibi and logn"]),
        (("yarn:target=64",), {"target": 64}, ["target=64 and target=64", "once"]),
        ((RoPE(),), {"target": 64}, ["target=64"]),
        (("yarn", LogN()), {"target": 64}, ["target=64"]),
        (("yarn:beta_fast=16",), {"target": 64, "factor": 2}, ["factor", "one plain name only"]),
        (("yarn:target=64,beta_fast=slow",), {}, ["beta_fast='slow'", "a number"]),
        (("yarn:target=64,facter=2",), {}, ["'facter'", "did you mean 'factor'?"]),
        (("yarn:targt=64",), {}, ["'targt'", "did you mean 'target'?"]),
        (("longrope:target=64",), {}, ["longrope needs short_factor, long_factor"]),
        (("yarn:factor=auto",), {}, ["factor='auto'", "target=auto"]),
        (("self_extend:target=128,window=32",), {}, ["self_extend: window=32", "target=128", "training length of 32"]),
        (("rerope",), {"target": 128, "window": 40}, ["rerope: window=40", "target=128", "training length of 32"]),
        (("leaky_rerope:target=128,window=32",), {}, ["leaky_rerope: window=32", "target=128"]),
        (("hierarchical:target=1025",), {}, ["target=1025 is out of reach", "at most 1024"]),
    ],
)  # fmt: skip
def test_what_cannot_be_reached_is_said(llama, schemes, fields, said):
    with pytest.raises(InvalidField) as caught:
        patch(llama, *schemes, **fields)
    message = str(caught.value)
    assert [part for part in said if part not in message] == []
    assert "\n" not in message
    assert not hasattr(llama.config, "rope_patch")


@pytest.mark.parametrize("spec", ["yarn:target=64,beta_fast=x", "rerope:target=64,window=0", "yarn:target=64,x=1"])
def test_wrong_fields_are_known_before_there_is_a_model(spec):
    with pytest.raises(InvalidField):
        get_scheme(spec)
