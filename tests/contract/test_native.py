"""The scheme that a checkpoint has already changes nothing, and any other changes something."""

import pytest
import torch

from rope_patch import RoPE, UnsupportedModel, get_scheme, native_scheme, patch
from rope_patch.attention import behind_cache
from rope_patch.models.rope_entries import rope_entries
from tests.cases import ALL
from tests.families import FOLLOWING, RUN, SCALED, TRAINING_LENGTH, build, config_of
from tests.runs import LENGTH, assert_close, generated, logits, tokens

NATIVE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": TRAINING_LENGTH,
    },
}


def test_a_nested_truncate_means_nothing_as_in_transformers():
    yarn = {**NATIVE["yarn"], "truncate": False}
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    model = build("gemma3", rope_parameters={"full_attention": yarn, "sliding_attention": sliding})
    expected = logits(model, tokens())
    with patch(model, native_scheme(model)):
        assert torch.equal(logits(model, tokens()), expected)


@pytest.mark.parametrize("family", RUN)
def test_native_scheme_is_a_no_op_bit_for_bit(model, monkeypatch):
    monkeypatch.setattr(behind_cache, "SMALL", 2**18)  # in one block, as Baichuan scores its own bias
    expected = logits(model, tokens(rows=2))
    with patch(model, native_scheme(model)):
        assert torch.equal(logits(model, tokens(rows=2)), expected)


@pytest.mark.parametrize("family", RUN)
@pytest.mark.parametrize("attention", ["auto", "oracle", "chunked"])
def test_native_scheme_mounted_late_is_a_no_op_to_rounding(model, attention):
    expected = logits(model, tokens(rows=2))
    with patch(model, native_scheme(model), mount="late", attention=attention):
        assert_close(logits(model, tokens(rows=2)), expected)


@pytest.mark.parametrize("rope_type", NATIVE)
@pytest.mark.parametrize("mount", ["auto", "late"])
def test_native_scheme_is_read_from_rope_parameters(rope_type, mount):
    model = build(rope_parameters=NATIVE[rope_type])
    scheme = native_scheme(model)
    assert scheme.rope_type == rope_type
    for length in (TRAINING_LENGTH - 1, LENGTH):
        # a fresh model each time, because `dynamic` of Transformers remembers the longest call
        expected = logits(build(rope_parameters=NATIVE[rope_type]), tokens(length))
        with patch(build(rope_parameters=NATIVE[rope_type]), scheme, mount=mount) as handle:
            assert_close(logits(handle.model, tokens(length)), expected)


def test_a_native_type_without_a_scheme_is_said(llama):
    llama.config.rope_parameters = {"rope_type": "spiral", "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModel, match="'spiral'"):
        native_scheme(llama)


@pytest.mark.parametrize("family", RUN)
def test_beam_search_under_the_native_scheme_is_unchanged(model):
    ids = tokens(12, rows=2)
    expected = generated(model, ids, num_beams=3)
    with patch(model, native_scheme(model), mount="late"):
        assert torch.equal(generated(model, ids, num_beams=3), expected)


@pytest.mark.parametrize("spec", [spec for spec in ALL if spec != "rope"])
def test_every_other_scheme_changes_the_logits(llama, spec):
    expected = logits(llama, tokens())
    with patch(llama, spec):
        assert (logits(llama, tokens()) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("family", RUN)
def test_positions_matter_to_every_family(model):
    expected = logits(model, tokens())
    with patch(model, "nope"):
        assert (logits(model, tokens()) - expected).abs().max() > 1e-2


def test_a_window_that_holds_the_whole_text_is_rope(llama):
    expected = logits(llama, tokens())
    for spec in ("rerope:window=41", "leaky_rerope:window=41,factor=4", "self_extend:group_size=4,window=41"):
        with patch(llama, spec):
            assert_close(logits(llama, tokens()), expected)
    with patch(llama, "window", window=LENGTH):
        assert_close(logits(llama, tokens()), expected)


def test_rope_beside_a_bias_keeps_the_rotation(llama):
    plain = get_scheme("alibi")
    with patch(llama, plain):
        replaced = logits(llama, tokens())
    with patch(llama, RoPE(), plain):
        assert (logits(llama, tokens()) - replaced).abs().max() > 1e-2


@pytest.mark.parametrize("family", FOLLOWING)
@pytest.mark.parametrize("spec", ["rerope:window=6", "self_extend:group_size=4,window=7", "dca:chunk_size=9"])
def test_segments_on_a_checkpoint_whose_tables_follow_the_length_have_no_memory(model, family, spec):
    with patch(model, spec):
        before = logits(model, tokens(TRAINING_LENGTH))
        longer = logits(model, tokens(2 * LENGTH))
        assert torch.equal(logits(model, tokens(TRAINING_LENGTH)), before)
    with patch(build(family), spec, mount="late", attention="oracle") as handle:
        assert_close(logits(handle.model, tokens(2 * LENGTH)), longer)


@pytest.mark.parametrize("family", SCALED)
@pytest.mark.parametrize("length", [TRAINING_LENGTH - 1, LENGTH])
def test_a_wide_window_on_a_scaled_checkpoint_is_that_checkpoint(family, length):
    expected = logits(build(family), tokens(length))
    with patch(build(family), "rerope", window=LENGTH) as handle:
        assert_close(logits(handle.model, tokens(length)), expected)


@pytest.mark.parametrize("family", SCALED)
def test_scaled_checkpoints_are_others_than_plain_ones(family):
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    nested = None not in rope_entries(config_of(family))
    by_type = {"full_attention": plain, "sliding_attention": {**plain, "rope_theta": 500.0}}
    other = build(family, rope_parameters=by_type if nested else plain)
    assert (logits(build(family), tokens()) - logits(other, tokens())).abs().max() > 1e-2
