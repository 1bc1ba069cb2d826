"""Bad input: one clear line that names the thing, its value and what is allowed, and a model that stays as it was."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, ViTConfig, ViTModel

import rope_patch
from rope_patch import (
    AlreadyPatched,
    Compose,
    InvalidField,
    NotPatched,
    RopePatchError,
    SlotConflict,
    UnknownScheme,
    UnsupportedModel,
    get_scheme,
    native_scheme,
    patch,
    unpatch,
)
from rope_patch.schemes.reach import spelled
from rope_patch.schemes.shaw import ShawRelative
from rope_patch.schemes.tools.tables import MOST_NUMBERS
from tests.cases import ALL, CASES, ROUTES
from tests.families import build
from tests.runs import logits, tokens
from tests.snapshots import snapshot


def assert_refused(model, error, said, *schemes, **options):
    """`patch` raises one line that contains all of `said`, and nothing changed."""
    before = snapshot(model)
    with pytest.raises(error) as caught:
        patch(model, *schemes, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in said:
        assert part in message
    assert isinstance(caught.value, RopePatchError)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("yarm", "yarn"), ("re_rop", "rerope"), ("selfextent", "self_extend"), ("chunk-attention", "dca"), ("", "")],
)
def test_an_unknown_scheme(llama, name, suggestion):
    said = [
        repr(name),
        f"did you mean {suggestion!r}, " if suggestion else "did you mean",
        "`rope-patch list` shows all",
    ]
    assert_refused(llama, UnknownScheme, said, name)
    assert_refused(llama, KeyError, said, name)


@pytest.mark.parametrize("thing", [3, RopePatchError, {"yarn"}])
def test_what_is_no_scheme_at_all(llama, thing):
    assert_refused(llama, UnknownScheme, [repr(thing), "yarn"], thing)


@pytest.mark.parametrize(
    ("schemes", "fields", "said"),
    [
        ((), {}, ["no scheme was given"]),
        (("yarn",), {}, ["yarn needs factor"]),
        (("self_extend",), {"window": 8}, ["self_extend needs group_size"]),
        (("yarn",), {"facter": 8}, ["'facter'", "did you mean 'factor'?"]),
        (("yarn:facter=8",), {}, ["'facter'", "did you mean 'factor'?"]),
        (("yarn:8",), {}, ["'8'", "field=value"]),
        (("yarn:factor={[]:0}",), {}, ["factor='{[]:0}'", "a number of at least 1"]),
        (("rerope:window=8,window=9",), {}, ["'rerope:window=8,window=9'", "'window' twice"]),
        (("yarn:factor=2, factor =2",), {}, ["'factor' twice"]),
        (("rope",), {"factor": 8}, ["rope has no field 'factor'", "none"]),
        (("yarn", "logn"), {"factor": 8}, ["factor=8 with several schemes", "write 'yarn:factor=8+logn'"]),
        (("yarn:factor=8",), {"factor": 8}, ["factor", "one plain name only"]),
        ((get_scheme("logn"),), {"clip": True}, ["write 'logn', clip=True, or LogN(clip=True)"]),
        (("yarn",), {"factor": 4, "beta_fast": 1, "beta_slow": 2}, ["beta_fast=1", "at least beta_slow=2"]),
        (("self_extend",), {"group_size": 2, "window": 8, "shift": "flor"}, ["shift='flor'", "did you mean 'floor'?"]),
        (("ntk",), {"factor": 2, "variant": "new"}, ["variant='new'", "fixed, old"]),
    ],
)
def test_an_unknown_missing_or_misplaced_field(llama, schemes, fields, said):
    assert_refused(llama, InvalidField, said, *schemes, **fields)
    assert_refused(llama, ValueError, said, *schemes, **fields)


WRONG_NUMBERS = [True, "4", None, float("nan"), float("inf"), 0, -1, (4,), 4j]


@pytest.mark.parametrize(
    ("name", "field", "others", "allowed"),
    [
        ("pi", "factor", {}, "a number of at least 1"),
        ("ntk", "factor", {}, "a number of at least 1"),
        ("yarn", "factor", {}, "a number of at least 1"),
        ("dynamic_ntk", "factor", {}, "a number of at least 1"),
        ("leaky_rerope", "factor", {"window": 8}, "a number of at least 1"),
        ("abf", "base", {}, "a number above 0"),
        ("rerope", "window", {}, "an integer of at least 1"),
        ("leaky_rerope", "window", {"factor": 2}, "an integer of at least 1"),
        ("self_extend", "window", {"group_size": 2}, "an integer of at least 1"),
        ("self_extend", "group_size", {"window": 8}, "an integer of at least 1"),
        ("window", "window", {}, "an integer of at least 1"),
        ("logn", "training_length", {}, "an integer of at least 2"),
        ("yarn", "original_max_position_embeddings", {"factor": 2}, "an integer of at least 1"),
        ("yarn", "attention_factor", {"factor": 2}, "a number above 0"),
        ("yarn", "beta_slow", {"factor": 2}, "a number above 0"),
        ("dynamic_ntk", "length", {}, "an integer of at least 1"),
    ],
)
@pytest.mark.parametrize("value", [*WRONG_NUMBERS, 0.5], ids=repr)
def test_a_wrong_number(llama, name, field, others, allowed, value):
    optional = type(get_scheme(CASES[name])).__dataclass_fields__[field].default is None
    if (value is None and optional) or (value == 0.5 and allowed == "a number above 0"):
        assert getattr(get_scheme(name, **{field: value}, **others), field) == value
    else:
        assert_refused(llama, InvalidField, [name, f"{field}={value!r}", allowed], name, **{field: value}, **others)


@pytest.mark.parametrize(("name", "field"), [("logn", "clip"), ("alibi", "symmetric")])
@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_wrong_switch(llama, name, field, value):
    assert_refused(llama, InvalidField, [f"{field}={value!r}", "True or False"], name, **{field: value})


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("mount", "lat", ["did you mean 'late'?", "auto, late"]),
        ("mount", None, ["auto, late"]),
        ("attention", "orcale", ["did you mean 'oracle'?"]),
        ("attention", "sdpa", ["auto", "chunked", "oracle"]),
        ("attention", None, ["auto", "chunked", "oracle"]),
    ],
)
def test_a_wrong_option(llama, option, value, allowed):
    assert_refused(llama, InvalidField, [f"{option}={value!r}", *allowed], "rerope:window=6", **{option: value})


@pytest.mark.parametrize(
    ("one", "other", "slot"),
    [
        ("yarn:factor=4", "pi:factor=2", "frequencies"),
        ("rope", "nope", "frequencies"),
        ("rerope:window=6", "self_extend:group_size=2,window=8", "segments"),
        ("window:window=6", "leaky_rerope:window=6,factor=2", "segments"),
    ],
)
def test_a_clash_names_both_schemes(llama, one, other, slot):
    said = [str(get_scheme(one)), str(get_scheme(other)), repr(slot)]
    assert_refused(llama, SlotConflict, said, one, other)
    assert_refused(llama, SlotConflict, said, f"{one}+{other}")
    with pytest.raises(SlotConflict):
        Compose(get_scheme(one), get_scheme(other))


@pytest.mark.parametrize("spec", ALL)
def test_patching_twice(llama, spec):
    handle = patch(llama, spec)
    before = snapshot(llama)
    for model in (llama, llama.model):  # also the part that carries it
        assert patch(model, spec) is handle
        with pytest.raises(AlreadyPatched, match="unpatch it before") as caught:
            patch(model, "pi:factor=3")
        assert f"carries {spelled(handle.scheme)};" in str(caught.value)
    assert snapshot(llama) == before
    handle.remove()


def test_unpatching_what_is_not_patched(llama):
    with pytest.raises(NotPatched, match="LlamaForCausalLM carries no scheme"):
        unpatch(llama)
    handle = patch(llama, "rope")
    handle.remove()
    with pytest.raises(NotPatched, match="does not carry rope any more"):
        handle.remove()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ViTModel(ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)),
        lambda: nn.Linear(2, 2),
        nn.Identity,
    ],
    ids=["vit", "linear", "identity"],
)
def test_a_model_without_a_stack(make):
    model = make()
    before = [(name, dict(vars(module))) for name, module in model.named_modules()]
    for act in (lambda: patch(model, "rerope:window=6"), lambda: native_scheme(model)):
        with pytest.raises(
            UnsupportedModel, match=f"{type(model).__name__} cannot be patched: found no module of rotary frequencies"
        ):
            act()
    assert [(name, dict(vars(module))) for name, module in model.named_modules()] == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=16, n_layer=1, n_head=2)),
        lambda: BertModel(BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)),
    ],
    ids=["gpt2", "bert"],
)
@pytest.mark.parametrize("spec", ["rerope:window=6", "yarn:factor=2", "alibi", "logn", "hierarchical+alibi"])
def test_schemes_of_attention_on_a_model_with_a_table_of_positions(make, spec):
    with pytest.raises(UnsupportedModel, match="adds learned positions to its input"):
        patch(make(), spec)


@pytest.mark.parametrize("thing", ["model", None, 3, torch.nn.Linear])
def test_what_is_no_model(thing):
    for act in (patch, lambda thing, _: native_scheme(thing)):
        with pytest.raises(UnsupportedModel, match="not a loaded model"):
            act(thing, "rope")


def test_a_number_of_slopes_that_does_not_fit(llama):
    assert_refused(llama, InvalidField, ["slopes has 2 values", "4 heads"], get_scheme("alibi:slopes=[1.0,0.5]"))


TABLES = [
    ("shaw", "max_distance"),
    ("deberta", "max_distance"),
    ("urpe", "max_distance"),
    ("learned", "num_positions"),
    ("multiplicative", "num_positions"),
    ("cope", "max_positions"),
    ("floater", "width"),
    ("fire", "width"),
    ("rnn", "width"),
]
"""Fields by which tables are sized that no memory may hold."""


@pytest.mark.parametrize("size", [2**32, 10**12, 10**18], ids=repr)
@pytest.mark.parametrize(("name", "field"), TABLES)
def test_a_table_that_no_memory_holds(llama, name, field, size):
    said = [name, f"{field}={size}", "too large for this model", f"at most {MOST_NUMBERS} are allowed"]
    assert_refused(llama, InvalidField, said, name, **{field: size})


@pytest.mark.parametrize("field", ["num_positions", "extend"])
def test_a_table_of_positions_that_no_memory_holds(field):
    config = BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = BertModel(config).eval()
    rows = model.embeddings.position_embeddings.weight
    with pytest.raises(InvalidField, match=f"learned:{field}={10**12}.*at most {MOST_NUMBERS} are allowed"):
        patch(model, "learned", **{field: 10**12})
    assert model.embeddings.position_embeddings.weight is rows
    assert not hasattr(model.config, "rope_patch")


def test_a_scheme_that_starts_by_values_is_not_measured(llama, monkeypatch):
    """Its tables cannot be made without memory, so their size is not known before."""
    start = ShawRelative.parameters

    def by_values(scheme, shape, random):
        return {name: table + float(table.sum()) for name, table in start(scheme, shape, random).items()}

    monkeypatch.setattr(ShawRelative, "parameters", by_values)
    with patch(llama, "shaw"):
        assert logits(llama, tokens()).isfinite().all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", ROUTES)
@pytest.mark.parametrize("mount", ["auto", "late"])
@pytest.mark.parametrize("step", range(12))
def test_an_installation_that_fails_half_way_leaves_nothing_behind(llama, monkeypatch, spec, mount, step):
    before, remaining = snapshot(llama), [step]

    class Failure(Exception):
        pass

    def failing(function):
        def call(*args, **kwargs):
            if remaining[0] == 0:
                raise Failure
            remaining[0] -= 1
            return function(*args, **kwargs)

        return call

    changes = rope_patch.mounting.undo.Changes
    with monkeypatch.context() as patched:
        for name in ("set", "hook", "settle_configs"):
            patched.setattr(changes, name, failing(getattr(changes, name)))
        patched.setattr(nn.Module, "register_forward_pre_hook", failing(nn.Module.register_forward_pre_hook))
        with pytest.raises(Failure):
            patch(llama, spec, mount=mount)
    assert snapshot(llama) == before
    with patch(llama, spec, mount=mount):
        logits(llama, tokens())
    assert snapshot(llama) == before


def test_errors_are_also_builtins():
    for name in dir(rope_patch.errors):
        error = getattr(rope_patch.errors, name)
        if isinstance(error, type) and issubclass(error, RopePatchError) and error is not RopePatchError:
            assert issubclass(error, (ValueError, KeyError, TypeError, ImportError, OSError))


def test_a_good_scheme_after_a_bad_one_works():
    model = build()
    assert_refused(model, InvalidField, ["window=0"], "rerope", window=0)
    with patch(model, "rerope", window=6):
        assert logits(model, tokens()).isfinite().all()
