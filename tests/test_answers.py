"""What a person who types something wrong, vague or foreign is told, word for word."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, LlamaConfig, LlamaForCausalLM

import rope_patch
from rope_patch import (
    InvalidField,
    LogN,
    NoPE,
    PerLayer,
    ReRoPE,
    RopePatchWarning,
    SelfExtend,
    SlotConflict,
    UnknownScheme,
    UnsupportedModel,
    YaRN,
    describe,
    get_scheme,
    list_schemes,
    patch,
    repatch,
    unpatch,
)
from rope_patch.cli import main
from rope_patch.errors import NoCheckpoint, RopePatchError
from rope_patch.schemes import scheme_from_dict
from rope_patch.schemes.reach import spelled
from tests.cases import CASES
from tests.families import build
from tests.models import absolute_families, t5_families
from tests.recipes import load_recipe
from tests.snapshots import snapshot


@pytest.fixture
def model() -> LlamaForCausalLM:
    """A tiny Llama with L = 512."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=512, **sizes)).eval()


def told(error, act, *words, **fields):
    with pytest.raises(error) as caught:
        act(*words, **fields)
    assert isinstance(caught.value, RopePatchError)
    return str(caught.value)


def warned(act):
    """The sentences of the project's own warnings, each without how to silence it, and from the line that calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    ours = [warning for warning in caught if warning.category is RopePatchWarning]
    assert all(warning.filename == __file__ for warning in ours)
    silence = " (warnings.simplefilter('ignore', rope_patch.RopePatchWarning) silences this)"
    assert all(str(warning.message).endswith(silence) for warning in ours)
    return [str(warning.message).removesuffix(silence) for warning in ours]


# --- names ------------------------------------------------------------------------------------------------------------

SPELLINGS = {
    "YaRN:factor=4": "yarn:factor=4",
    "ReRoPE:window=8": "rerope:window=8",
    "Self-Extend:group_size=2,window=8": "self_extend:group_size=2,window=8",
    "SELFEXTEND:group_size=2,window=8": "self_extend:group_size=2,window=8",
    "NTK-by-parts:factor=4 + Log-N": "ntk_by_parts:factor=4+logn",
    "DualChunkAttention": "dca",
    "PositionInterpolation:factor=2": "pi:factor=2",
    "RNoPE-SWA": "rnope_swa",
}


@pytest.mark.parametrize("typed", SPELLINGS)
def test_names_regardless_of_case_hyphen_and_underscore(typed):
    assert get_scheme(typed) == get_scheme(SPELLINGS[typed])


FOREIGN = {
    "linear:factor=4": "pi:factor=4",
    "ntk-aware:factor=4": "ntk:factor=4",
    "dynamic": "dynamic_ntk",
    "dynamic:factor=2": "dynamic_ntk:factor=2",
    "su:short_factor=[1],long_factor=[2]": "longrope:short_factor=[1],long_factor=[2]",
    "default": "rope",
    "deepseek_yarn:factor=4,mscale=1": "yarn:factor=4,mscale=1",
}


@pytest.mark.parametrize("typed", FOREIGN)
def test_names_of_transformers_vllm_and_papers_lead_to_ours(typed, model):
    assert get_scheme(typed) == get_scheme(FOREIGN[typed])
    name, _, _ = typed.partition(":")
    fields = {key: value for key, value in get_scheme(FOREIGN[typed]).to_dict().items() if key != "name"}
    assert scheme_from_dict({"name": name, **fields}) == get_scheme(FOREIGN[typed])  # as in `config.rope_patch`
    assert PerLayer({"0": typed, "rest": None}) == PerLayer({"0": FOREIGN[typed], "rest": None})


@pytest.mark.parametrize("typed", ["none", "None", "plain", None])
def test_no_scheme_at_all_is_unpatch_and_never_nope(typed, model):
    said = told(UnknownScheme, patch, model, typed)
    assert said.endswith("; for the model as it is, do not patch it, or call unpatch(model)")
    assert "nope" not in said


def test_streaming_llm_has_other_fields_so_it_is_told_what_to_write():
    said = told(UnknownScheme, get_scheme, "streaming_llm")
    assert "lm_infinite comes nearest" in said
    assert get_scheme(said.rpartition("such as ")[2])


def test_a_name_of_ones_own_goes_before_a_foreign_one(monkeypatch):
    from rope_patch.schemes import registry

    monkeypatch.setattr(registry, "_REGISTRY", {**registry._REGISTRY, "linear": NoPE})
    assert get_scheme("linear") == NoPE()


@pytest.mark.parametrize("typed", ["yarm", "", "x" * 10_000, "chunk", "wíndow"])
def test_an_unknown_name_gives_the_five_nearest_and_where_the_list_is(typed):
    said = told(UnknownScheme, get_scheme, typed)
    named = [name for name in list_schemes() if f"{name!r}" in said.partition("did you mean")[2]]
    assert len(named) >= 4  # one of the five may be a mixture
    assert said.partition("did you mean")[2].count("'") == 10
    assert said.endswith("? `rope-patch list` shows all")


def test_the_nearest_comes_first():
    for typed, name in {"yarm": "yarn", "rerop": "rerope", "chunk_attention": "dca"}.items():
        assert f"did you mean '{name}', " in told(UnknownScheme, get_scheme, typed)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_the_model_comes_first(model):
    before = snapshot(model)
    assert told(UnsupportedModel, patch, "yarn", model) == "the model comes first: write patch(model, 'yarn')"
    said = told(UnsupportedModel, patch, "yarn", model, factor=4)
    assert said == "the model comes first: write patch(model, 'yarn', factor=4)"
    assert snapshot(model) == before


def test_a_class_is_no_scheme(model):
    said = told(InvalidField, patch, model, YaRN)
    assert said == "YaRN is a class: write YaRN(factor=...), or 'yarn', factor=..."
    said = told(InvalidField, patch, model, YaRN, factor=4)
    assert said == "YaRN is a class: write YaRN(factor=4), or 'yarn', factor=4"
    assert told(InvalidField, patch, model, LogN) == "LogN is a class: write LogN(), or 'logn'"


def test_fields_beside_an_object(model):
    said = told(InvalidField, patch, model, YaRN(factor=4, beta_fast=16.0), factor=8)
    wanted = "write 'yarn', factor=8, or YaRN(factor=8, beta_fast=16.0)"
    assert said == f"factor=8 beside a scheme that has its fields already: {wanted}"
    assert told(InvalidField, patch, model, YaRN(factor=4), target=64).endswith("write 'yarn', target=64")


def test_fields_beside_several_names(model):
    said = told(InvalidField, patch, model, "yarn", "logn", factor=8)
    assert said == "factor=8 with several schemes: write 'yarn:factor=8+logn'"


@pytest.mark.parametrize("typed", ["yarn:factor=auto", "rerope:window=auto", "Linear:factor=auto"])
def test_auto_is_a_target(typed, model):
    said = told(InvalidField, patch, model, typed)
    assert "='auto' is not allowed; write target=8192, the length in tokens to reach" in said


@pytest.mark.parametrize("name", ["yarn", "ntk_by_parts", "dynamic_yarn"])
def test_a_bound_that_is_another_field_is_named_with_its_value(name, model):
    said = told(InvalidField, patch, model, name, factor=4, beta_fast=1, beta_slow=32)
    assert said == f"{name}: beta_fast=1 is not allowed; beta_fast must be a number of at least beta_slow=32"


def test_a_model_without_positions():
    said = told(UnsupportedModel, patch, nn.Linear(2, 2), "yarn", factor=4)
    kinds = "no module of rotary frequencies (Llama), no relative bias (T5) and no position table (BERT)"
    others = "A model that keeps its positions otherwise, such as GPT-J, BLOOM or MPT, is not supported"
    assert said == f"Linear cannot be patched: found {kinds}. {others}"


def test_a_folder_that_is_not_there(tmp_path):
    missing = str(tmp_path / "missing")
    said = told(NoCheckpoint, rope_patch.from_pretrained, missing)
    assert said == f"there is no checkpoint {missing!r}: no folder or file has this name"
    assert "the folder has no config.json" in told(NoCheckpoint, rope_patch.from_pretrained, tmp_path)
    said = told(NoCheckpoint, rope_patch.from_pretrained, __file__)
    assert said == f"{__file__!r} is not a checkpoint: it is neither a folder nor a GGUF file"
    for word in ("missing", "", "./missing"):
        said = told(OSError, rope_patch.from_pretrained, word, local_files_only=True)
        assert said.startswith(f"there is no checkpoint {word!r}: no folder")


def test_schemes_add_up():
    assert ReRoPE(window=8) + LogN() == get_scheme("rerope:window=8+logn")
    assert ReRoPE(window=8) + LogN() + YaRN(factor=2) == get_scheme("rerope:window=8+logn+yarn:factor=2")
    with pytest.raises(SlotConflict, match="both own the slot 'segments'"):
        ReRoPE(window=8) + SelfExtend(group_size=2, window=8)
    with pytest.raises(InvalidField, match="'logn' is not a scheme"):
        ReRoPE(window=8) + "logn"


# --- warnings ---------------------------------------------------------------------------------------------------------

IDLE = [
    *("rerope:window=100000", "rerope:window=1024", "self_extend:group_size=1,window=8", "yarn:factor=1", "rope"),
    *("logn:training_length=5000", "dynamic_ntk:length=100", "layers:[0=window:window=9999;1=pi:factor=1]"),
]
AT_WORK = [
    *("rerope:window=512", "window", "logn", "dca", "dynamic_ntk", "dynamic_yarn", "yarn:factor=4", "string"),
    *("lm_infinite:local_window=512", "rerope:window=100000+logn", "rope+kerple", "rope+cope", "llama3:factor=2"),
    *("learned_rope", "urpe", "ssmax", "layers:[0=rerope:window=99999;rest=yarn:factor=2]"),
]


@pytest.mark.parametrize("spec", IDLE)
def test_a_patch_without_effect_is_told_once(spec, model):
    reason = f"{spec} changes nothing in texts of up to 1024 tokens, twice the model's maximum"
    assert warned(lambda: patch(model, spec)) == [reason]
    assert [row for row in describe(model).tables[0] if row[0] == "warning"] == [("warning", reason)]


@pytest.mark.parametrize("spec", AT_WORK)
def test_a_patch_that_is_meant_is_not_warned_of(spec, model):
    assert warned(lambda: patch(model, spec)) == []
    assert "warning" not in dict(describe(model).tables[0])


@pytest.mark.parametrize("spec", ["alibi", "t5", "nope", "hierarchical", "fox", "sinusoidal", "learned"])
def test_a_patch_that_takes_a_models_positions_away(spec, model):
    reason = f"{spec} replaces the rotation that the model was trained with: it needs training under {spec}"
    assert warned(lambda: patch(model, spec)) == [reason]
    assert dict(describe(model).tables[0])["warning"] == reason
    assert dict(describe(model).tables[0])["  training"] != "none needed"


@pytest.mark.parametrize("spec", ["xpos", "rope+alibi", "rope+sandwich"])
def test_a_patch_that_no_pretrained_model_knows(spec, model):
    (reason,) = warned(lambda: patch(model, spec))
    assert reason == f"{spec} is for training from scratch: a pretrained model needs training under {spec}"


def test_other_families_lose_other_positions():
    for spec in ("alibi", "rerope:window=6", "nope"):
        (reason,) = warned(lambda spec=spec: patch(t5_families.build(), spec))  # one of encoder and decoder
        assert "replaces the bias that the model was trained with" in reason
    for spec in ("t5:interpolation=2", "logn"):
        assert warned(lambda spec=spec: patch(t5_families.build(), spec)) == []
    (reason,) = warned(lambda: patch(absolute_families.build("bert"), "sinusoidal"))
    assert "replaces the table of positions" in reason
    assert warned(lambda: patch(absolute_families.build("bert"), "hierarchical")) == []
    (reason,) = warned(lambda: patch(build("baichuan_alibi"), "alibi"))
    assert "changes nothing" in reason
    (reason,) = warned(lambda: patch(build("baichuan_alibi"), "sandwich"))
    assert "replaces the bias" in reason
    assert warned(lambda: patch(build("baichuan_alibi"), "logn:training_length=8")) == []


def test_an_error_made_of_the_warning_leaves_the_model_as_it_was(model):
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RopePatchWarning)
        with pytest.raises(RopePatchWarning):
            patch(model, "alibi")
    assert snapshot(model) == before


def test_a_checkpoint_that_was_trained_so_loads_without_a_warning(model, tmp_path):
    patch(model, "alibi")
    model.save_pretrained(tmp_path)
    assert warned(lambda: rope_patch.from_pretrained(tmp_path)) == []
    assert warned(lambda: repatch(AutoModelForCausalLM.from_pretrained(tmp_path))) == []


def test_the_usual_filter_shows_it_once_and_the_advice_silences_it():
    sizes = "vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2"
    code = f"""
