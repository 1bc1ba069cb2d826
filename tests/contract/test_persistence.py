"""Saving and loading: the scheme travels with the model, and plain Transformers still loads it."""

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import rope_patch
from rope_patch import (
    AlreadyPatched,
    InvalidField,
    NotExpressible,
    NotPatched,
    UnknownScheme,
    UnsupportedModel,
    describe,
    export_rope_parameters,
    get_scheme,
    native_scheme,
    patch,
    repatch,
    unpatch,
)
from rope_patch.models.find_stacks import read_stack
from tests.cases import ALL, ROUTES
from tests.families import NORMED, RUN, SHARED_TABLES, TRAINING_LENGTH, build, config_of, from_config
from tests.runs import LENGTH, assert_close, logits, scales_tables, tokens
from tests.snapshots import snapshot


def is_expressible(scheme, config):
    """Whether a config can have the scheme's parameters."""
    try:
        rope_patch.export_rope_parameters(scheme, config)
    except NotExpressible:
        return False
    return True


EXPRESSIBLE = [spec for spec in ALL if is_expressible(get_scheme(spec), config_of("llama"))]


def fits(scheme, model):
    """Whether a scheme with one number per pair has as many as this model turns."""
    stack = read_stack(model)
    try:
        return scheme.frequencies(stack.rotary[-1].spec(stack.training_length)) is not None
    except InvalidField:
        return False


def assert_round_trip(model, spec, folder):
    plain = logits(model, tokens())
    with patch(model, spec):
        expected = logits(model, tokens())
        model.save_pretrained(folder)
    loaded = rope_patch.from_pretrained(folder, attn_implementation=model.config._attn_implementation)
    assert torch.equal(logits(loaded, tokens()), expected)
    unpatch(loaded)
    assert torch.equal(logits(loaded, tokens()), plain)


@pytest.mark.parametrize("spec", ALL)
def test_a_saved_model_comes_back_under_its_scheme(llama, spec, tmp_path):
    assert_round_trip(llama, spec, tmp_path)


@pytest.mark.parametrize("family", RUN)
@pytest.mark.parametrize("spec", ROUTES)
def test_every_family_comes_back_under_its_scheme(model, spec, tmp_path):
    assert_round_trip(model, spec, tmp_path)


@pytest.mark.parametrize("family", RUN)
@pytest.mark.parametrize("spec", ROUTES)
def test_plain_transformers_loads_a_saved_model_and_repatch_restores_it(model, spec, tmp_path):
    plain = logits(model, tokens())
    with patch(model, spec):
        expected = logits(model, tokens())
        model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    assert not any("rope_patch" in str(module) for module in loaded.modules())
    found = logits(loaded, tokens())
    said_natively = loaded.config.rope_parameters != model.config.rope_parameters
    assert_close(found, expected if said_natively else plain)
    repatch(loaded)
    assert_close(logits(loaded, tokens()), expected)
    with pytest.raises(AlreadyPatched):
        repatch(loaded)


@pytest.mark.parametrize("spec", EXPRESSIBLE)
def test_a_scheme_that_transformers_loaded_natively_is_not_applied_twice(llama, spec, tmp_path):
    with patch(llama, spec):
        expected = logits(llama, tokens())
        llama.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    before = snapshot(loaded)
    repatch(loaded)
    assert_close(logits(loaded, tokens()), expected)
    unpatch(loaded)
    assert snapshot(loaded) == before
    with repatch(loaded):
        loaded.save_pretrained(tmp_path / "again")
    again = rope_patch.from_pretrained(tmp_path / "again")
    assert_close(logits(again, tokens()), expected)
    assert_close(logits(unpatch(again).model, tokens()), logits(llama, tokens()))


