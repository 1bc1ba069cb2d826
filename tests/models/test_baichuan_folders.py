"""Published folders: loaded natively, recognised, and saved again as they were."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from rope_patch.errors import InvalidField, NoCheckpoint
from rope_patch.models.baichuan import published_remote_code, register_baichuan
from rope_patch.models.baichuan.configuration import BaichuanConfig
from rope_patch.models.baichuan.modeling import BaichuanForCausalLM, BaichuanModel
from rope_patch.saving.loading import load_config
from tests.models.baichuan_folders import GENERATION, VARIANTS, write_folder
from tests.runs import assert_close, logits, tokens

ROOT = Path(__file__).resolve().parents[2]

# what Transformers itself writes otherwise
REWRITTEN = {"torch_dtype", "transformers_version"}


@pytest.fixture(autouse=True)
def _registered():
    register_baichuan()


@pytest.fixture(params=VARIANTS)
def variant(request):
    return VARIANTS[request.param]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def config_in(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shards", [0, 3])
def test_a_folder_is_saved_as_it_was(variant, tmp_path, shards, fused):
    weights = write_folder(tmp_path / "original", variant, shards)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "original", fused_qkv=fused, output_loading_info=True
    )
    assert not any(report.values())
    assert hasattr(model.model.layers[0].self_attn, "W_pack") == fused
    model.save_pretrained(tmp_path / "saved")

    assert_same_weights(weights_in(tmp_path / "saved"), weights)
    generation = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert generation == generation | GENERATION
    original, saved = config_in(tmp_path / "original"), config_in(tmp_path / "saved")
    for name in original.keys() - REWRITTEN:
        assert saved[name] == original[name], name
    assert ("max_position_embeddings" in saved) == (not variant.alibi)
    assert (saved["rope_parameters"] is None) == variant.alibi

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(again) is type(model)
    assert again.config.uses_alibi == variant.alibi
    assert hasattr(again.model.layers[0].self_attn, "W_pack") == fused
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


def test_both_layouts_give_the_same_logits(variant, tmp_path):
    write_folder(tmp_path, variant)
    split, fused = (AutoModelForCausalLM.from_pretrained(tmp_path, fused_qkv=fused) for fused in (False, True))
    assert_close(logits(fused, tokens()), logits(split, tokens()))


def test_a_model_made_from_a_config_is_saved_under_the_published_names(variant, tmp_path):
    expected = write_folder(tmp_path / "original", variant)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "original"))
    model.save_pretrained(tmp_path / "saved")
    assert weights_in(tmp_path / "saved").keys() == expected.keys()


def test_the_stack_alone_is_loaded_from_a_folder(variant, tmp_path):
    write_folder(tmp_path, variant)
    whole, stack = AutoModelForCausalLM.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)
    assert isinstance(stack, BaichuanModel)
    assert torch.equal(stack(tokens()).last_hidden_state, whole.model(tokens()).last_hidden_state)


def test_the_spelling_of_the_architecture_stays(variant, tmp_path):
    write_folder(tmp_path, variant)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(model, BaichuanForCausalLM)
    assert type(model).__name__ == variant.spelling


@pytest.mark.parametrize("trusted", [None, False, True])
def test_the_code_beside_a_checkpoint_never_runs(variant, tmp_path, trusted):
    write_folder(tmp_path, variant)
    assert isinstance(AutoConfig.from_pretrained(tmp_path, trust_remote_code=trusted), BaichuanConfig)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trusted)
    assert isinstance(model, BaichuanForCausalLM)
    assert not (tmp_path / "remote_code_ran").exists()


def test_stored_frequencies_are_ignored(tmp_path):
    write_folder(tmp_path, VARIANTS["baichuan_7b"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)
    assert not any("inv_freq" in name for name in model.state_dict())


def test_alibi_keeps_no_rotary_module(tmp_path):
    write_folder(tmp_path, VARIANTS["baichuan_13b"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any("rotary" in name for name, _ in model.named_modules())
    assert list(model.buffers()) == []


@pytest.mark.parametrize(
    ("fields", "alibi"),
    [
        ({"hidden_size": 32, "position_embedding_type": "rope"}, False),
        ({"hidden_size": 32, "position_embedding_type": "alibi", "max_position_embeddings": 64}, True),
        ({"hidden_size": 4096, "position_embedding_type": "alibi"}, True),
        ({"hidden_size": 32, "architectures": ["BaiChuanForCausalLM"]}, False),
        ({"hidden_size": 32, "max_position_embeddings": 64}, False),
        ({"hidden_size": 4096}, False),
        ({"hidden_size": 5120, "num_attention_heads": 40}, True),
        ({"hidden_size": 32, "architectures": ["BaichuanForCausalLM"], "model_max_length": 64}, True),
    ],
)
def test_the_position_kind_is_read_and_stays(fields, alibi, tmp_path):
    config = BaichuanConfig(**fields)
    assert config.uses_alibi == alibi
    assert (config.rope_parameters is None) == alibi
    config.architectures = ["BaichuanForCausalLM"]  # as in any saved model
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.uses_alibi == alibi
    lengths = (again.max_position_embeddings, again.model_max_length)
    assert lengths == (config.max_position_embeddings, config.model_max_length)
    assert lengths[alibi] == fields.get("max_position_embeddings", fields.get("model_max_length", 4096))


def test_an_unknown_position_kind_is_named():
    with pytest.raises(InvalidField, match=r"'alibbi': did you mean 'alibi'\?"):
        BaichuanConfig(position_embedding_type="alibbi")


@pytest.mark.parametrize(
    ("fields", "normalized"),
    [({}, False), ({"vocab_size": 125696}, True), ({"vocab_size": 125696, "normalize_lm_head": False}, False)],
)
def test_the_head_is_read_from_the_vocabulary_and_stays(fields, normalized):
    config = BaichuanConfig(**fields)
    assert config.normalizes_head == normalized
    config.vocab_size += 1
    assert config.normalizes_head == normalized


@pytest.mark.parametrize("value", [(False,), [False], [True]])
def test_a_listed_gradient_checkpointing_is_ignored(value, tmp_path):
    config = BaichuanConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=9, gradient_checkpointing=value
    )
    model = BaichuanForCausalLM(config)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    model.save_pretrained(tmp_path)
    assert config_in(tmp_path)["gradient_checkpointing"] == list(value)


def test_folders_are_recognised(tmp_path):
    write_folder(tmp_path / "baichuan", VARIANTS["baichuan_7b"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    assert isinstance(load_config(tmp_path / "baichuan"), BaichuanConfig)
    assert not isinstance(load_config(tmp_path / "other"), BaichuanConfig)
    with pytest.raises(NoCheckpoint, match="nothing"):
        load_config(tmp_path / "nothing")


def test_published_code_is_recognised(tmp_path):
    attention = type("Attention", (nn.Module,), {"__module__": "transformers_modules.x.modeling_baichuan"})()
    attention.W_pack = nn.Linear(2, 6)
    remote = type("BaiChuanForCausalLM", (nn.Module,), {})()
    remote.layers = nn.ModuleList([attention])
    assert "rope_patch.from_pretrained" in published_remote_code(remote)

    write_folder(tmp_path, VARIANTS["baichuan_7b"])
    assert published_remote_code(AutoModelForCausalLM.from_pretrained(tmp_path, fused_qkv=True)) is None


def test_a_wide_model_of_the_published_shape_is_built_without_weights():
    published = {"hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 1, "vocab_size": 125696}
    with torch.device("meta"):
        model = BaichuanForCausalLM(BaichuanConfig(**published))
    assert model.config.uses_alibi
    assert type(model.lm_head).__name__ == "NormHead"
    assert dataclasses.is_dataclass(model.config)
