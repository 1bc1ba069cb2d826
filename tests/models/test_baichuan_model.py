"""What users do with a loaded Baichuan: train, generate, adapt, patch, export."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from rope_patch import YaRN, patch, unpatch
from rope_patch.errors import UnsupportedPositions
from rope_patch.evaluation.nll import chunked_nll
from rope_patch.models.baichuan import register_baichuan
from tests.models.baichuan_folders import LAYERS, TRAINING_LENGTH, VARIANTS, write_folder
from tests.runs import (
    assert_close,
    assert_same_gradients,
    cached_logits,
    generated,
    gradients,
    greedy,
    left_padded,
    logits,
    tokens,
)

SPLIT, FUSED = ["q_proj", "k_proj", "v_proj"], ["W_pack"]


@pytest.fixture(params=VARIANTS)
def name(request):
    return request.param


@pytest.fixture
def load(tmp_path, name):
    register_baichuan()
    write_folder(tmp_path / "original", VARIANTS[name])
    return lambda **options: AutoModelForCausalLM.from_pretrained(tmp_path / "original", **options).eval()


@pytest.mark.parametrize("name", ["baichuan2_7b", "baichuan2_13b"], indirect=True)
def test_the_stored_head_is_never_overwritten(load):
    model = load()
    stored = model.lm_head.weight.clone()
    evaluated = logits(model, tokens())
    assert torch.equal(logits(model.train(), tokens()), evaluated)
    assert torch.equal(logits(model.eval(), tokens()), evaluated)
    assert torch.equal(model.lm_head.weight, stored)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)  # lengths of rows do not count
    assert_close(logits(model, tokens()), evaluated)


@pytest.mark.parametrize("name", ["baichuan2_7b"], indirect=True)
def test_the_head_stays_normalised_in_a_larger_vocabulary(load, tmp_path):
    model = load()
    size, expected = model.config.vocab_size, logits(model, tokens())
    model.resize_token_embeddings(size + 5)
    assert_close(logits(model, tokens())[..., :size], expected)
    assert model.lm_head.weight.shape[0] == size + 5
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again, tokens()), logits(model, tokens()))


@pytest.mark.parametrize("name", ["baichuan2_7b"], indirect=True)
def test_gradients_flow_through_the_length_of_a_row(load):
    model = load()
    model(tokens(), labels=tokens()).loss.backward()
    gradient, weight = model.lm_head.weight.grad, model.lm_head.weight
    assert gradient.abs().max() > 0
    # growing a row changes nothing, so its gradient is orthogonal to it
    assert_close((gradient * weight).sum(-1), torch.zeros(len(weight)), 1e-6)


def test_likelihoods_are_scored_through_the_head(load):
    model, ids = load(), tokens(30)
    expected = logits(model, ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    assert_close(chunked_nll(model, ids[:, :-1], ids[:, 1:]), -expected)


def test_the_z_loss_is_the_mean_square_of_the_largest_logits(load):
    model, ids = load(), tokens(20, rows=2)
    plain = model(ids, labels=ids).loss
    model.config.z_loss_weight = 0.1
    largest = logits(model, ids)[:, :-1].amax(-1)
    assert_close(model(ids, labels=ids).loss, plain + 0.1 * (largest**2).mean())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_left_padded_batch_generates_what_each_row_does(load, cache):
    model = load()
    rows = [tokens(TRAINING_LENGTH + 6, seed=1), tokens(5, seed=2), tokens(17, seed=3)]
    ids, mask = left_padded(rows)
    batch = generated(model, ids, attention_mask=mask, cache_implementation=cache, eos_token_id=None)
    for row, found in zip(rows, batch, strict=True):
        assert torch.equal(found[None], greedy(model, row))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_half_precision_stays_near(load, attention):
    ids = tokens(4 * TRAINING_LENGTH)
    exact, half = logits(load(), ids), logits(load(dtype=torch.bfloat16, attn_implementation=attention), ids)
    assert half.dtype == torch.bfloat16
    # the error does not grow with the position
    error = (half.float() - exact).abs().mean(dim=-1)[0]
    assert error.mean() < 0.03 * exact.abs().mean()
    assert error[-TRAINING_LENGTH:].mean() < 2 * error[:TRAINING_LENGTH].mean()


def test_gradient_checkpointing_agrees(load):
    model, texts = load().train(), [tokens(30, rows=2), tokens(12)]
    expected = {key: gradient.clone() for key, gradient in gradients(model, *texts).items()}
    model.gradient_checkpointing_enable()
    assert model.model.layers[0].gradient_checkpointing
    assert_same_gradients(gradients(model, *texts), expected)


def test_every_parameter_learns(load):
    for parameter, gradient in gradients(load(), tokens(30)).items():
        assert gradient.abs().max() > 0, parameter


def test_attentions_are_given_under_eager_attention(load):
    model = load(attn_implementation="eager")
    given = model(tokens(20, rows=2), output_attentions=True).attentions
    assert len(given) == LAYERS
    for weights in given:
        assert weights.shape == (2, model.config.num_attention_heads, 20, 20)
        assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        assert weights.triu(1).abs().max() == 0


@pytest.mark.parametrize("name", ["baichuan_13b"], indirect=True)
def test_an_attention_that_cannot_score_alibi_is_named(load, monkeypatch):
    model = load()
    # its mask would be compiled for twenty seconds, and then looked at by nobody
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "flex_attention", lambda *_, **__: None)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedPositions, match=r"'flex_attention'.*allowed: eager, sdpa"):
        model(tokens())


@pytest.mark.parametrize("name", ["baichuan_7b", "baichuan2_13b"], indirect=True)
@pytest.mark.parametrize("targets", [SPLIT, FUSED, "all-linear"])
def test_lora_is_trained_merged_and_saved(load, tmp_path, targets):
    model, ids = load(fused_qkv=targets == FUSED), tokens(20)
    original = load_file(tmp_path / "original" / "model.safetensors")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    expected = logits(adapted, ids)
    trained = gradients(adapted, ids)
    assert trained
    assert all("lora" in key and gradient.abs().max() > 0 for key, gradient in trained.items())

    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(fused_qkv=targets == FUSED), tmp_path / "adapter")
    assert torch.equal(logits(again, ids), expected)

    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    names = {key for key in original if "inv_freq" not in key}
    assert merged.keys() == names
    changed = {key for key in names if not torch.equal(merged[key], original[key])}
    expected_names = {key for key in names if ".layers." in key and "norm" not in key}
    assert changed == (expected_names if targets == "all-linear" else {key for key in names if "W_pack" in key})
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), ids), expected, 1e-4)


@pytest.mark.parametrize("name", ["baichuan_7b", "baichuan2_7b"], indirect=True)
@pytest.mark.parametrize("fused", [False, True])
def test_a_scheme_travels_to_vllm_in_the_config(load, name, tmp_path, fused):
    model, ids = load(fused_qkv=fused), tokens(2 * TRAINING_LENGTH)
    plain = logits(model, ids)
    patch(model, "yarn", factor=4)
    patched = logits(model, ids)
    assert (patched - plain).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "saved")

    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == [VARIANTS[name].spelling]
    said = config["rope_parameters"]
    assert (said["rope_type"], said["factor"], said["rope_theta"]) == ("yarn", 4.0, 10000.0)
    assert said["original_max_position_embeddings"] == TRAINING_LENGTH
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert {key.split(".")[4] for key in weights if "self_attn" in key} == {"W_pack", "o_proj"}

    plainly_loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_close(logits(plainly_loaded, ids), patched)
    unpatch(model)
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("name", ["baichuan_7b", "baichuan2_7b"], indirect=True)
@pytest.mark.parametrize("fused", [False, True])
def test_late_schemes_are_mounted_on_the_rotary_kind(load, fused):
    model, ids = load(fused_qkv=fused), tokens(2 * TRAINING_LENGTH)
    plain = logits(model, ids)
    with patch(model, YaRN(factor=4), mount="late"):
        late = logits(model, ids)
    with patch(model, "rerope", window=8):
        assert (logits(model, ids) - plain).abs().max() > 1e-3
        assert torch.equal(generated(model, ids, eos_token_id=None), greedy(model, ids))
    patch(model, YaRN(factor=4))
    assert_close(late, logits(model, ids))


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage that any operation gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, list | tuple) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("name", ["baichuan_13b"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alibi_needs_no_memory_for_all_pairs(load, dtype):
    model, ids = load(dtype=dtype), tokens(4096)
    with LargestTensor() as largest:
        logits(model, ids)
    assert largest.nbytes < ids.numel() ** 2 / 4


@pytest.mark.parametrize("name", ["baichuan_13b"], indirect=True)
def test_alibi_compiles_to_one_graph_with_and_without_a_cache(load):
    model, ids = load(), tokens(30)
    expected = logits(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    with torch.no_grad():
        assert_close(compiled(ids, use_cache=False).logits, expected)
    cache = StaticCache(config=model.config, max_cache_len=32)
    assert_close(cached_logits(compiled, ids, (20, 1, 1, 8), cache=cache), expected)
