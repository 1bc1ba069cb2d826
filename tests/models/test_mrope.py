"""Whole models of images and text: every scheme on text, and on images those that leave positions to the model."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, StaticCache

import rope_patch
from rope_patch import UnsupportedPositions, describe, export_rope_parameters, native_scheme, patch, repatch, unpatch
from rope_patch.models.find_stacks import read_stack
from tests.cases import CASES, REPRESENTATIVE, ROUTES
from tests.families import TRAINING_LENGTH, from_config
from tests.families import config_of as config_of_text
from tests.models.mrope_families import FAMILIES, IMAGE, build, with_image
from tests.runs import assert_close, cached_logits, generated, left_padded, logits, positions_of
from tests.runs import tokens as any_tokens
from tests.snapshots import snapshot

LATE = [spec for spec in ROUTES if spec not in (CASES["yarn"], CASES["logn"])]
WITH_TOWER = [family for family in FAMILIES if family not in ("paddleocr_vl", "cosmos3_edge", "cosmos3_omni")]
"""Families whose towers take pixels in the form of Qwen's."""

of_each_kind = pytest.mark.parametrize("family", [f for f in ("qwen2_vl", "qwen3_5", "glm4v_moe") if f in FAMILIES])
"""One whose stack gives its layers no positions, one with a row of the text, and one that passes on all axes."""


def tokens(length=TRAINING_LENGTH + 8, rows=1, seed=0):
    """Text without image tokens."""
    return any_tokens(length, rows, seed) % (IMAGE - 1) + 1


def on_axes(length=36, rows=1):
    """Positions of a text with an image in it, two tokens by two, `(3, rows, length)`."""
    time = torch.cat([torch.arange(8), torch.full((4,), 8), torch.arange(10, length - 2)])
    row, column = time.clone(), time.clone()
    row[8:12], column[8:12] = torch.tensor([8, 8, 9, 9]), torch.tensor([8, 9, 8, 9])
    return torch.stack([time, row, column])[:, None].expand(-1, rows, -1)


@torch.no_grad()
def run(model, inputs):
    return model(**inputs, use_cache=False).logits


@pytest.fixture
def model(family):
    return build(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stack_of_text_is_found_beside_the_tower(model):
    stack = read_stack(model)
    assert stack.module is model.get_decoder()
    assert {tables.axes for tables in stack.rotary} == {3}


@pytest.mark.parametrize("family", WITH_TOWER)
@pytest.mark.parametrize("mount", ["auto", "late"])
def test_native_scheme_is_a_no_op(model, mount):
    text, image = tokens(rows=2), with_image()
    expected, with_picture = logits(model, text), run(model, image)
    with patch(model, native_scheme(model), mount=mount):
        assert torch.equal(logits(model, text), expected)
        if mount == "auto":
            assert torch.equal(run(model, image), with_picture)
    assert torch.equal(run(model, image), with_picture)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("family", "plain"), [("qwen2_vl", "qwen2"), ("qwen2_5_vl", "qwen2"), ("qwen3_vl", "qwen3")])
@pytest.mark.parametrize("spec", REPRESENTATIVE)
@pytest.mark.usefixtures("trained_parameters")
def test_a_text_is_read_as_by_the_model_of_text_with_these_weights(family, plain, spec):
    model = build(family)
    config, text = config_of_text(plain, head_dim=16), model.config.get_text_config()
    for name in ("num_hidden_layers", "num_key_value_heads", "hidden_size", "intermediate_size", "rms_norm_eps"):
        setattr(config, name, getattr(text, name))
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    reference = from_config(config)
    reference.model.load_state_dict(model.get_decoder().state_dict())
    reference.lm_head.load_state_dict(model.lm_head.state_dict())
    batch, mask = left_padded([tokens(), tokens(23)])
    inputs = {"attention_mask": mask, "position_ids": positions_of(mask)}
    with patch(reference, spec):
        expected = logits(reference, batch, **inputs)
    with patch(model, spec):
        assert_close(logits(model, batch, **inputs)[mask.bool()], expected[mask.bool()])


@of_each_kind
@pytest.mark.parametrize("spec", ROUTES)
def test_equal_axes_are_positions_of_a_text_in_whatever_form(model, spec):
    # without a row of the text, a query scale counts tokens
    ids, positions = tokens(rows=2), torch.arange(TRAINING_LENGTH + 8) + 3 * (spec != CASES["logn"])
    with patch(model, spec):
        expected = logits(model, ids, position_ids=positions.expand(2, -1))
        for axes in (1, 3, 4):
            planes = positions.expand(axes, 2, -1)
            assert torch.equal(logits(model, ids, position_ids=planes), expected)
            assert torch.equal(logits(model, ids, position_ids=planes.contiguous()), expected)
        assert_close(logits(model, ids), logits(model, ids, position_ids=torch.arange(len(positions)).expand(2, -1)))