import warnings, rope_patch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig({sizes}))
for spec in ("alibi", "alibi", "nope"):
    if spec == "nope":
        warnings.simplefilter("ignore", rope_patch.RopePatchWarning)
    with rope_patch.patch(model, spec):
        pass
"""
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        warnings.simplefilter("default")  # what Python does with a warning of this kind
        exec(compile(code, "<a script>", "exec"), {"__name__": "__main__"})
    (reason,) = [str(each.message) for each in shown if issubclass(each.category, RopePatchWarning)]
    assert reason.startswith("alibi replaces the rotation")


# --- describe, unpatch, list -----------------------------------------------------------------------------------------


def test_a_folder_under_a_scheme_that_plain_transformers_loaded(model, tmp_path):
    with patch(model, "rerope", window=256):
        model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    wanted = "not patched; its config records rerope:window=256, which is not applied: use repatch(model)"
    assert dict(describe(plain).tables[0])["state"] == wanted
    repatch(plain)
    assert dict(describe(plain).tables[0])["state"] == "patched, mounted late"


def test_a_scheme_that_transformers_applies_by_itself_is_not_called_lost(model, tmp_path):
    for spec in ("yarn:factor=4", "ntk:factor=4"):
        with patch(model, spec):
            model.save_pretrained(tmp_path)
        state = dict(describe(AutoModelForCausalLM.from_pretrained(tmp_path)).tables[0])["state"]
        typed = spelled(get_scheme(spec))
        assert state == f"not patched; its config records {typed}, which Transformers applies by itself"


@pytest.mark.parametrize("record", ["rerope", {"scheme": {"name": "yarm"}}, {}, 3])
def test_a_record_that_cannot_be_read(model, record):
    model.config.rope_patch = record
    state = dict(describe(model).tables[0])["state"]
    assert state.startswith("not patched; its config records a scheme that cannot be read: ")


NUMBERS = (
    "frequencies",
    "wavelengths",
    "slopes",
    "bias, head 0",
    "query scale",
    "added",
    "decay",
    "learned",
    "positions",
)


@pytest.mark.parametrize("name", [name for name in CASES if name != "rope"])
def test_describe_has_numbers_that_change(name):
    model = build()
    plain = [row for row in describe(model).tables[0] if row[0] in NUMBERS]
    patch(model, CASES[name])
    assert [row for row in describe(model).tables[0] if row[0] in NUMBERS] != plain


@pytest.mark.parametrize("family", ["gemma3", "t5", "bert"])
@pytest.mark.parametrize("name", CASES)
def test_every_scheme_is_described_on_every_style(family, name):
    styles = {"t5": t5_families.build, "bert": lambda: absolute_families.build("bert")}
    model = styles[family]() if family in styles else build(family)
    try:
        patch(model, CASES[name])
    except RopePatchError:
        return
    assert describe(model)._repr_html_().startswith("<table>")


def test_the_numbers_of_describe_are_those_of_the_formula(model):
    patch(model, "linear", factor=4)
    rows = dict(describe(model).tables[0])
    assert rows["frequencies"] == "pair 0: 0.25, 1: 0.025, 2: 0.0025, 3: 0.00025"
    assert rows["wavelengths"] == "pair 0: 25.13, 1: 251.3, 2: 2513, 3: 2.513e+04 tokens"
    assert rows["  training"] == "fine-tuning needed"
    unpatch(model)
    patch(model, "alibi")
    assert dict(describe(model).tables[0])["slopes"] == "head 0: 0.25, 1: 0.0625, 2: 0.01562, 3: 0.003906"
    unpatch(model)
    patch(model, "yarn", factor=4)
    rows = dict(describe(model).tables[0])
    assert rows["scaling"] == "cos and sin times 1.139"
    assert rows["  training"] == "none needed"
    unpatch(model)
    patch(model, "logn")
    assert dict(describe(model).tables[0])["query scale"] == "position 1: 1, 128: 1, 512: 1, 2048: 1.222"


def test_describe_in_a_notebook(model):
    patch(model, "rerope", window=8)
    table = describe(model)
    assert repr(table) == str(table)
    assert table._repr_html_().count("<tr>") == len(table.splitlines())
    assert "<td style='text-align: left'>rerope:window=8 (ReRoPE)</td>" in table._repr_html_()
    unpatch(model)
    model.config.rope_patch = {"scheme": {"name": "<script>"}}
    assert "<script>" not in describe(model)._repr_html_()
    assert describe(t5_families.build())._repr_html_().count("<table>") == 2
    assert " positions</td>" in describe(absolute_families.build("bert"))._repr_html_()


def test_unpatch_as_the_last_line_of_a_cell(model):
    handle = patch(model, "rerope", window=8)
    assert repr(handle) == "<LlamaForCausalLM under rerope:window=8, mounted late>"
    assert repr(unpatch(model)) == "<LlamaForCausalLM without rerope:window=8>"


def test_the_list_shows_names_and_classes(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list_schemes())
    assert ["yarn", "YaRN"] in [line.split()[:2] for line in lines]
    assert main(["list", "DCA"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("scheme       dca, class DualChunkAttention\n")
    assert "\ntraining     none needed\n" in shown


# --- the command line -------------------------------------------------------------------------------------------------

TINY = str(Path(__file__).parents[1] / "recipes" / "assets" / "tiny-llama")


def given(monkeypatch, command, *words, name="lengths"):
    """What a recipe is given for the words of its command line."""
    recipe, found = load_recipe(command), []
    monkeypatch.setattr(recipe, "main", found.append)
    recipe.run(recipe.Options, recipe.main, [*words], command)
    return [getattr(options, name) for options in found]


MEASURING = ["perplexity", "passkey", "finetune"]


@pytest.mark.parametrize("command", MEASURING)
def test_lengths_in_tokens_and_in_multiples_of_l(command, monkeypatch, capsys, tmp_path):
    more = ["--scheme", "yarn:target=auto", "--length", "4x"] if command == "finetune" else []
    for words in (["512", "1024"], ["512,1024"], ["2x", "4x"], ["2x,1024"]):
        assert given(monkeypatch, command, "--lengths", *words, *more) == [(512, 1024)]
    config = tmp_path / "config.yaml"
    config.write_text("lengths: [1.5x, 1024]\n")
    assert given(monkeypatch, command, str(config), *more) == [(384, 1024)]
    assert given(monkeypatch, command, "--lengths", "4y", *more) == []
    assert "'4y' is not a list of lengths such as 256,512,1024 or 1x,2x,4x" in capsys.readouterr().err


def test_one_length_in_multiples_of_l(monkeypatch, capsys):
    scheme = ["--scheme", "yarn:target=auto"]
    assert given(monkeypatch, "finetune", "--length", "4x", *scheme, name="length") == [1024]
    assert given(monkeypatch, "serve", TINY, "--max-length", "4x", name="max_length") == [1024]
    assert main(["export", TINY, "--scheme", "yarn:factor=4", "--length", "4x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["length"] == 1024


@pytest.mark.parametrize("folder", ["tiny-t5", "bert", "missing"])
def test_l_of_other_families(folder, monkeypatch, capsys, tmp_path):
    if folder == "bert":
        BertConfig(max_position_embeddings=128).save_pretrained(tmp_path / folder)
    path = str(Path(TINY).parent / folder if folder == "tiny-t5" else tmp_path / folder)
    expected = {"tiny-t5": [(512,)], "bert": [(256,)], "missing": []}[folder]
    assert given(monkeypatch, "perplexity", "--lengths", "2x", "--model", path) == expected
    assert ("there is no checkpoint" in capsys.readouterr().err) == (folder == "missing")


def test_names_in_the_command_line(capsys):
    assert main(["describe", "--scheme", "Linear:factor=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scheme"] == {"name": "pi", "factor": 4}
    assert main(["describe", "--scheme", "none"]) == 2
    assert "unpatch(model)" in capsys.readouterr().err
    assert main(["describe", "--scheme", "rerope:window=99999"]) == 0
    shown = capsys.readouterr()
    assert "warning          rerope:window=99999 changes nothing" in shown.out
    assert "Warning" not in shown.err
    assert main(["sweep", "--target", "4x", "--dry-run", "--schemes", "ReRoPE", "Self-Extend", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["first_round"]
    assert {line.partition(":")[0] for line in first} == {"rerope", "self_extend"}
