"""Learned absolute positions of BERT-likes, GPT-2 and OPT: longer, replaced, saved as an ordinary checkpoint."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from rope_patch import (
    AlreadyPatched,
    Hierarchical,
    InvalidField,
    NotPatched,
    UnsupportedModel,
    from_pretrained,
    patch,
    repatch,
    unpatch,
)
from rope_patch.models.absolute import read, recognises
from tests.models.absolute_families import (
    CAPACITY,
    CONFIGS,
    DECODERS,
    RESERVED,
    VOCABULARY,
    build,
    outputs,
    table_of,
    tokens,
)

LONGEST = {
    "hierarchical": CAPACITY**2,
    "hierarchical:num_positions=20": 20,
    "sinusoidal": 32 * CAPACITY,
    "sinusoidal:num_positions=21,layout=split": 21,
    "learned": CAPACITY,
    "learned:extend=22": 22,
    "learned:num_positions=23": 23,
}
"""A scheme and the longest text in tokens that a model reads under it."""
KEEPING = [spec for spec in LONGEST if spec.startswith("hierarchical") or spec in ("learned", "learned:extend=22")]
"""Those under which the checkpoint's own rows stay."""

families = pytest.mark.parametrize("family", CONFIGS)
schemes = pytest.mark.parametrize("spec", LONGEST)


def limits(model):
    """Every number and shape that limits the length of a text."""
    config = model.config.to_dict()
    return {
        "config": {name: config.get(name) for name in ("max_position_embeddings", "n_positions")},
        "table": (table_of(model).num_embeddings, tuple(table_of(model).weight.shape)),
        "buffers": {name: tuple(buffer.shape) for name, buffer in model.named_buffers()},
    }