LONGEST = {  # of the tiny models, whose L is 32
    **dict.fromkeys(("yarn:factor=4", "pi:factor=4", "ntk:factor=4"), 128),
    "llama3:factor=8": 256,
    "yarn:factor=4,original_max_position_embeddings=16": 64,
    **dict.fromkeys(("abf:base=50000", "dynamic_ntk:factor=2", "yarn:factor=4+rerope:window=8", "rerope:window=8"), 32),
}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("spec", LONGEST)
def test_the_longest_text_is_that_of_a_checkpoint_of_the_scheme(family, spec, tmp_path):
    model = build(family)
    with patch(model, spec):
        model.save_pretrained(tmp_path)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert model.config.max_position_embeddings == plain.config.max_position_embeddings == LONGEST[spec]
    assert model.config.max_position_embeddings == 32
    for loaded in (plain, repatch(plain).model, unpatch(plain).model, rope_patch.from_pretrained(tmp_path)):
        assert dict(describe(loaded).tables[0])["training length"] == "32 tokens"
        assert loaded.config.max_position_embeddings == LONGEST[spec]
    assert unpatch(loaded).model.config.max_position_embeddings == 32
    assert read_stack(loaded).training_length == 32


def test_a_native_scheme_keeps_the_longest_text_and_a_plain_rotation_has_the_original(tmp_path):
    extended = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
    extended |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = from_config(config_of("llama", rope_parameters=extended, max_position_embeddings=256))
    with patch(model, native_scheme(model)):
        assert model.config.max_position_embeddings == 256
    with patch(model, "rope"):
        assert model.config.max_position_embeddings == 16
        model.save_pretrained(tmp_path)
    assert read_stack(AutoModelForCausalLM.from_pretrained(tmp_path)).training_length == 16


def test_repatch_of_a_model_without_a_record_is_refused(llama):
    with pytest.raises(NotPatched, match="no `rope_patch`"):
        repatch(llama)


def test_from_pretrained_of_a_plain_checkpoint_is_plain(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    loaded = rope_patch.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, tokens()), logits(llama, tokens()))
    with pytest.raises(NotPatched):
        unpatch(loaded)


def test_a_model_saved_after_unpatch_says_nothing_of_the_scheme(llama, tmp_path):
    llama.save_pretrained(tmp_path / "before")
    with patch(llama, "yarn", factor=4):
        logits(llama, tokens())
    llama.save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("before", "after"))
    assert json.loads(before) == json.loads(after)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", [family for family in RUN if family not in SHARED_TABLES])
@pytest.mark.parametrize("spec", EXPRESSIBLE)
def test_exported_parameters_make_plain_transformers_compute_the_scheme(family, spec):
    scheme, config = get_scheme(spec), config_of(family)
    if not is_expressible(scheme, config):
        # Phi-3's config accepts no other type than default and longrope; one type speaks of whole heads alone, and one
        # of the longest text where it means that of training
        reasons = (
            r"Phi3Config does not accept|Phi3Config reads|is a share of the whole head|its positions are not|"
            r"grows from the training length"
        )
        with pytest.raises(NotExpressible, match=reasons):
            export_rope_parameters(scheme, config)
        return
    if not fits(scheme, build(family)) or (family in NORMED and scales_tables(scheme)):
        return
    ids = tokens(LENGTH)
    exported = from_config(config_of(family, rope_parameters=export_rope_parameters(scheme, config)))
    with patch(build(family), scheme) as handle:
        assert_close(logits(exported, ids), logits(handle.model, ids))
    assert config.to_dict() == config_of(family).to_dict()


@pytest.mark.parametrize("spec", [spec for spec in ALL if spec not in EXPRESSIBLE])
def test_what_cannot_be_exported_says_why(spec):
    scheme = get_scheme(spec)
    with pytest.raises(NotExpressible) as caught:
        export_rope_parameters(scheme, config_of("llama"))
    assert any(part.name in str(caught.value) for part in scheme.parts())


@pytest.mark.parametrize("spec", ALL)
def test_describe_names_every_part_of_the_scheme(llama, spec):
    with patch(llama, spec):
        table = describe(llama)
    for part in get_scheme(spec).parts():
        assert part.equation in table
        assert part.source.link in table
    assert "LlamaForCausalLM" in table
    assert "32 tokens" in table


