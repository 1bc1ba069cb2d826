"""T5-style models: native biases, other schemes in their place, encoder and decoder, against a float64 T5."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
    T5EncoderModel,
)

import rope_patch
from rope_patch import AlreadyPatched, InvalidField, NotPatched, UnsupportedModel, describe, native_scheme, unpatch
from tests.models.t5_definition import Meaning, defined_logits
from tests.models.t5_families import FAMILIES, SPECS, build
from tests.runs import assert_close, assert_same_gradients, left_padded, tokens
from tests.snapshots import snapshot

apply = partial(rope_patch.patch, allow_untrained=True)  # also with rotations that T5 was not trained with

pytestmark = pytest.mark.usefixtures("trained_parameters")

BEYOND = 44
"""Tokens of a text beyond the training length and the distance of the last bucket."""


@pytest.fixture
def model(family):
    return build(family)


@pytest.fixture
def native(model):
    """The model, where its decoder is causal by itself: that of umT5 in Transformers 5.17 sees later tokens."""
    one, other = tokens(9, seed=1), tokens(9, seed=1)
    other[0, -1] = 1
    if not torch.equal(logits(model, target=one)[:, :-1], logits(model, target=other)[:, :-1]):
        pytest.skip("its own decoder sees later tokens")
    return model


@torch.no_grad()
def logits(model, ids=None, mask=None, target=None):
    ids = tokens(BEYOND) if ids is None else ids
    target = tokens(BEYOND, rows=len(ids), seed=1) if target is None else target
    return model(input_ids=ids, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits


def generated(model, ids, mask=None, **options):
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False, **options)


def gradients(model, ids, labels):
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


# --- the native scheme --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_native_scheme_changes_no_bit(native, attention):
    model = native
    model.set_attn_implementation(attention)
    ids, mask = left_padded([tokens(40, seed=2), tokens(25, seed=3), tokens(33, seed=4)])
    mask[0, 30:] = 0  # pads on the right, too
    before = logits(model, ids, mask), generated(model, ids, mask), generated(model, ids, mask, num_beams=2)
    scheme = native_scheme(model)
    assert scheme.name == "t5"
    assert (scheme.num_buckets, scheme.max_distance) == (16, 24)
    with apply(model, scheme):
        after = logits(model, ids, mask), generated(model, ids, mask), generated(model, ids, mask, num_beams=2)
    for one, other in zip(after, before, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_the_native_scheme_is_exact_on_long_texts(native, dtype, tolerance):
    model = native.to(dtype)
    ids, mask = left_padded([tokens(700, seed=2), tokens(520, seed=3)])
    before = logits(model, ids, mask, tokens(600, rows=2))
    with apply(model, "t5"):
        assert_close(logits(model, ids, mask, tokens(600, rows=2)), before, tolerance * before.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [30, 600])
def test_gradients_of_the_table_are_those_of_transformers(native, length):
    model = native
    ids, labels = tokens(length, rows=2, seed=5), tokens(length, rows=2, seed=6)
    expected = gradients(model, ids, labels)
    with apply(model, "t5"):
        found = gradients(model, ids, labels)
    assert any("relative_attention_bias" in name for name in expected)
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("family", ["t5", "umt5"])
@pytest.mark.parametrize("spec", ["t5", "t5:interpolation=4+logn:training_length=8"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_under_checkpointing_are_the_same(model, spec, reentrant):
    ids, labels = tokens(BEYOND, rows=2, seed=5), tokens(BEYOND, rows=2, seed=6)
    with apply(model, spec):
        model.train()
        expected = gradients(model, ids, labels)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        assert_same_gradients(gradients(model, ids, labels), expected)


# --- other schemes ------------------------------------------------------------------------------------------------


def slope(head, heads):
    return 2.0 ** (-8 * (head + 1) / heads)


def signed(distance, change):
    return np.sign(distance) * change(np.abs(distance))


def yarn(theta):
    """Factor 4, L = 32, heads of 8: the published ramp."""

    def corr(rotations):
        return 8 * math.log(32 / (2 * math.pi * rotations)) / (2 * math.log(10000))

    low, high = max(math.floor(corr(32)), 0), min(math.ceil(corr(1)), 7)
    ramp = 1 - np.clip((np.arange(4) - low) / max(high - low, 0.001), 0, 1)
    return theta / 4 * (1 - ramp) + theta * ramp


MEANINGS = {
    "t5": Meaning(relative=lambda r: r),
    "t5:interpolation=4": Meaning(relative=lambda r: int(r / 4)),
    "t5:max_distance=96": Meaning(relative=lambda r: r, farthest=96),
    "alibi": Meaning(bias=lambda head, heads, m, n: -slope(head, heads) * np.abs(m - n)),
    "rope": Meaning(distance=lambda m, n: m - n),
    "nope": Meaning(),
    "pi:factor=4": Meaning(distance=lambda m, n: (m - n) / 4),
    "ntk:factor=4": Meaning(
        distance=lambda m, n: m - n, frequencies=lambda theta: (10000 * 4 ** (8 / 6)) ** (-np.arange(4) / 4)
    ),
    "yarn:factor=4": Meaning(distance=lambda m, n: m - n, frequencies=yarn, temperature=0.1 * math.log(4) + 1),
    "rerope:window=6": Meaning(distance=lambda m, n: np.clip(m - n, -6, 6)),
    "leaky_rerope:window=6,factor=4": Meaning(
        distance=lambda m, n: signed(m - n, lambda d: np.where(d < 6, d, 6 + (d - 6) / 4))
    ),
    "window:window=7": Meaning(relative=lambda r: r, visible=lambda m, n: np.abs(m - n) < 7),
    "logn:training_length=8": Meaning(
        relative=lambda r: r, query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8))
    ),
    "t5+rerope:window=6": Meaning(relative=lambda r: r, distance=lambda m, n: np.clip(m - n, -6, 6)),
    "rope+alibi": Meaning(
        distance=lambda m, n: m - n, bias=lambda head, heads, m, n: -slope(head, heads) * np.abs(m - n)
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", MEANINGS)
@pytest.mark.parametrize("family", ["t5", "umt5"])
@pytest.mark.parametrize("attention", ["auto", "segmented", "oracle"])
def test_logits_are_those_of_the_definition(model, spec, attention):
    source, target = tokens(BEYOND, seed=7), tokens(BEYOND, seed=8)
    expected = torch.tensor(defined_logits(model, source, target, MEANINGS[spec]))
    with apply(model, spec, attention=attention):
        assert_close(logits(model, source, None, target)[0].double(), expected, 1e-4)


def test_the_definition_is_t5():
    model, source, target = build("flan"), tokens(BEYOND, seed=7), tokens(BEYOND, seed=8)
    expected = torch.tensor(defined_logits(model, source, target, MEANINGS["t5"]))
    # in float64 too Transformers' own model is 8e-5 away: it takes norms and softmax in float32
    assert_close(logits(model, source, None, target)[0].double(), expected, 3e-4)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", ["t5", "byt5", "umt5"])
def test_every_way_of_running_gives_the_same(model, spec):
    rows = [tokens(40, seed=2), tokens(25, seed=3), tokens(33, seed=4)]
    ids, mask = left_padded(rows)
    right = torch.stack([torch.nn.functional.pad(row[0], (0, 40 - row.shape[1])) for row in rows])
    target = tokens(BEYOND, rows=3, seed=9)
    with apply(model, spec) as handle:
        alone = torch.cat([logits(model, row, None, target[i : i + 1]) for i, row in enumerate(rows)])
        assert_close(logits(model, ids, mask, target), alone, 5e-5)
        assert_close(logits(model, right, (right != 0).long(), target), alone, 5e-5)
        if not handle.scheme.length_dependent:
            recomputed = generated(model, ids, mask, use_cache=False)
            assert torch.equal(generated(model, ids, mask), recomputed)
            assert torch.equal(generated(model, ids, mask, cache_implementation="static"), recomputed)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_removal_restores_every_bit(model, spec):
    before, config = snapshot(model, logits), model.config
    handle = apply(model, spec)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    model.zero_grad()
    generated(model, tokens(rows=2))
    unpatch(model)
    assert model.config is config
    assert snapshot(model, logits) == before
    with pytest.raises(NotPatched):
        handle.remove()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_half_precision_is_no_worse_than_by_definition(model, spec):
    with apply(model, spec):
        expected = logits(model)
    model.bfloat16()
    errors = []
    for attention in ("oracle", "auto", "segmented"):
        with apply(model, spec, attention=attention):
            errors.append((logits(model).float() - expected).norm())
    assert max(errors) < 1.3 * errors[0]


@pytest.mark.parametrize("spec", ["t5:interpolation=4", "logn:training_length=8", "t5+rerope:window=6"])
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_the_table_is_trained_under_other_schemes(model, spec):
    model.train()
    with apply(model, spec):
        found = gradients(model, tokens(600, seed=1), tokens(600, seed=2))
    with apply(model, spec, attention="oracle"):
        expected = gradients(model, tokens(600, seed=1), tokens(600, seed=2))
    tables = [name for name in found if "relative_attention_bias" in name]
    assert len(tables) == (2 if family_of(model) == "t5" else 4)
    assert all(found[name].abs().sum() > 0 for name in tables)
    for name in found:
        assert (found[name] - expected[name]).norm() <= 1e-3 * expected[name].norm() + 1e-6, name


def family_of(model):
    return model.config.model_type


# --- encoder and decoder ------------------------------------------------------------------------------------------


def test_encoder_and_decoder_may_carry_different_schemes():
    model = build()
    before = snapshot(model, logits)
    apply(model.encoder, "alibi")
    half = logits(model)
    with pytest.raises(AlreadyPatched):
        apply(model, "nope")
    apply(model.decoder, "t5:interpolation=2")
    both = logits(model)
    assert not torch.equal(half, both)
    assert "encoder" in describe(model)
    assert "interpolation=2" in describe(model)
    unpatch(model.encoder)
    with apply(model.encoder, "alibi"):
        assert torch.equal(logits(model), both)
    unpatch(model)
    assert snapshot(model, logits) == before


def test_cross_attention_is_left_as_it_is():
    model = build()
    seen = []
    for block in model.decoder.block:
        block.layer[1].EncDecAttention.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    logits(model)
    with apply(model.decoder, "t5"):
        logits(model)
    assert all(torch.equal(one, other) for one, other in zip(seen[:2], seen[2:], strict=True))


@pytest.mark.parametrize("spec", ["dca:chunk_size=9,local_window=2", "lm_infinite:local_window=7,n_global=3"])
def test_schemes_that_know_no_later_keys_are_for_the_decoder(spec):
    model = build()
    with pytest.raises(UnsupportedModel, match="both directions"):
        apply(model, spec)
    with apply(model.decoder, spec):
        ids = tokens(8, rows=2)
        assert torch.equal(generated(model, ids), generated(model, ids, use_cache=False))


def test_an_encoder_alone():
    model = T5EncoderModel(AutoConfig.for_model(**FAMILIES["t5"])).eval()
    ids, mask = left_padded([tokens(40, seed=2), tokens(25, seed=3)])
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask).last_hidden_state
        with apply(model, "t5"):
            after = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(after[mask == 1], before[mask == 1])


# --- memory -------------------------------------------------------------------------------------------------------


class Storages(TorchDispatchMode):
    """The most bytes of any tensor that an operator returned."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["t5", "umt5"])
