"""Every way to execute a scheme gives the same logits and the same gradients."""

import itertools

import pytest
import torch

from rope_patch import get_scheme, native_scheme, patch
from rope_patch.attention.executors import chunked
from tests.cases import ALL, REPRESENTATIVE, ROUTES
from tests.families import BIASED, FOLLOWING, NORMED, RUN, SCALED, SHARED_TABLES
from tests.runs import (
    assert_close,
    assert_same_gradients,
    gradients,
    left_padded,
    logits,
    positions_of,
    scales_tables,
    tokens,
)

STATIC = [
    spec
    for spec in ALL
    if (scheme := get_scheme(spec)).slots == {"frequencies"}
    and not (scheme.length_dependent or scheme.learned_frequencies or scheme.decays)
]
STATIC_ON_TABLES = [
    (family, spec)
    for family in RUN
    if family not in SHARED_TABLES | BIASED
    for spec in STATIC
    if family not in FOLLOWING or not get_scheme(spec).refines  # it refines what follows the length
    if family not in NORMED or not scales_tables(get_scheme(spec))
    if not get_scheme(spec).by_head  # a table has one set of frequencies
]
MODES = ["oracle", "chunked", "segmented", "auto"]


def by_modes(model, spec):
    """Patches the model once for each other mode than the oracle; once at all where tables are all that changes."""
    for mode in MODES[1:]:
        with patch(model, spec, attention=mode) as handle:
            yield mode
        if not handle.plan.late:
            return


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("family", "spec"), STATIC_ON_TABLES)
def test_rotary_mount_equals_late_mount(model, spec):
    with patch(model, spec) as handle:
        assert handle.plan.rotary
        assert not handle.plan.late
        expected = logits(model, tokens(rows=2))
    with patch(model, spec, mount="late") as handle:
        assert handle.plan.late
        assert not handle.plan.rotary
        assert_close(logits(model, tokens(rows=2)), expected)


@pytest.mark.parametrize("family", RUN)
@pytest.mark.parametrize("spec", REPRESENTATIVE)
def test_logits_equal_those_of_the_literal_way(model, spec):
    batch, mask = left_padded([tokens(), tokens(17)])
    inputs = {"attention_mask": mask, "position_ids": positions_of(mask)}
    with patch(model, spec, mount="late", attention="oracle"):
        expected = logits(model, batch, **inputs)[mask.bool()]
    for mode in by_modes(model, spec):
        assert_close(logits(model, batch, **inputs)[mask.bool()], expected, by=mode)


@pytest.mark.parametrize(("family", "spec"), [*itertools.product(["llama"], ALL), *itertools.product(SCALED, ROUTES)])
def test_gradients_equal_those_of_the_literal_way(model, spec):
    if get_scheme(spec).learns:
        model.double()  # a parameter that all pairs share has a small sum of large gradients
    with patch(model, spec, mount="late", attention="oracle"):
        expected = gradients(model, tokens(rows=2))
    for mode in by_modes(model, spec):
        assert_same_gradients(gradients(model, tokens(rows=2)), expected, mode)


def test_small_blocks_really_split_the_queries(llama, monkeypatch):
    calls = []
    attend = chunked.reference.attend
    monkeypatch.setattr(chunked.reference, "attend", lambda inputs: calls.append(inputs.q_length) or attend(inputs))
    with patch(llama, "rerope", window=6, attention="chunked"):
        logits(llama, tokens())
    assert len(calls) > 2 * llama.config.num_hidden_layers
    assert sum(calls) == tokens().shape[1] * llama.config.num_hidden_layers


@pytest.mark.parametrize("family", RUN)
def test_a_literal_native_scheme_has_the_gradients_of_the_plain_model(model):
    expected, native = gradients(model, tokens(rows=2)), native_scheme(model)
    for mode in MODES:
        with patch(model, native, mount="late", attention=mode):
            assert_same_gradients(gradients(model, tokens(rows=2)), expected, mode)


@pytest.mark.parametrize("spec", ALL)
def test_eager_attention_hands_out_the_patched_weights(llama, spec):
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        plain = llama(tokens(), output_attentions=True).attentions[0]
        with patch(llama, spec):
            found = llama(tokens(), output_attentions=True).attentions[0]
    if "weight_factor" not in get_scheme(spec).methods:
        torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1]))
    assert not found.triu(1).any()
    assert torch.equal(found, plain) == (spec == "rope")


def test_eager_weights_are_zero_beyond_the_window(llama):
    with patch(llama, "window", window=7):
        llama.set_attn_implementation("eager")
        weights = llama(tokens(), output_attentions=True).attentions
    for layer in weights:
        assert not layer.tril(-7).any()
        assert layer.diagonal(-6, -2, -1).all()


@pytest.mark.parametrize("spec", ALL)
def test_a_module_whose_attention_was_chosen_anew_keeps_its_positions(llama, spec):
    with patch(llama, spec) as handle:
        expected = logits(llama, tokens())
        for layer in llama.model.layers:
            layer.self_attn.config = llama.config
        found = logits(llama, tokens())
    if not handle.plan.late:
        assert torch.equal(found, expected)
    elif not handle.plan.rotary:
        assert torch.equal(found, logits(llama, tokens()))
    elif all(part.slots == {"embedding"} or "embedding" not in part.slots for part in handle.plan.scheme.parts()):
        kept = ({"frequencies"}, {"embedding"})
        # what fades is the attention function's; the frequencies below it are those of RoPE
        parts = (get_scheme("rope") if part.decays else part for part in handle.plan.scheme.parts())
        with patch(llama, *(part for part in parts if part.slots in kept)):
            assert_close(found, logits(llama, tokens()))