@pytest.mark.parametrize("family", RUN)
def test_describe_of_a_plain_model_shows_its_native_scheme(model):
    table = describe(model)
    assert "not patched" in table
    assert str(native_scheme(model)) in table


def test_describe_shows_the_position_map_and_the_layers_left_alone():
    with patch(build("smollm3"), "rerope", window=6) as handle:
        table = describe(handle.model)
    assert "(128, 96): 6" in table
    assert "layers 1, 3: layer without positions" in table
    with patch(build(), "window", window=6) as handle:
        assert "(128, 96): hidden" in describe(handle.model)


@pytest.mark.parametrize("family", sorted(SHARED_TABLES))
def test_parameters_that_would_also_scale_sliding_layers_are_not_expressible(family):
    scheme = get_scheme("yarn:factor=4")
    for changes in ({}, {"sliding_window": TRAINING_LENGTH}):
        with pytest.raises(NotExpressible, match="one entry of rope_parameters for full and sliding-window layers"):
            export_rope_parameters(scheme, config_of(family, **changes))
    # the patch scales wider ones too
    assert export_rope_parameters(scheme, config_of(family, sliding_window=TRAINING_LENGTH + 1))["factor"] == 4


def test_the_temperature_of_a_checkpoint_keeps_its_unit_of_length():
    config = config_of("ministral3")
    names = ("llama_4_scaling_beta", "original_max_position_embeddings")
    exported = export_rope_parameters(get_scheme("pi:factor=4"), config)
    assert [exported[name] for name in names] == [config.rope_parameters[name] for name in names]


def test_growth_from_another_length_than_that_of_the_config_is_not_expressible():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": TRAINING_LENGTH}
    scheme, longer = get_scheme("dynamic_ntk:factor=2"), 4 * TRAINING_LENGTH
    assert export_rope_parameters(scheme, config_of("llama"))["rope_type"] == "dynamic"
    with pytest.raises(NotExpressible, match=f"grows from max_position_embeddings={longer}"):
        export_rope_parameters(scheme, config_of("llama", rope_parameters=yarn, max_position_embeddings=longer))


# --- what is in the files ---------------------------------------------------------------------------------------

YARN = get_scheme("yarn:factor=4").to_dict()
MALFORMED = [
    (5, InvalidField, "rope_patch=5 is not allowed"),
    ("x", InvalidField, "rope_patch='x' is not allowed"),
    ([], InvalidField, r"rope_patch=\[\] is not allowed"),
    ({}, InvalidField, "'name'"),
    ({"scheme": "yarn"}, InvalidField, "'yarn' does not describe a scheme"),
    ({"scheme": {"name": "yarm"}}, UnknownScheme, "did you mean 'yarn'"),
    ({"scheme": YARN, "rope_parameters": {}}, UnsupportedModel, "no `rope_parameters`"),
    ({"scheme": YARN, "rope_parameters": None}, UnsupportedModel, "no `rope_parameters`"),
    ({"scheme": YARN, "rope_parameters": [1]}, UnsupportedModel, r"rope_parameters=\[1\] is not allowed"),
    ({"scheme": YARN, "rope_parameters": {"rope_theta": 1e4, "rope_type": "yarm"}}, UnsupportedModel, "mean 'yarn'"),
    ({"scheme": YARN, "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear"}}, InvalidField, "needs factor"),
    ({"scheme": YARN, "max_position_embeddings": "9"}, InvalidField, "max_position_embeddings='9'; it must be"),
    ({"scheme": YARN, "positions": 16}, NotPatched, "positions=16.*impossible"),
    ({"scheme": get_scheme("rerope:window=6").to_dict(), "positions": 16}, NotPatched, "positions=16"),
    ({"scheme": get_scheme("learned").to_dict(), "positions": 16}, NotPatched, "positions=16"),
]