def everything(model):
    """What a patch could leave behind: tensors and config by identity and value, and which buffers are saved."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "identities": {name: (id(tensor), tensor.requires_grad) for name, tensor in tensors.items()},
        "values": {name: (tensor.dtype, tensor.detach().clone().view(torch.uint8)) for name, tensor in tensors.items()},
        "config": (id(model.config), copy.deepcopy(model.config.to_dict())),
        "numbers": {
            name: {key: value for key, value in vars(module).items() if isinstance(value, int)}
            for name, module in model.named_modules()
        },
        "saved": list(model.state_dict()),
    }


def assert_same(found, expected):
    values, other = found.pop("values"), expected.pop("values")
    assert found == expected
    assert values.keys() == other.keys()
    for name, (dtype, bits) in values.items():
        assert dtype == other[name][0]
        assert torch.equal(bits, other[name][1]), name


# --- reading --------------------------------------------------------------------------------------------------------


@families
def test_the_table_and_its_reserved_rows_are_found(family):
    model = build(family)
    (stack,) = filter(recognises, model.modules())
    table = read(stack).absolute
    assert table.embedding is table_of(model)
    assert table.reserved == RESERVED[family]
    assert table.capacity == table.checkpoint.training_length == CAPACITY
    assert table.checkpoint.num_heads == 4


@families
def test_reading_leaves_no_trace(family):
    model = build(family).train()
    before, state = everything(model), torch.get_rng_state()
    read(next(filter(recognises, model.modules())))
    assert_same(everything(model), before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", ["distilbert", "albert", "mpnet", "biogpt", "yoso"])
def test_families_without_an_entry_here_work_by_the_same_rules(family):
    torch.manual_seed(0)
    model = AutoModel.from_config(CONFIG_MAPPING[family](**CONFIGS["bert"], embedding_size=32)).eval()
    (stack,) = filter(recognises, model.modules())
    ids = tokens(CAPACITY - 2)  # MPNet's config counts its two reserved rows
    short, n = outputs(model, ids), read(stack).absolute.capacity
    with patch(model, "hierarchical"):
        assert torch.equal(outputs(model, ids), short)
        assert torch.isfinite(outputs(model, tokens(n * n))).all()


# --- capacity ---------------------------------------------------------------------------------------------------------


@families
@schemes
def test_every_limit_is_raised_and_the_longest_text_is_read(family, spec):
    model = build(family)
    n, reserved = LONGEST[spec], RESERVED[family]
    patch(model, spec)
    said = limits(model)
    counted = reserved if family == "roberta" else 0
    assert set(said["config"].values()) - {None} == {n + counted}
    assert said["table"] == (n + reserved, (n + reserved, table_of(model).embedding_dim))
    assert all(shape == (1, n + reserved) for shape in said["buffers"].values())
    for length in {1, CAPACITY, min(CAPACITY + 1, n), n - 1, n}:
        assert torch.isfinite(outputs(model, tokens(length))).all()
    with pytest.raises((IndexError, RuntimeError)):
        outputs(model, tokens(n + 1))


@families
@pytest.mark.parametrize("spec", KEEPING)
def test_short_texts_mean_what_they_meant(family, spec):
    model, ids = build(family), tokens(CAPACITY, rows=3)
    before, rows = outputs(model, ids), table_of(model).weight.detach().clone()
    patch(model, spec)
    assert torch.equal(table_of(model).weight[: len(rows)], rows)
    assert torch.equal(outputs(model, ids), before)


@families
@schemes
def test_reserved_rows_stay(family, spec):
    model = build(family)
    reserved, padding = table_of(model).weight[: RESERVED[family]].clone(), table_of(model).padding_idx
    patch(model, spec)
    assert torch.equal(table_of(model).weight[: RESERVED[family]], reserved)
    assert table_of(model).padding_idx == padding


@families
def test_the_rows_are_those_of_the_scheme(family):
    model = build(family)
    native = table_of(model).weight[RESERVED[family] :].detach().clone()
    patch(model, "hierarchical", alpha=0.3)
    assert torch.equal(table_of(model).weight[RESERVED[family] :], Hierarchical(0.3).rows(native))


@families
@pytest.mark.parametrize("learns", [True, False])
def test_a_table_learns_after_the_removal_if_its_replacement_did(family, learns):
    model = build(family)
    table_of(model).weight.requires_grad_(not learns)
    patch(model, "hierarchical")
    table_of(model).weight.requires_grad_(learns)
    unpatch(model)
    assert table_of(model).weight.requires_grad == learns


@families
@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_are_invisible_beyond_the_training_length(family, side):
    model = build(family)
    patch(model, "hierarchical")
    short, long = tokens(CAPACITY + 5, seed=1), tokens(CAPACITY + 12, seed=2)
    room = (7, 0) if side == "left" else (0, 7)
    ids = torch.cat([nn.functional.pad(short, room, value=model.config.pad_token_id), long])
    mask = torch.cat([nn.functional.pad(torch.ones_like(short), room), torch.ones_like(long)])
    given = {"attention_mask": mask}
    if side == "left" and family not in ("roberta", "opt"):  # these two count the tokens themselves
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    found = outputs(model, ids, **given)
    alone = found[:1, 7:] if side == "left" else found[:1, :-7]
    torch.testing.assert_close(alone, outputs(model, short), atol=2e-5, rtol=0)
    torch.testing.assert_close(found[1:], outputs(model, long), atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", DECODERS)
def test_generation_goes_on_beyond_the_training_length(family):
    model = build(family)
    patch(model, "hierarchical")
    short, long = tokens(5, seed=1), tokens(CAPACITY + 3, seed=2)
    pads = torch.full((1, CAPACITY - 2), model.config.pad_token_id)
    ids = torch.cat([torch.cat([pads, short], dim=1), long])
    mask = torch.cat([torch.cat([torch.zeros_like(pads), torch.ones_like(short)], dim=1), torch.ones_like(long)])
    options = {"max_new_tokens": 2 * CAPACITY, "do_sample": False}
    found = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for row, prompt in zip(found, (short, long), strict=True):
        for use_cache in (True, False):
            alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=use_cache, **options)
            assert torch.equal(row, alone[0, prompt.shape[1] :])


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_tied_words_stay_tied_and_may_grow(family):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(build(family, tie_word_embeddings=True).config).eval()
    patch(model, "hierarchical")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.resize_token_embeddings(VOCABULARY + 3)
    assert outputs(model, tokens(CAPACITY**2)).shape == (1, CAPACITY**2, VOCABULARY + 3)
    unpatch(model)
    assert outputs(model, tokens(CAPACITY)).shape == (1, CAPACITY, VOCABULARY + 3)


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype_and_its_rows(family, dtype):
    model, ids = build(family).to(dtype), tokens(CAPACITY)
    before, rows = outputs(model, ids), table_of(model).weight.detach().clone()
    patch(model, "hierarchical")
    assert table_of(model).weight.dtype == dtype
    assert torch.equal(table_of(model).weight[: len(rows)], rows)
    assert torch.equal(outputs(model, ids), before)
    assert torch.isfinite(outputs(model, tokens(CAPACITY**2))).all()


# --- training ---------------------------------------------------------------------------------------------------------


@families
@schemes
def test_gradients_reach_the_rows_that_were_read(family, spec):
    model = build(family)
    patch(model, spec)
    length = min(LONGEST[spec], CAPACITY + 3)
    model(input_ids=tokens(length))[0].square().sum().backward()
    touched = table_of(model).weight.grad.abs().sum(-1) > 0
    first = RESERVED[family]
    assert touched[first : first + length].all()
    assert not touched[:first].any()
    assert not touched[first + length :].any()


@families
def test_a_frozen_table_stays_frozen(family):
    model = build(family).requires_grad_(False)
    patch(model, "hierarchical")
    assert not table_of(model).weight.requires_grad


# --- taking it back ---------------------------------------------------------------------------------------------------


@families
@schemes
def test_removal_restores_bit_for_bit(family, spec):
    model, ids = build(family), tokens(CAPACITY)
    before, said = everything(model), outputs(model, ids)
    handle = patch(model, spec)
    with torch.no_grad():
        table_of(model).weight.add_(1)
    outputs(model, tokens(LONGEST[spec]))
    unpatch(model)
    assert_same(everything(model), before)
    assert torch.equal(outputs(model, ids), said)
    assert "rope_patch" not in model.config.to_dict()
    assert handle.model is model


@families
def test_a_model_of_the_same_config_object_is_untouched(family):
    one = build(family)
    other = type(one)(one.config).eval()
    before = everything(other)
    with patch(one, "hierarchical"):
        assert_same(everything(other), before)


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_removal_after_a_change_of_dtype_gives_the_model_of_that_dtype(family, dtype):
    model, ids = build(family), tokens(CAPACITY)
    patch(model, "hierarchical")
    model.to(dtype)
    unpatch(model)
    assert isinstance(table_of(model).weight, nn.Parameter)
    assert torch.equal(outputs(model, ids), outputs(build(family).to(dtype), ids))


@families
def test_a_copy_of_a_patched_model_is_a_model_of_its_own(family):
    model = build(family)
    patch(model, "hierarchical")
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    unpatch(model)
    long = tokens(CAPACITY + 4)
    assert torch.isfinite(outputs(twin, long)).all()
    unpatch(twin)
    assert torch.equal(table_of(twin).weight, table_of(model).weight)
    assert limits(twin) == limits(model)


# --- saving -----------------------------------------------------------------------------------------------------------


@families
@schemes
def test_a_saved_model_is_an_ordinary_longer_checkpoint(family, spec, tmp_path):
    model = build(family)
    long = tokens(LONGEST[spec], rows=2)
    patch(model, spec)
    expected, said = outputs(model, long), limits(model)
    model.save_pretrained(tmp_path)
    auto = AutoModelForCausalLM if family in DECODERS else AutoModel
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert limits(loaded) == said
    assert torch.equal(outputs(loaded.eval(), long), expected)


@families
@pytest.mark.parametrize("spec", KEEPING)
@pytest.mark.parametrize("plainly", [False, True])
def test_a_loaded_table_is_taken_up_as_it_was_saved(family, spec, plainly, tmp_path):
    model, short, long = build(family), tokens(CAPACITY), tokens(LONGEST[spec])
    native, said = outputs(model, short), limits(model)
    patch(model, spec)
    with torch.no_grad():
        table_of(model).weight[-1].fill_(0.5)  # as if it had been trained
    trained = outputs(model, long)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path) if plainly else from_pretrained(tmp_path)
    if plainly:
        repatch(loaded)
    assert torch.equal(outputs(loaded.eval(), long), trained)
    unpatch(loaded)
    assert limits(loaded) == said
    if spec != "learned":  # then the row that was trained is one of the checkpoint's own
        assert torch.equal(outputs(loaded, short), native)


@families
@pytest.mark.parametrize("spec", ["sinusoidal", "learned:num_positions=23"])
def test_a_loaded_table_without_the_old_rows_is_there_for_good(family, spec, tmp_path):
    model, long = build(family), tokens(LONGEST[spec])
    patch(model, spec)
    expected = outputs(model, long)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(loaded, long), expected)
    with pytest.raises(NotPatched):
        unpatch(loaded)


@families
@pytest.mark.parametrize("spec", ["hierarchical", "sinusoidal"])
def test_a_loaded_table_is_not_made_longer_a_second_time(family, spec, tmp_path):
    model = build(family)
    patch(model, spec)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    before = limits(loaded)
    with pytest.raises(AlreadyPatched, match=spec):
        patch(loaded, "hierarchical:num_positions=70")
    assert limits(loaded) == before


IMPOSSIBLE = {**dict.fromkeys((8.0, "8", None, 0, -8), InvalidField), CAPACITY**2 + 1: NotPatched}


@pytest.mark.parametrize(("positions", "error"), [(True, InvalidField), *IMPOSSIBLE.items()])
def test_a_record_of_impossible_positions_is_refused(positions, error, tmp_path):
    model = build("gpt2")
    patch(model, "hierarchical")
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["rope_patch"]["positions"] = positions
    (tmp_path / "config.json").write_text(json.dumps(written))
    for load in (from_pretrained, lambda path: repatch(AutoModelForCausalLM.from_pretrained(path))):
        with pytest.raises(error, match=f"has positions={positions!r}"):
            load(tmp_path)


# --- refusals ---------------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("hierarchical:num_positions=65", "num_positions=65 is not allowed; the checkpoint's 8 positions"),
        ("hierarchical:num_positions=7", "num_positions=7 is not allowed; the checkpoint's 8 positions"),
        ("learned:extend=8", "extend=8 is not allowed; it must be above the checkpoint's 8"),
    ],
)
def test_fields_that_do_not_fit_the_table_change_nothing(family, spec, says):
    model = build(family)
    before = everything(model)
    with pytest.raises(InvalidField, match=says):
        patch(model, spec)
    assert_same(everything(model), before)


_BART = {
    "vocab_size": 61,
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    "max_position_embeddings": CAPACITY,
}
REFUSED = {
    "bart": (_BART, "several stacks"),
    "gpt_neo": (
        {"vocab_size": 61, "hidden_size": 32, "num_layers": 1, "attention_types": [[["global"], 1]], "num_heads": 4}
        | {"max_position_embeddings": CAPACITY},
        "attention.bias is a mask of 8 x 8 positions",
    ),
    "deberta": ({**CONFIGS["bert"], "relative_attention": True}, "also has relative positions"),
    "layoutlm": (CONFIGS["bert"], "several position tables"),
    "roformer": (CONFIGS["bert"], "computed sinusoids, not learned"),
    "clip_vision_model": ({"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}, "cannot be patched"),
    "lxmert": (CONFIGS["bert"], "cannot read a text of four tokens"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_other_models_are_refused_with_the_reason(family):
    config, says = REFUSED[family]
    model = AutoModel.from_config(CONFIG_MAPPING[family](**config))
    with pytest.raises(UnsupportedModel, match=says):
        patch(model, "hierarchical")


class EveryOther(nn.Embedding):
    def forward(self, ids):
        return super().forward(2 * ids)


def test_a_table_of_which_a_text_reads_every_other_row_is_refused():
    model = build("gpt2")
    model.transformer.wpe = EveryOther(CAPACITY, 32)
    with pytest.raises(UnsupportedModel, match=r"the rows \[0, 2, 4, 6\] of wpe, which are not consecutive"):
        patch(model, "hierarchical")


def test_a_table_on_the_meta_device_is_refused():
    model = build("bert")
    with pytest.raises(UnsupportedModel, match="meta device"):
        patch(model.to("meta"), "hierarchical")


def test_a_shared_table_is_refused():
    model = build("gpt2")
    model.transformer.other = nn.Module()
    model.transformer.other.weight = model.transformer.wpe.weight
    with pytest.raises(UnsupportedModel, match=r"wpe shares its weights \(wpe.weight, other.weight\)"):
        patch(model, "hierarchical")


def test_numbers_that_follow_no_rule_are_refused():
    model = build("bert")
    model.embeddings.position_ids = torch.tensor([[0, 1, 2, 3, 3, 3, 3, 3]])
    with pytest.raises(UnsupportedModel, match="position_ids has a number per position, without a rule"):
        patch(model, "hierarchical")
