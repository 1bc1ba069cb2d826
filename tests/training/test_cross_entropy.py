from __future__ import annotations

import copy
import multiprocessing
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

import rope_patch
from rope_patch.errors import EvaluationError
from rope_patch.training.cross_entropy import LanguageModelLoss

VOCABULARY = 61
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
# the settings differ from the defaults where the head does something of its own
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "cohere": CohereConfig(**SIZES, logit_scale=0.3, eos_token_id=1),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.5),
    "granite": GraniteConfig(**SIZES, logits_scaling=7.0),
}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
ADAPTERS = {
    "frozen head": LoraConfig(**LORA),
    "adapted head": LoraConfig(**{**LORA, "target_modules": ["q_proj", "lm_head"]}),
    "trained head": LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "trained embedding": LoraConfig(**LORA, modules_to_save=["embed_tokens"]),
}


def build(name="llama"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def batch(rows=2, length=15):
    """Tokens, and the labels of some of them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (rows, length + 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.rand(rows, length, generator=generator) < 0.3, -100)
    return tokens[:, :-1], labels


def definition(model, tokens, labels, **arguments):
    """Logits of everything, then the sum of -ln p of the labels."""
    log_p = model(input_ids=tokens, use_cache=False, **arguments).logits.float().log_softmax(-1)
    wanted = labels != -100
    return -log_p[wanted].gather(-1, labels[wanted][:, None]).sum()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(model, rtol=1e-5, rows_per_chunk=4, **arguments):
    """Same loss, and same gradients up to a part of the largest entry of each."""
    tokens, labels = batch()
    expected = definition(model, tokens, labels, **arguments)
    expected_gradients = gradients(model, expected)
    found = LanguageModelLoss(model, rows_per_chunk)(tokens, labels, **arguments)
    found_gradients = gradients(model, found)
    assert (found.dtype, found.shape) == (torch.float32, ())
    assert_close(found, expected, rtol=rtol, atol=0)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in found_gradients.items():
        wanted = expected_gradients[name]
        assert gradient.dtype == wanted.dtype
        assert (gradient - wanted).abs().max() <= rtol * wanted.abs().max(), name


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows_per_chunk", [1, 7, 256])
def test_loss_and_gradients_are_those_of_all_logits(name, rows_per_chunk):
    assert_same_step(build(name), rows_per_chunk=rows_per_chunk)


def test_the_mean_is_the_loss_of_the_model():
    model, (tokens, _) = build("gemma2"), batch()
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    found = LanguageModelLoss(model)(tokens, labels) / (labels != -100).sum()
    assert_close(found, model(tokens, labels=tokens).loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", ["llama", "llama, tied"])
def test_adapters_get_their_gradients(name, adapter):
    model = get_peft_model(build(name), copy.deepcopy(ADAPTERS[adapter]))
    assert_same_step(model)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_only_the_head_is_trained():
    model = build()
    model.base_model.requires_grad_(False)
    assert_same_step(model)
    assert model.base_model.embed_tokens.weight.grad is None


def test_a_patched_model():
    rope_patch.patch(model := build(), "rerope", window=8)
    assert_same_step(model)


def test_positions_and_masks_reach_the_model():
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[0, :5] = 0
    assert_same_step(build(), attention_mask=mask, position_ids=torch.arange(15).expand(2, -1) + 3)


def test_gradient_checkpointing():
    model = build().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(0))
    assert_same_step(model)
    assert len(calls) == 4


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_autocast(name):
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(build(name), rtol=0.02)


def test_the_head_runs_under_the_autocast_around_it():
    model, seen = build(), []
    model.lm_head.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = LanguageModelLoss(model)(*batch())
    loss.backward()
    assert seen == [torch.bfloat16]


def test_bfloat16_gradients_of_the_head_are_summed_in_float32():
    model = build().to(torch.bfloat16)
    tokens, labels = batch(4, 30)
    definition(reference := copy.deepcopy(model).float(), tokens, labels).backward()
    exact, errors = reference.lm_head.weight.grad, []
    for rows_per_chunk in (1, 1000):
        found = gradients(model, LanguageModelLoss(model, rows_per_chunk)(tokens, labels))["lm_head.weight"]
        assert found.dtype == torch.bfloat16
        errors.append((found - exact).norm() / exact.norm())
    assert errors[0] <= 1.1 * errors[1]


def test_hooks_on_a_parameter_of_the_head_see_the_whole_gradient_once():
    model, seen = build(), []
    model.lm_head.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    LanguageModelLoss(model, 3)(*batch()).backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], model.lm_head.weight.grad)


def test_the_scale_of_the_loss_scales_the_gradient_and_gradients_add_up():
    model = build()
    loss = LanguageModelLoss(model, 4)
    once = gradients(model, loss(*batch()))
    model.zero_grad()
    for factor in (0.25, 0.5):
        (loss(*batch()) * factor).backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, 0.75 * once[name])


@pytest.mark.parametrize("eager", [True, False])
def test_without_a_label_loss_and_gradients_are_zero(eager):
    model, (tokens, labels) = build(), batch()
    with torch.set_grad_enabled(eager):
        loss = LanguageModelLoss(model)(tokens, torch.full_like(labels, -100))
    assert loss == 0
    if eager:
        found = gradients(model, loss)
        assert found.keys() == dict(model.named_parameters()).keys()
        assert all((gradient == 0).all() for gradient in found.values())


def test_a_logit_that_is_not_finite_shows():
    model = build()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.inf
    loss = LanguageModelLoss(model, 4)
    assert not loss(*batch()).isfinite()
    assert not torch.no_grad()(loss)(*batch()).isfinite()


def test_without_gradients_the_value_is_the_same_and_nothing_is_kept():
    model = build()
    loss = LanguageModelLoss(model, 4)
    with torch.no_grad():
        found = loss(*batch())
    assert not found.requires_grad
    assert_close(found, loss(*batch()).detach())


def test_the_head_sees_rows_with_labels_only_and_never_more_than_a_chunk():
    model, seen, (tokens, labels) = build(), [], batch()
    model.lm_head.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    LanguageModelLoss(model, 4)(tokens, labels)
    assert max(seen) == 4
    assert sum(seen) == (labels != -100).sum()


def test_no_tensor_with_a_column_per_token_of_the_vocabulary_outlives_the_forward():
    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor
            if tensor.shape[-1:] == (VOCABULARY,):
                saved.append(weakref.ref(self))

    saved = []
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda kept: kept.tensor):
        loss = LanguageModelLoss(build(), 4)(*batch())
    assert loss.requires_grad
    assert saved
    assert not any(reference() for reference in saved)


def test_the_model_is_whole_again_also_after_an_error():
    model, (tokens, labels) = build(), batch()
    stack, names = model.model, list(model._modules)
    labels[0, 0] = VOCABULARY
    with pytest.raises(IndexError):
        LanguageModelLoss(model)(tokens, labels)
    assert model.model is stack
    assert list(model._modules) == names


def test_a_second_backward_is_refused_and_never_scaled_twice():
    loss = LanguageModelLoss(build())(*batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="given out already"):
        loss.backward()


def test_its_parameters_are_those_of_the_model_once():
    model = build()
    loss = LanguageModelLoss(model)
    assert list(loss.state_dict()) == [f"model.{name}" for name in model.state_dict()]


def test_what_has_no_head_of_its_own_is_refused():
    with pytest.raises(EvaluationError, match="LlamaModel has no language-model head"):
        LanguageModelLoss(LlamaModel(CONFIGS["llama"]))
    t5 = T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(EvaluationError, match="no stack of its own"):
        LanguageModelLoss(T5ForConditionalGeneration(t5))
    with pytest.raises(EvaluationError, match="rows_per_chunk is 0"):
        LanguageModelLoss(build(), 0)
    tokens, labels = batch()
    with pytest.raises(EvaluationError, match="one for each"):
        LanguageModelLoss(build())(tokens, labels[:, 1:])


@pytest.mark.slow
def test_wrappers_of_two_processes_sum_up_to_the_whole_batch(tmp_path):
    # the server imports this file once for both
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    start_processes(one_of_two, args=(str(tmp_path),), nprocs=2, start_method="forkserver")


def one_of_two(rank: int, folder: str) -> None:
    """Half of the batch under each wrapper; both take the mean over processes, of what is a sum here."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    tokens, labels = batch()
    mine = tokens[rank : rank + 1], labels[rank : rank + 1]
    for name in ("llama", "llama, tied"):
        model = build(name)
        expected = {key: gradient / 2 for key, gradient in gradients(model, definition(model, tokens, labels)).items()}

        replicated = DistributedDataParallel(LanguageModelLoss(build(name), 4))
        replicated(*mine).backward()
        with pytest.raises(EvaluationError, match="wrap the loss"):
            LanguageModelLoss(DistributedDataParallel(build(name)))
        assert_close({key: p.grad for key, p in replicated.module.model.named_parameters()}, expected, **TOLERANCE)

        sharded = LanguageModelLoss(build(name), 4)
        for layer in sharded.model.base_model.layers:
            fully_shard(layer)
        fully_shard(sharded)
        sharded(*mine).backward()
        assert_close({key: p.grad.full_tensor() for key, p in sharded.model.named_parameters()}, expected, **TOLERANCE)
    distributed.destroy_process_group()
