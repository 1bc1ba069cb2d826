"""`nn.DataParallel` runs shallow copies of a model, in a thread for each GPU: what such a replica computes follows from
the weights and tables of the replica.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from rope_patch import PerLayer, patch, unpatch
from tests.cases import ALL, CASES
from tests.families import build
from tests.runs import LENGTH, assert_close, left_padded, logits, positions_of, tokens
from tests.simulated_device import Simulated, SimulatedDevice, values
from tests.snapshots import snapshot

Copy = Callable[[torch.Tensor], torch.Tensor]

FAMILIES = ["gemma3", "smollm3", "baichuan_alibi", "llama_dynamic", "llama_longrope", "llama4_text", "qwen3_5_text"]
SOME = [CASES[name] for name in ("yarn", "rerope", "self_extend", "dynamic_ntk", "logn", "cope", "fox", "learned_rope")]
BY_LAYER = PerLayer({"0": "rerope:window=6", "rest": "kerple"})


def replicate(network: nn.Module, weight: Copy, table: Copy = lambda buffer: buffer) -> Any:
    """What `torch.nn.parallel.replicate` makes of a network, with these copies of parameters and buffers."""
    modules = list(network.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    weights = {parameter: weight(parameter) for parameter in network.parameters()}
    for module, replica in copies.items():
        for name, child in module._modules.items():
            if child is None:
                replica._modules[name] = None
            else:
                setattr(replica, name, copies[child])
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, weights[parameter])
        for name, buffer in module._buffers.items():
            if buffer is not None:
                setattr(replica, name, table(buffer))
    return copies[network]


def scaled(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach() * 1.3


def multiply(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)


def assert_own(model: nn.Module, run: Callable[[nn.Module], torch.Tensor]) -> None:
    """A replica with other weights computes what the model computes with these, and the model is as it was."""
    with torch.no_grad():
        before = run(model)
        found = run(replicate(model, scaled))
        assert torch.equal(run(model), before)
        multiply(model)
        expected = run(model)
    assert (before - expected).abs().max() > 1e-2 * expected.std()
    assert_close(found, expected)


@pytest.mark.parametrize("spec", [*ALL, BY_LAYER])
def test_a_replica_reads_its_own_weights(llama, spec):
    patch(llama, spec)
    ids, mask = left_padded([tokens(), tokens(LENGTH - 9)])

    def run(model: nn.Module) -> torch.Tensor:
        padded = model(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False).logits
        return torch.cat([padded[mask.bool()], logits(model, tokens())[0]])

    assert_own(llama, run)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", SOME)
def test_a_replica_of_every_kind_of_model(family, spec):
    model = build(family)
    patch(model, spec)
    assert_own(model, lambda net: logits(net, tokens()))


@pytest.mark.parametrize("spec", ["logn:training_length=8", "alibi", "rerope:window=6", "t5", CASES["shaw"]])
def test_a_replica_of_t5(spec):
    torch.manual_seed(0)
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    patch(model, spec)
    assert_own(model, lambda net: net(input_ids=tokens(), decoder_input_ids=tokens(20), use_cache=False).logits)


@pytest.mark.parametrize("spec", ["hierarchical", "sinusoidal", "learned:extend=64"])
def test_a_replica_of_a_model_with_a_table(spec):
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = BertModel(BertConfig(**sizes, intermediate_size=32, max_position_embeddings=32)).eval()
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32)).eval()
    for model in (bert, gpt2):
        patch(model, spec)
        assert_own(model, lambda net: net(tokens(24))[0])


@pytest.mark.parametrize("spec", [*CASES.values(), BY_LAYER])
def test_gradients_of_replicas_in_threads_reach_the_model(llama, spec):
    patch(llama, spec)
    halves = [tokens(seed=1), tokens(LENGTH - 7, seed=2)]
    for ids in halves:
        llama(ids, labels=ids, use_cache=False).loss.backward()
    expected = {name: value.grad for name, value in llama.named_parameters()}
    llama.zero_grad(set_to_none=True)
    replicas = [replicate(llama, lambda value: value * 1) for _ in halves]
    losses = at_once(
        *(
            lambda r=r, ids=ids: r(ids, labels=ids, use_cache=False).loss
            for r, ids in zip(replicas, halves, strict=True)
        )
    )
    sum(losses).backward()
    for name, value in llama.named_parameters():
        assert (value.grad is None) == (expected[name] is None), name
        if value.grad is not None:
            assert_close(value.grad, expected[name], by=name)


@pytest.mark.parametrize("spec", CASES.values())
def test_replicas_in_threads_do_not_mix(llama, spec):
    """Each with weights, a length and pads of its own."""
    patch(llama, spec)
    kinds = [1.0, 0.7, 1.3]
    replicas = [replicate(llama, lambda value, by=by: value.detach() * by) for by in kinds]
    batches = [left_padded([tokens(LENGTH - n, seed=n), tokens(LENGTH - 3 * n - 2, seed=9)]) for n in range(len(kinds))]

    def run(replica: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return logits(replica, ids, attention_mask=mask, position_ids=positions_of(mask))[mask.bool()]

    actions = [lambda r=r, batch=batch: run(r, *batch) for r, batch in zip(replicas, batches, strict=True)]
    expected = [action() for action in actions]
    for _ in range(2):
        for found, alone in zip(at_once(*actions), expected, strict=True):
            assert torch.equal(found, alone)


@pytest.mark.parametrize("spec", [*CASES.values(), BY_LAYER])
def test_a_replica_on_another_device(llama, spec):
    patch(llama, spec)
    expected = logits(llama, tokens())
    with SimulatedDevice(), torch.no_grad():
        on_device = lambda value: Simulated(value.detach())  # noqa: E731
        found = replicate(llama, on_device, on_device)(Simulated(tokens()), use_cache=False).logits
        assert isinstance(found, Simulated)
    assert_close(values(found), expected)
    assert torch.equal(logits(llama, tokens()), expected)


@pytest.mark.parametrize(
    "spec", [CASES["sinusoidal"], CASES["cope"], CASES["kerple"], CASES["floater"], "yarn:factor=4"]
)
def test_replicas_leave_nothing_behind(llama, spec):
    before = snapshot(llama)
    patch(llama, spec)
    expected = logits(llama, tokens())
    logits(replicate(llama, scaled), tokens())
    for twin in (copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))):
        assert torch.equal(logits(twin, tokens()), expected)
        with torch.no_grad():
            assert torch.equal(logits(replicate(twin, scaled), tokens()), logits(replicate(llama, scaled), tokens()))
    del twin
    gc.collect()
    unpatch(llama)
    assert snapshot(llama) == before


def test_a_wrapped_model_is_patched_and_restored(llama):
    wrapped = nn.DataParallel(llama)
    before = snapshot(llama)
    patch(wrapped, CASES["kerple"])
    assert snapshot(llama) != before
    unpatch(wrapped)
    assert snapshot(llama) == before


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """What actions return that start in the same moment, a thread each, and take turns as often as they can."""
    start, interval = Barrier(len(actions)), sys.getswitchinterval()

    def run(action: Callable[[], Any]) -> Any:
        start.wait()
        return action()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(actions)) as pool:
            return [future.result() for future in [pool.submit(run, action) for action in actions]]
    finally:
        sys.setswitchinterval(interval)