@of_each_kind
@pytest.mark.parametrize("spec", [*ROUTES, CASES["sinusoidal"]])
def test_generate_on_a_left_padded_batch_equals_its_rows(model, spec):
    rows = [tokens(30), tokens(20, seed=1), tokens(8, seed=2)]
    batch, mask = left_padded(rows)
    with patch(model, spec):
        expected = torch.cat([generated(model, row) for row in rows])
        assert torch.equal(generated(model, batch, attention_mask=mask), expected)
        assert torch.equal(generated(model, batch, attention_mask=mask, cache_implementation="static"), expected)


@of_each_kind
@pytest.mark.parametrize("spec", ROUTES)
def test_a_cache_gives_the_same_logits(model, spec):
    ids = tokens(rows=2)
    text = model.config.get_text_config()
    with patch(model, spec):
        expected = logits(model, ids)
        for cache in (None, StaticCache(config=text, max_cache_len=ids.shape[1] + 3)):
            sizes = [20, ids.shape[1] - 22, 1, 1]
            assert_close(cached_logits(model, ids, sizes, cache=cache), expected)


def scaled(rotary, spec):
    """Frequencies by the formula of the scheme, on the frequencies of the checkpoint: Chen et al. 2306.15595, and
    b' = b factor^(d / (d - 2)) for NTK.
    """
    dim = 2 * len(rotary.inv_freq)
    if spec == "pi:factor=4":
        return rotary.inv_freq.double() / 4
    return (1e4 * 4 ** (dim / (dim - 2))) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["pi:factor=4", "ntk:factor=4"])
def test_static_frequencies_are_exact_where_axes_differ(model, family, spec):
    ids, reference = tokens(36), build(family)
    rotary = reference.get_decoder().rotary_emb
    rotary.inv_freq = scaled(rotary, spec).to(rotary.inv_freq)
    inputs = {"position_ids": on_axes()}
    assert (logits(model, ids, **inputs) - logits(model, ids)).abs().max() > 1e-3
    with patch(model, spec):
        assert_close(logits(model, ids, **inputs), logits(reference, ids, **inputs))
        if family in WITH_TOWER:
            assert_close(run(model, with_image()), run(reference, with_image()))


@of_each_kind
def test_generating_after_an_image_is_exact_under_static_frequencies(model, family):
    reference, inputs = build(family), with_image()
    rotary = reference.get_decoder().rotary_emb
    rotary.inv_freq = scaled(rotary, "pi:factor=4").to(rotary.inv_freq)
    with patch(model, "pi", factor=4):
        found = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, reference.generate(**inputs, max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize("family", WITH_TOWER)
@pytest.mark.parametrize("spec", [*LATE, CASES["sinusoidal"]])
def test_schemes_that_place_tokens_on_one_axis_refuse_images_by_name(model, spec):
    name = spec.partition(":")[0]
    with patch(model, spec):
        expected = logits(model, tokens())
        said = rf"position_ids of shape \(3, 1, 36\) differ .* \(mRoPE, for images\), but .*{name}.*static frequencies"
        with pytest.raises(UnsupportedPositions, match=said) as caught:
            run(model, with_image())
        assert "\n" not in str(caught.value)
        with pytest.raises(UnsupportedPositions, match="mRoPE"):
            model.generate(**with_image(), max_new_tokens=2)
        assert torch.equal(logits(model, tokens()), expected)


@pytest.mark.parametrize("family", ["qwen2_vl", "glm4v_moe"])
@pytest.mark.parametrize("form", ["image", "row of the text", "three axes"])
def test_a_query_scale_counts_tokens_also_where_axes_differ(model, family, form):
    """lambda(m) = max(1, ln(m + 1) / ln L) on the queries of a model whose rotation is linear in them."""
    inputs = {"image": with_image(), "three axes": {"input_ids": tokens(36), "position_ids": on_axes()}}
    row = torch.cat([torch.arange(36).expand(1, 1, -1), on_axes()])
    inputs["row of the text"] = {"input_ids": tokens(36), "position_ids": row}
    reference = build(family)
    scale = (torch.log(torch.arange(36) + 1.0) / math.log(8)).clamp(min=1)
    for layer in reference.get_decoder().layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, out: out * scale[:, None])
    with patch(model, "logn", training_length=8):
        assert_close(run(model, inputs[form]), run(reference, inputs[form]))


