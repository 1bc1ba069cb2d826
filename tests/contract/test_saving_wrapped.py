"""`rope_patch.save_pretrained`: what is around a patched model does not hide its scheme."""

import copy
import gc
import json
import warnings
from hashlib import sha256

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

import rope_patch
from rope_patch import InvalidField, NotPatched, UnsupportedModel, get_scheme, patch, save_pretrained, unpatch
from rope_patch.doctor.versions import older
from tests.families import build, config_of
from tests.models import t5_families
from tests.runs import logits, tokens

SPECS = ["rerope:window=6", "yarn:factor=4"]
schemes = pytest.mark.parametrize("spec", SPECS)


class Around(nn.Module):
    """A head that somebody wrote around a model."""

    def __init__(self, model):
        super().__init__()
        self.policy, self.value = model, nn.Linear(64, 1)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS = {
    "nothing": lambda model: model,
    "compiled": torch.compile,
    "parallel": nn.DataParallel,
    "own": Around,
    "twice": lambda model: Around(torch.compile(model)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@schemes
def test_a_wrapped_model_comes_back_under_its_scheme(spec, wrapper, llama, tmp_path):
    handle = patch(llama, spec)
    expected = logits(llama, tokens())
    save_pretrained(WRAPPERS[wrapper](llama), tmp_path / "wrapped")
    save_pretrained(handle, tmp_path / "handle")
    for folder in ("wrapped", "handle"):
        loaded = rope_patch.from_pretrained(tmp_path / folder)
        assert type(loaded) is LlamaForCausalLM
        assert torch.equal(logits(loaded, tokens()), expected)
    assert torch.equal(logits(unpatch(loaded).model, tokens()), logits(unpatch(llama).model, tokens()))


@schemes
def test_a_replicated_model_comes_back_under_its_scheme(spec, llama, one_process, tmp_path):
    patch(llama, spec)
    save_pretrained(DistributedDataParallel(llama), tmp_path / "saved", is_main_process=True)
    assert torch.equal(logits(rope_patch.from_pretrained(tmp_path / "saved"), tokens()), logits(llama, tokens()))


def test_sharded_weights_are_collected_by_the_caller(llama, one_process, tmp_path):
    patch(llama, "rerope", window=6)
    expected, weights = logits(llama, tokens()), copy.deepcopy(llama.state_dict())
    sharded = FullyShardedDataParallel(llama, device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match=r"state_dict=accelerator.get_state_dict\(model\)"):
        save_pretrained(sharded, tmp_path / "saved")
    save_pretrained(sharded, tmp_path / "saved", state_dict=weights)
    assert torch.equal(logits(rope_patch.from_pretrained(tmp_path / "saved"), tokens()), expected)


@schemes
def test_a_model_that_nobody_could_find_at_the_patch_comes_back_under_its_scheme(spec, tmp_path):
    model = LlamaForCausalLM(config_of("llama")).eval()
    backbone, model.model = model.model, None
    patch(backbone, spec)
    model.model = backbone  # a model that is built around a patched one
    expected = logits(model, tokens())
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(NotPatched):
        unpatch(rope_patch.from_pretrained(tmp_path / "plain"))
    save_pretrained(model, tmp_path / "saved")
    assert torch.equal(logits(rope_patch.from_pretrained(tmp_path / "saved"), tokens()), expected)


def prompts(**settings):
    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, **settings)


def lora():
    return LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


@pytest.mark.parametrize("adapters", [prompts, lora])
@schemes
def test_adapters_of_every_kind_record_the_scheme(spec, adapters, llama, tmp_path):
    llama.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    patch(model, spec)
    adapted = get_peft_model(model, adapters())
    adapted.add_adapter("second", adapters())
    adapted.eval()
    expected = logits(adapted, tokens())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "learned prompts")
        save_pretrained(Around(adapted), tmp_path / "adapters")
    for folder in (tmp_path / "adapters", tmp_path / "adapters" / "second"):
        assert "rope_patch" not in json.loads((folder / "adapter_config.json").read_text())
        settings = json.loads((folder / "rope_patch.json").read_text())
        assert settings["rope_patch"] == {"scheme": get_scheme(spec).to_dict()}
        assert settings["weights_sha256"] == sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    again = rope_patch.from_pretrained(tmp_path / "adapters").eval()
    assert torch.equal(logits(again, tokens()), expected)


def adapters_of(llama, folder):
    """Adapters of a patched model in a folder, and the logits of that model."""
    llama.save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    patch(model, "rerope:window=6")
    adapted = get_peft_model(model, lora()).eval()
    adapted.save_pretrained(folder / "adapters")
    return folder / "adapters", logits(adapted, tokens())