@pytest.mark.parametrize("spec", ["t5", "alibi", "logn:training_length=8", "rerope:window=6"])
def test_no_bias_of_all_pairs_is_made(model, spec):
    length = 1100
    ids, mask = left_padded([tokens(length, seed=2), tokens(1000, seed=3)])
    with Storages() as plain:
        logits(model, ids, mask, tokens(length, rows=2))
    with apply(model, spec), Storages() as ours:
        logits(model, ids, mask, tokens(length, rows=2))
    per_head = 4 * length**2
    assert plain.largest >= 4 * per_head
    # PyTorch's attention turns the mask of the cross-attention's pads into numbers, for each row
    assert ours.largest <= 2 * per_head


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_a_cache_that_the_model_makes_itself_is_read_on(model, spec):
    ids, target = tokens(BEYOND, rows=2), tokens(30 if "dynamic" in spec else BEYOND, rows=2, seed=1)
    with apply(model, spec), torch.no_grad():
        whole = model(input_ids=ids, decoder_input_ids=target)
        assert_close(whole.logits, logits(model, ids, target=target))
        start = model(input_ids=ids, decoder_input_ids=target[:, :20])
        rest = model(
            encoder_outputs=(whole.encoder_last_hidden_state,),
            decoder_input_ids=target[:, 20:],
            past_key_values=start.past_key_values,
        )
        assert_close(torch.cat([start.logits, rest.logits], dim=1), whole.logits)