@pytest.mark.parametrize(("record", "error", "said"), MALFORMED, ids=lambda value: str(value)[:60])
def test_a_malformed_record_is_refused_by_name(llama, tmp_path, record, error, said):
    llama.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_patch": record}))
    llama.config.rope_patch = record
    before = snapshot(llama)
    for act in (lambda: rope_patch.from_pretrained(tmp_path), lambda: repatch(llama)):
        with pytest.raises(error, match=said) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert snapshot(llama) == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("{}", "base_model_name_or_path=None is not allowed"),
        ('{"base_model_name_or_path": 3}', "base_model_name_or_path=3 is not allowed"),
        ("[]", "base_model_name_or_path=None is not allowed"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"base_model_name_or_path": "x", "rope_patch": 3}', "rope_patch=3 is not allowed"),
        ('{"base_model_name_or_path": "x", "rope_patch": {"scheme": {"name": "yarn"}}}', "yarn needs factor"),
        ('{"base_model_name_or_path": "FOLDER"}', "leads back to these adapters"),
        ('{"base_model_name_or_path": "OTHER"}', "leads back to these adapters"),
    ],
    ids=["missing", "a number", "a list", "no json", "a deep list", "no record", "no scheme", "itself", "in a circle"],
)
def test_malformed_adapters_are_refused_by_name(tmp_path, settings, said):
    folder, other = tmp_path / "adapters", tmp_path / "others"
    folder.mkdir()
    other.mkdir()
    written = settings.replace("FOLDER", str(folder)).replace("OTHER", str(other))
    (folder / "adapter_config.json").write_text(written)
    (other / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    with pytest.raises(InvalidField, match=said) as caught:
        rope_patch.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


# --- models inside models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [LlamaForCausalLM, LlamaForSequenceClassification])
@pytest.mark.parametrize("spec", ["ntk:factor=4", "rerope:window=6", "shaw:max_distance=6"])
def test_a_scheme_on_a_backbone_is_saved_with_the_model_around_it(cls, spec, tmp_path):
    config = config_of("llama", num_labels=3)
    model, other = cls(config).eval(), cls(config).eval()
    before = snapshot(model), snapshot(other)
    with patch(model.model, spec):
        assert snapshot(other)["modules"] == before[1]["modules"]
    assert (snapshot(model), snapshot(other)) == before
    patch(model.model, spec)
    expected = logits(model, tokens())
    model.save_pretrained(tmp_path)
    loaded = rope_patch.from_pretrained(tmp_path)
    assert type(loaded) is cls
    assert torch.equal(logits(loaded, tokens()), expected)
    assert not hasattr(unpatch(model).model.config, "rope_patch")
    assert torch.equal(logits(unpatch(loaded).model, tokens()), logits(model, tokens()))


def test_a_longer_table_in_a_backbone_is_saved_with_the_model_around_it(tmp_path):
    sizes = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(**sizes, intermediate_size=16, max_position_embeddings=32)).eval()
    with patch(model.bert, "learned", extend=48):
        expected = model(tokens(40)).logits
        model.save_pretrained(tmp_path)
    assert torch.equal(rope_patch.from_pretrained(tmp_path)(tokens(40)).logits, expected)
    assert torch.equal(BertForMaskedLM.from_pretrained(tmp_path)(tokens(40)).logits, expected)


def gemma3_with_images():
    text = config_of("gemma3").to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=text, vision_config={**vision, **sizes}, mm_tokens_per_image=4, image_token_index=96
    )
    return Gemma3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("spec", ["ntk:factor=4", "yarn:factor=4", "rerope:window=6"])
@pytest.mark.parametrize("inside", [False, True])
def test_the_config_of_the_text_is_read_back_inside_that_of_a_model_with_images(spec, inside, tmp_path):
    model, ids = gemma3_with_images(), tokens().clamp(max=90)
    plain = model(ids).logits
    with patch(model.model.language_model if inside else model, spec):
        expected = model(ids).logits
        model.save_pretrained(tmp_path)
    assert not torch.equal(expected, plain)
    loaded = rope_patch.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, expected)
    unpatch(loaded)
    assert torch.equal(loaded(ids).logits, plain)
    assert "rope_patch" not in loaded.config.to_json_string()
    assert "rope_patch" in AutoConfig.from_pretrained(tmp_path).to_json_string()