def test_plain_peft_reads_adapters_without_advice(llama, tmp_path):
    folder, _ = adapters_of(llama, tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*nexpected keyword arguments.*")
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder)


def test_adapters_of_an_older_release_have_the_scheme_in_their_settings(llama, tmp_path):
    folder, expected = adapters_of(llama, tmp_path)
    record, settings = folder / "rope_patch.json", folder / "adapter_config.json"
    recorded = json.loads(record.read_text())["rope_patch"]
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "rope_patch": recorded}))
    record.unlink()
    again = rope_patch.from_pretrained(folder).eval()
    assert torch.equal(logits(again, tokens()), expected)


def test_a_record_that_was_saved_with_other_adapters_is_refused(llama, tmp_path):
    folder, _ = adapters_of(llama, tmp_path)
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora()).eval()
    plain.save_pretrained(folder)
    with pytest.raises(InvalidField, match=r"saved with other weights.*Delete rope_patch.json"):
        rope_patch.from_pretrained(folder)
    (folder / "rope_patch.json").unlink()
    again = rope_patch.from_pretrained(folder).eval()
    assert torch.equal(logits(again, tokens()), logits(plain, tokens()))


@pytest.mark.parametrize("content", ["{}", "[]", '{"rope_patch": null}'])
def test_a_file_without_a_record_is_not_taken_for_a_plain_model(content, llama, tmp_path):
    folder, _ = adapters_of(llama, tmp_path)
    (folder / "rope_patch.json").write_text(content)
    with pytest.raises(InvalidField, match="has no scheme under 'rope_patch'"):
        rope_patch.from_pretrained(folder)


@pytest.mark.skipif(
    older(peft.__version__, MIN_PEFT_VERSION),
    reason=f"this Transformers adds adapters by PEFT {MIN_PEFT_VERSION} and later",
)
def test_adapters_that_transformers_saves_keep_their_record(llama, tmp_path):
    llama.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    patch(model, "rerope:window=6")
    model.add_adapter(lora())
    model.save_pretrained(tmp_path / "adapters")
    again = rope_patch.from_pretrained(tmp_path / "adapters").eval()
    assert torch.equal(logits(again, tokens()), logits(model.eval(), tokens()))


def test_prompts_are_warned_of_once_where_peft_saves_them(llama, tmp_path):
    patch(llama, "rerope", window=6)
    adapted = get_peft_model(llama, prompts())
    with pytest.warns(
        rope_patch.RopePatchWarning, match="learned prompts in front of a patched model are saved without"
    ):
        adapted.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "learned prompts")
        adapted.save_pretrained(tmp_path)
        Around(llama).state_dict()


def test_no_patch_of_a_whole_model_searches_the_memory(llama, tmp_path, monkeypatch):
    adapted = get_peft_model(build("llama"), lora())
    for search in ("get_objects", "get_referrers"):
        monkeypatch.setattr(gc, search, lambda *_: pytest.fail("the garbage collector was asked"))
    for model in (llama, adapted):
        patch(model, "rerope", window=6)
        model.save_pretrained(tmp_path)
        save_pretrained(model, tmp_path)
        unpatch(model)


def test_a_model_without_a_scheme_is_saved_as_it_is(llama, tmp_path):
    save_pretrained(llama, tmp_path / "saved")
    llama.save_pretrained(tmp_path / "plain")
    saved, plain = ((tmp_path / name / "config.json").read_text() for name in ("saved", "plain"))
    assert saved == plain


def test_what_a_config_cannot_say_is_refused_before_anything_is_written(llama, tmp_path):
    t5, folder = t5_families.build(), tmp_path / "saved"
    patch(t5.encoder, "t5:interpolation=2")
    with pytest.raises(UnsupportedModel, match=r"only a part of .* carries t5:interpolation=2"):
        save_pretrained(t5, folder)
    with pytest.raises(UnsupportedModel, match="Linear has no model of Transformers in it"):
        save_pretrained(nn.Linear(2, 2), folder)
    patch(llama, "rerope", window=6)
    with pytest.raises(InvalidField, match="push_to_hub=True is not allowed here"):
        save_pretrained(llama, folder, push_to_hub=True)
    assert not folder.exists()


def test_prefixes_stay_refused(llama):
    patch(llama, "rerope", window=6)
    adapted = get_peft_model(llama, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(rope_patch.RopePatchError):
        logits(adapted, tokens())
