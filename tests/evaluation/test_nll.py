from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaModel,
    Qwen3Config,
)

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.nll import chunked_nll

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
# the settings differ from the defaults where the head does something of its own
HEADS = {
    "llama": LlamaConfig(**SIZES),
    "cohere": CohereConfig(**SIZES, logit_scale=0.3),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, num_key_value_heads=1, final_logit_softcapping=0.5),
    "granite": GraniteConfig(**SIZES, logits_scaling=7.0),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, num_key_value_heads=1),
}


def full_nll(model, tokens, scored):
    """The definition: logits of everything, then one cross-entropy per token."""
    logits = model(tokens[:, :-1]).logits[:, -scored:].float()
    return -logits.log_softmax(-1).gather(-1, tokens[:, -scored:, None])[..., 0]


def build(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HEADS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("rows_per_chunk", [1, 5, 256])
@torch.no_grad()
def test_equals_cross_entropy_of_all_logits(name, rows_per_chunk):
    model = build(name)
    tokens = torch.randint(61, (2, 24))
    found = chunked_nll(model, tokens[:, :-1], tokens[:, -13:], rows_per_chunk)
    torch.testing.assert_close(found, full_nll(model, tokens, 13), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "field"), [("cohere", "logit_scale"), ("granite", "logits_scaling")])
def test_a_scaled_head_matters_to_this_test(name, field):
    model = build(name)
    tokens = torch.randint(61, (1, 9))
    before = chunked_nll(model, tokens[:, :-1], tokens[:, 1:])
    setattr(model.config, field, 1.0)
    setattr(model, field, 1.0)
    assert (chunked_nll(model, tokens[:, :-1], tokens[:, 1:]) - before).abs().max() > 1e-2


@torch.no_grad()
def test_the_head_sees_scored_rows_only_and_never_more_than_a_chunk(model):
    seen = []
    model.lm_head.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    tokens = torch.randint(257, (1, 41))
    chunked_nll(model, tokens[:, :-1], tokens[:, -20:], rows_per_chunk=8)
    assert seen == [8, 8, 4]


@torch.no_grad()
def test_the_model_is_whole_again_afterwards_also_on_an_error(model):
    tokens = torch.randint(257, (1, 12))
    before, stack, names = model(tokens).logits, model.model, list(model._modules)
    chunked_nll(model, tokens[:, :-1], tokens[:, -4:])
    handle = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chunked_nll(model, tokens[:, :-1], tokens[:, -4:])
    handle.remove()
    assert model.model is stack
    assert list(model._modules) == names
    assert torch.equal(model(tokens).logits, before)


@torch.no_grad()
def test_half_precision_is_scored_in_float32(model):
    tokens = torch.randint(257, (1, 12))
    model.to(torch.bfloat16)
    found = chunked_nll(model, tokens[:, :-1], tokens[:, -4:])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, full_nll(model, tokens, 4))


def test_a_stack_without_head_and_too_many_targets_are_refused(model):
    tokens = torch.randint(61, (1, 8))
    with pytest.raises(EvaluationError, match="LlamaModel has no language-model head"):
        chunked_nll(LlamaModel(HEADS["llama"]), tokens, tokens)
    with pytest.raises(EvaluationError, match="8 targets for a context of 4 tokens"):
        chunked_nll(model, tokens[:, :4], tokens)


@torch.no_grad()
def test_adapters_count_also_on_the_head(model):
    tokens = torch.randint(257, (1, 12))
    before = chunked_nll(model, tokens[:, :-1], tokens[:, -4:])
    targets = ["q_proj", "lm_head"]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()
    found = chunked_nll(adapted, tokens[:, :-1], tokens[:, -4:])
    torch.testing.assert_close(found, full_nll(adapted, tokens, 4), rtol=1e-5, atol=1e-5)
    assert (found - before).abs().max() > 1e-2
