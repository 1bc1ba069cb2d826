"""What saving leaves: adapters record the scheme, and one warning names what plain libraries will drop."""

import copy
import io
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch import patch, unpatch
from tests.models import absolute_families, t5_families
from tests.runs import assert_close, logits, tokens


def warned(act, *arguments):
    """The project's own warnings, each without how to silence it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(*arguments)
    return [str(each.message).rpartition(" (")[0] for each in caught if each.category is rope_patch.RopePatchWarning]


def test_a_saved_model_that_plain_transformers_reads_otherwise_is_told_once(llama, tmp_path):
    patch(llama, "rerope", window=6)
    folder = str(tmp_path / "saved")
    reads = f"reads {folder} under rope, without rerope:window=6"
    wanted = f"plain Transformers (AutoModel, pipeline) {reads}; rope_patch.from_pretrained({folder!r}) reads it under "
    assert warned(llama.save_pretrained, folder) == [f"{wanted}the scheme"]
    assert warned(llama.save_pretrained, folder) == []
    assert warned(llama.model.save_pretrained, tmp_path / "backbone") == []
    for copied in (copy.deepcopy(llama), unpatch(llama).model):
        assert warned(copied.save_pretrained, tmp_path / "copied") == []
    assert "save_pretrained" not in vars(llama)
    loaded = rope_patch.from_pretrained(folder)
    assert warned(loaded.save_pretrained, folder) == [f"{wanted}the scheme"]


@pytest.mark.parametrize("spec", ["yarn:factor=4", "ntk:factor=4", "rope", "layers:[0-1=yarn:factor=4]"])
def test_a_saved_model_that_plain_transformers_reads_right_is_no_warning(spec, llama, tmp_path):
    with patch(llama, spec):
        assert warned(llama.save_pretrained, tmp_path) == []
    with patch(llama, spec, mount="late"):
        assert len(warned(llama.save_pretrained, tmp_path)) == (spec != "rope")


def test_the_saved_tables_of_other_families(tmp_path):
    with patch(absolute_families.build("bert"), "hierarchical") as handle:
        assert warned(handle.model.save_pretrained, tmp_path) == []
    t5 = t5_families.build()
    with patch(t5, "t5:interpolation=2"):
        assert "under t5" in warned(t5.save_pretrained, tmp_path)[0]
    with patch(t5.encoder, "t5:interpolation=2"):
        (said,) = warned(t5.save_pretrained, tmp_path)
        assert said.startswith(f"{tmp_path} does not record t5:interpolation=2, which only a part")


# --- adapters ---------------------------------------------------------------------------------------------------------


def lora(**settings):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **settings)


def patched_first(model, spec):
    patch(model, spec)
    return get_peft_model(model, lora())


def patched_backbone(model, spec):
    patch(model.model, spec)
    return get_peft_model(model, lora(task_type="CAUSAL_LM"))


def patched_last(model, spec):
    adapted = get_peft_model(model, lora())
    patch(adapted, spec)
    return adapted


def by_transformers(model, spec):
    patch(model, spec)
    try:
        model.add_adapter(lora())
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(str(error))
    return model


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.fixture
def base(llama, tmp_path):
    llama.save_pretrained(tmp_path / "base")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "base")


@pytest.mark.parametrize("adapted", [patched_first, patched_last, patched_backbone, by_transformers])
@pytest.mark.parametrize("spec", ["rerope:window=6", "yarn:factor=4", "layers:[0=rerope:window=6;rest=none]"])
def test_adapters_come_back_under_their_scheme(adapted, spec, base, tmp_path):
    model, folder = adapted(base, spec).eval(), tmp_path / "adapters"
    expected = logits(model, tokens())
    said = f"plain PEFT reads {folder} without {spec}; rope_patch.from_pretrained({str(folder)!r})"
    (found,) = warned(model.save_pretrained, folder)
    assert found.startswith(said)
    assert warned(model.save_pretrained, tmp_path / "again") == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # PEFT calls what Transformers deprecates
        loaded = rope_patch.from_pretrained(folder)
    assert torch.equal(logits(loaded, tokens()), expected)
    for copied in (copy.deepcopy(model), pickled(model)):
        copied.save_pretrained(tmp_path / "copied")
        assert torch.equal(logits(rope_patch.from_pretrained(tmp_path / "copied"), tokens()), expected)
    unpatch(model)
    model.save_pretrained(tmp_path / "plain")
    assert "rope_patch" not in (tmp_path / "plain" / "adapter_config.json").read_text()
    assert not (tmp_path / "plain" / "rope_patch.json").exists()
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder)
    assert torch.equal(logits(plain, tokens()), logits(model, tokens()))


@pytest.mark.parametrize("adapted", [patched_first, patched_last])
@pytest.mark.parametrize("spec", ["rerope:window=6", "yarn:factor=4"])
def test_a_merged_model_comes_back_under_its_scheme(adapted, spec, base, tmp_path):
    merged = adapted(base, spec).eval().merge_and_unload()
    assert bool(warned(merged.save_pretrained, tmp_path / "merged")) == ("rerope" in spec)
    assert torch.equal(logits(rope_patch.from_pretrained(tmp_path / "merged"), tokens()), logits(merged, tokens()))


def test_adapters_on_a_checkpoint_that_states_their_scheme_are_read_by_peft(base, tmp_path):
    with patch(base, "yarn:factor=4"):
        base.save_pretrained(tmp_path / "yarn")
    model = get_peft_model(rope_patch.from_pretrained(tmp_path / "yarn"), lora()).eval()
    assert warned(model.save_pretrained, tmp_path / "adapters") == []
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "yarn"), tmp_path / "adapters")
    assert_close(logits(plain, tokens()), logits(model, tokens()))


def test_adapters_under_another_scheme_than_their_checkpoint(base, tmp_path):
    with patch(base, "rerope:window=6"):
        base.save_pretrained(tmp_path / "rerope")
    model = rope_patch.from_pretrained(tmp_path / "rerope")
    unpatch(model)
    patch(model, "logn")
    model = get_peft_model(model, lora()).eval()
    model.save_pretrained(tmp_path / "adapters")
    loaded = rope_patch.from_pretrained(tmp_path / "adapters")
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))


def test_adapters_without_what_the_scheme_learns(base, tmp_path):
    model = patched_last(base, "kerple")
    (said,) = warned(model.save_pretrained, tmp_path / "adapters")
    assert said.endswith("kerple: patch before PEFT, with modules_to_save=['rope_patch']")
    unpatch(model)
    patch(base := model.unload(), "kerple")
    model = get_peft_model(base, lora(modules_to_save=["rope_patch"])).eval()
    (said,) = warned(model.save_pretrained, tmp_path / "adapters")
    assert said.startswith("plain PEFT reads")
    expected = logits(model, tokens())
    assert torch.equal(logits(rope_patch.from_pretrained(tmp_path / "adapters"), tokens()), expected)