# --- saving, and what is refused ------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "spec", ["t5:interpolation=4", "alibi", "yarn:factor=4+logn", "shaw:max_distance=6", "rnn:width=16"]
)
def test_a_saved_model_comes_back_with_its_scheme(model, spec, tmp_path):
    plain = logits(model)
    with apply(model, spec):
        expected = logits(model)
        model.save_pretrained(tmp_path)
    loaded = rope_patch.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded), expected)
    assert torch.equal(logits(unpatch(loaded).model), plain)
    untouched = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(logits(untouched), plain)
    rope_patch.repatch(untouched)
    assert torch.equal(logits(untouched), expected)


def test_a_copy_and_an_eager_model_keep_the_scheme():
    model = build()
    with apply(model, "rerope:window=6"):
        expected = logits(model)
        assert torch.equal(logits(copy.deepcopy(model)), expected)
        for part in (model, model.encoder, model.decoder):
            part.set_attn_implementation("eager")
        assert_close(logits(model), expected, 1e-4)
        found = model(input_ids=tokens(9), decoder_input_ids=tokens(7), output_attentions=True)
    assert found.encoder_attentions[0].shape == (1, 4, 9, 9)
    assert_close(found.decoder_attentions[1].sum(-1), torch.ones(1, 4, 7))