@pytest.mark.one_in(6)
@of_each_kind
@pytest.mark.parametrize("spec", [CASES["rerope"], CASES["yarn"]])
def test_one_graph_reads_text_and_stops_at_an_image(model, spec):
    stack, ids = model.get_decoder(), tokens()
    planes = torch.arange(ids.shape[1]).expand(3, 1, -1).contiguous()
    apart = on_axes(ids.shape[1])
    with patch(stack, spec), torch.no_grad():
        expected = stack(ids, position_ids=planes, use_cache=False).last_hidden_state
        compiled = torch.compile(stack, backend="eager")
        assert_close(compiled(ids, position_ids=planes, use_cache=False).last_hidden_state, expected)
        if spec == CASES["yarn"]:
            expected = stack(ids, position_ids=apart, use_cache=False).last_hidden_state
            assert_close(compiled(ids, position_ids=apart, use_cache=False).last_hidden_state, expected)
        else:
            with pytest.raises((RuntimeError, UnsupportedPositions), match="mRoPE"):
                compiled(ids, position_ids=apart, use_cache=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", WITH_TOWER)
@pytest.mark.parametrize("spec", [CASES["yarn"], CASES["rerope"]])
def test_saving_loading_and_taking_back_a_whole_model(model, spec, tmp_path):
    ids = tokens()
    plain, before = logits(model, ids), snapshot(model, lambda model: logits(model, ids))
    with patch(model, spec):
        assert spec.partition(":")[0] in describe(model)
        expected = logits(model, ids)
    assert snapshot(model, lambda model: logits(model, ids)) == before
    with patch(model, spec):
        model.save_pretrained(tmp_path)
    loaded = rope_patch.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids), expected)
    assert torch.equal(logits(unpatch(loaded).model, ids), plain)
    found = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    repatch(found)
    assert torch.equal(logits(found, ids), expected)


@of_each_kind
def test_a_patch_of_the_text_alone_is_that_of_the_whole(model):
    with patch(model, "rerope", window=6):
        expected = logits(model, tokens())
    with patch(model.get_decoder(), "rerope", window=6):
        assert torch.equal(logits(model, tokens()), expected)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "cosmos3_edge"])  # has no types
def test_exported_parameters_keep_the_sections(family):
    config = build(family).config.get_text_config()
    exported = export_rope_parameters(rope_patch.get_scheme("yarn:factor=4"), config)
    kept = {"mrope_section", "mrope_interleaved", "partial_rotary_factor", "rope_theta"} & config.rope_parameters.keys()
    assert {key: exported[key] for key in kept} == {key: config.rope_parameters[key] for key in kept}
    plain = build(family, **exported)
    inputs = {"position_ids": on_axes()}
    with patch(build(family), "yarn", factor=4) as handle:
        assert_close(logits(handle.model, tokens(36), **inputs), logits(plain, tokens(36), **inputs))


@of_each_kind
@pytest.mark.parametrize("spec", [*ROUTES, *(CASES[name] for name in ("self_extend", "sinusoidal", "dynamic_ntk"))])
def test_the_stack_alone_counts_tokens_and_not_left_pads(model, spec):
    rows = [tokens(36), tokens(20, seed=1), tokens(8, seed=2)]
    batch, mask = left_padded(rows)
    with patch(model, spec), torch.no_grad():
        vectors = model.get_input_embeddings()(batch)
        for stack, inputs in ((model, {"input_ids": batch}), (model.get_decoder(), {"inputs_embeds": vectors})):
            found = stack(**inputs, attention_mask=mask, use_cache=False)[0]
            for each, row in zip(found, rows, strict=True):
                assert_close(each[None, -row.shape[1] :], stack(row, use_cache=False)[0])


@pytest.mark.parametrize("spec", [CASES[name] for name in ("logn", "self_extend", "dynamic_ntk", "rerope")])
def test_masks_that_a_model_of_images_prepares_show_pads_too(spec):
    text = {**config_of_text("gemma3").to_dict(), "vocab_size": 97}
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config={**tower, "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )
    model = from_config(config, AutoModelForImageTextToText)
    rows = [tokens(36), tokens(20, seed=1), tokens(8, seed=2)]
    batch, mask = left_padded(rows)
    with patch(model, spec):
        found = logits(model, batch, attention_mask=mask)
        for each, row in zip(found, rows, strict=True):
            assert_close(each[None, -row.shape[1] :], logits(model, row))
