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
from rope_patch.errors import EvaluationError, UnsupportedModel
from rope_patch.training.chunked_loss import chunked_loss

VOCABULARY = 61
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
    """Tokens, and labels, some of which are left out."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(torch.rand(rows, length, generator=generator) < 0.3, -100),
    }


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(model, rtol=1e-5, rows_per_chunk=4, **arguments):
    """The loss of Transformers itself, and its gradients up to a part of the largest entry of each."""
    arguments = {**batch(), **arguments}
    expected = model(**arguments).loss
    expected_gradients = gradients(model, expected)
    with chunked_loss(model, rows_per_chunk):
        found = model(**arguments)
    found_gradients = gradients(model, found.loss)
    assert found.logits is None
    assert (found.loss.dtype, found.loss.shape) == (torch.float32, ())
    assert_close(found.loss, expected, rtol=rtol, atol=0)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in found_gradients.items():
        wanted = expected_gradients[name]
        assert gradient.dtype == wanted.dtype
        assert (gradient - wanted).abs().max() <= rtol * wanted.abs().max(), name


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows_per_chunk", [1, 7, 256])
def test_loss_and_gradients_are_those_of_all_logits(name, rows_per_chunk):
    assert_same_step(build(name), rows_per_chunk=rows_per_chunk)


def test_as_trainer_calls_it():
    assert_same_step(build(), num_items_in_batch=torch.tensor(37))
    assert_same_step(build(), num_items_in_batch=37)
    assert_same_step(build(), shift_labels=batch()["labels"].roll(-1, dims=-1))


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


def test_compiled():
    model = build()
    model.model.compile(backend="eager", dynamic=False)
    assert_same_step(model)


def test_weights_in_bfloat16_lose_no_gradient_over_the_chunks():
    exact, rounded = build(), build().bfloat16()
    with chunked_loss(exact, 1), chunked_loss(rounded, 1):
        many = {name: batch(8, 60)[name] for name in ("input_ids", "labels")}
        wanted = gradients(exact, exact(**many).loss)["lm_head.weight"]
        found = gradients(rounded, rounded(**many).loss)["lm_head.weight"]
    assert ((found.float() - wanted).norm() / wanted.norm()) < 0.015  # 0.039 if the sums were bfloat16 too


def test_no_label_at_all():
    model = build()
    with chunked_loss(model):
        loss = model(batch()["input_ids"], labels=torch.full((2, 15), -100)).loss
        loss.backward()
    assert loss == 0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_without_gradients_the_value_is_the_same_and_nothing_is_kept():
    model = build()
    with chunked_loss(model, 4):
        with torch.no_grad():
            found = model(**batch()).loss
        assert not found.requires_grad
        assert_close(found, model(**batch()).loss.detach())


def test_the_head_sees_rows_with_labels_only_and_never_more_than_a_chunk():
    model, seen = build(), []
    model.lm_head.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    with chunked_loss(model, 4):
        model(**batch())
    assert max(seen) == 4
    assert sum(seen) == (batch()["labels"][:, 1:] != -100).sum()


def test_no_tensor_with_a_column_per_token_of_the_vocabulary_outlives_the_forward():
    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor
            if tensor.shape[-1:] == (VOCABULARY,):
                saved.append(weakref.ref(self))

    saved = []
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda kept: kept.tensor), chunked_loss(model := build(), 4):
        loss = model(**batch()).loss
    assert loss.requires_grad
    assert saved
    assert not any(reference() for reference in saved)


def test_the_model_is_as_it_was_afterwards_also_after_an_error():
    model = build()
    before, names = dict(vars(model)), list(model._modules)
    with pytest.raises(IndexError), chunked_loss(model):
        model(batch()["input_ids"], labels=torch.full((2, 15), VOCABULARY))
    assert vars(model).keys() == before.keys()
    assert list(model._modules) == names
    with chunked_loss(model):
        model.forward = lambda **_: None  # as a wrapper of accelerate that was never taken off
    assert "forward" not in vars(model)


def test_without_labels_there_are_logits():
    model, ids = build(), batch()["input_ids"]
    with chunked_loss(model):
        assert torch.equal(model(ids).logits, build()(ids).logits)
        assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 17)


def test_a_second_backward_is_refused_and_never_scaled_twice():
    with chunked_loss(model := build()):
        loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already used"):
        loss.backward()


def test_what_has_no_head_of_its_own_is_refused():
    t5 = T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    refused = {
        "LlamaModel has no language-model head": (LlamaModel(CONFIGS["llama"]), 4),
        "no stack separate from its head": (T5ForConditionalGeneration(t5), 4),
        "rows_per_chunk=0 is not allowed": (build(), 0),
    }
    for reason, arguments in refused.items():
        with pytest.raises(EvaluationError, match=reason), chunked_loss(*arguments):
            pass


@pytest.mark.slow
def test_wrappers_of_two_processes_give_the_gradients_of_the_whole_batch(tmp_path):
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])  # it imports this file once for both
    start_processes(one_of_two, args=(str(tmp_path),), nprocs=2, start_method="forkserver")


def one_of_two(rank: int, folder: str) -> None:
    """Half of the batch under each wrapper; both take the mean over processes."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    whole = batch()
    targets = (whole["labels"][:, 1:] != -100).sum()
    mine = {name: values[rank : rank + 1] for name, values in whole.items()} | {"num_items_in_batch": targets / 2}
    for name in ("llama", "llama, tied"):
        model = build(name)
        expected = gradients(model, model(**whole).loss)
        with chunked_loss(replicated := build(name), 4):
            wrapped = DistributedDataParallel(replicated)
            wrapped(**mine).loss.backward()
            found = {key: p.grad for key, p in replicated.named_parameters()}
            assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for tail in ([], ["norm", "head"], ["head"]):  # as by hand, as accelerate does, and the head alone
            sharded = build(name)
            for layer in sharded.base_model.layers:
                fully_shard(layer)
            tied = [sharded.get_input_embeddings()] if tail and name == "llama, tied" else []
            if tail:
                parts = {"norm": sharded.base_model.norm, "head": sharded.lm_head}
                fully_shard([*(parts[part] for part in tail), *tied])
            fully_shard(sharded)
            shares = list(sharded.parameters())
            for _ in range(2):
                for share in shares:
                    share.grad = None
                with chunked_loss(sharded, 4):
                    sharded(**mine).loss.backward()
                found = {key: p.grad.full_tensor() for key, p in sharded.named_parameters()}
                assert_close(found, expected, rtol=1e-4, atol=1e-5)
                with torch.no_grad(), chunked_loss(sharded, 4):
                    sharded(**mine)
    distributed.destroy_process_group()


def test_replicas_of_data_parallel_are_refused():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    with chunked_loss(model), pytest.raises(UnsupportedModel, match=r"chunked_loss .* nn.DataParallel.* torchrun"):
        model._replicate_for_data_parallel()
    assert model._replicate_for_data_parallel() is not model