def test_another_attention_after_the_patch_gets_its_own_biases():
    model = build()
    expected = logits(model)
    with apply(model, "alibi"):
        for block in (*model.encoder.block, *model.decoder.block):
            block.layer[0].SelfAttention.config = model.config
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_it_compiles_to_one_graph(model):
    with apply(model, "t5:interpolation=4"):
        expected = logits(model)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_close(logits(compiled), expected, 1e-4)


@pytest.mark.parametrize(("spec", "static"), [("t5", True), ("self_extend:group_size=4,window=7", False)])
def test_a_compiled_model_counts_no_pads_and_decodes_in_any_cache(spec, static):
    model = build(num_layers=1)  # whose very first call is a compiled one
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids, mask = left_padded([tokens(20), tokens(14, seed=1)])
    target = tokens(16, rows=2, seed=3)
    with apply(model, spec), torch.no_grad():
        found = logits(compiled, ids, mask, target)
        expected = logits(model, ids, mask, target)
        assert_close(found, expected)
        for row, length in enumerate((20, 14)):
            assert_close(
                expected[row : row + 1], logits(model, ids[row : row + 1, -length:], target=target[row : row + 1])
            )
        read = {"encoder_outputs": model.encoder(ids, attention_mask=mask), "attention_mask": mask}
        kind, options = (StaticCache, {"max_cache_len": 20}) if static else (DynamicCache, {})
        cache = EncoderDecoderCache(
            *(kind(config=model.config.get_text_config(decoder=True), **options) for _ in range(2))
        )
        steps = [model(**read, decoder_input_ids=target[:, :13], past_key_values=cache).logits]
        for place in range(13, 16):
            steps.append(compiled(**read, decoder_input_ids=target[:, place : place + 1], past_key_values=cache).logits)
        assert_close(torch.cat(steps, dim=1), expected)


def test_lora_on_a_patched_model():
    peft = pytest.importorskip("peft")
    model = build()
    apply(model, "t5:interpolation=4")
    expected = logits(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q", "v"], r=2))
    assert_close(logits(wrapped), expected)
    assert gradients(wrapped, tokens(), tokens())
    assert_close(logits(wrapped.merge_and_unload()), expected)


@pytest.mark.parametrize("model_type", ["longt5", "udop"])
def test_relatives_whose_attention_is_another_are_refused_by_name(model_type):
    values = {key: value for key, value in FAMILIES["t5"].items() if key != "model_type"}
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **values))
    with pytest.raises(UnsupportedModel, match=r"(?i)longt5|udop"):
        apply(model, "alibi")


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("t5:num_buckets=64", "64.*16"),
        ("t5:max_distance=4", "max_distance=4"),
        ("t5:interpolation=0.5", "interpolation=0.5"),
        ("alibi:slopes=[1.0,0.5]", "2 values.*4 heads"),
    ],
)
def test_fields_that_do_not_fit_are_named(spec, named):
    model = build()
    before = snapshot(model, logits)
    with pytest.raises(InvalidField, match=named):
        apply(model, spec)
    assert snapshot(model, logits) == before
