from __future__ import annotations

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import rope_patch
from benchmarks.comparison import Shape, Side
from benchmarks.measure import peak_bytes
from rope_patch.errors import EvaluationError
from rope_patch.training import memory
from rope_patch.training.cross_entropy import LanguageModelLoss
from rope_patch.training.memory import MemoryEstimate, available, estimate, require_room

SIZES = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def build(attention="sdpa", **changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}, attn_implementation=attention))


def saved_by_autograd(model, length, rows=1):
    """Bytes of everything that the graph of the stack keeps alive, each storage once."""
    owned = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(torch.zeros(rows, length, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("length", "rows"), [(300, 1), (200, 3), (1500, 1)])
def test_activations_are_those_of_the_real_length(attention, length, rows):
    model = build(attention)
    found = estimate(LanguageModelLoss(model), length, rows, checkpointing=False).activations
    assert found == pytest.approx(saved_by_autograd(model, length, rows), rel=0.02)


@pytest.mark.parametrize("scheme", ["rerope", "yarn"])
def test_activations_of_a_patched_model_grow_with_the_length(scheme):
    model = build()
    rope_patch.patch(model, scheme, **({"window": 8} if scheme == "rerope" else {"factor": 4}))
    found = estimate(LanguageModelLoss(model), 4096, 1, checkpointing=False).activations
    assert found == pytest.approx(saved_by_autograd(model, 4096), rel=0.05)


def test_checkpointing_leaves_one_layer_and_the_inputs_of_all():
    loss, length = LanguageModelLoss(build()), 256
    full = estimate(loss, length, 1, checkpointing=False).activations
    found = estimate(loss, length, 1, checkpointing=True).activations
    inputs = 4 * length * 32 * 4
    assert full / 4 < found < full / 4 + 2 * inputs


def test_what_is_trained_is_counted():
    model = build()
    size = sum(p.numel() * 4 for p in model.parameters())
    found = estimate(LanguageModelLoss(model), 64, 1, checkpointing=False)
    assert (found.gradients, found.optimizer, found.everything_trained) == (size, 2 * size, True)
    assert size <= found.weights <= size + 1000
    shared = estimate(LanguageModelLoss(model), 64, 1, checkpointing=False, optimizer_states=1, shards=4)
    assert (shared.gradients, shared.optimizer) == (size / 4, size / 4)
    assert shared.activations == found.activations
    adapted = get_peft_model(build(), LoraConfig(r=2, target_modules=["q_proj"]))
    found = estimate(LanguageModelLoss(adapted), 64, 1, checkpointing=False)
    assert found.gradients == 4 * 4 * 2 * (32 + 32)
    assert not found.everything_trained


def test_autocast_halves_most_of_the_activations():
    full, half = (
        estimate(LanguageModelLoss(build()), 512, 1, checkpointing=False, dtype=dtype).activations
        for dtype in (None, torch.bfloat16)
    )
    assert 0.4 * full < half < 0.9 * full


def test_asking_leaves_no_trace():
    model = build(attention_dropout=0.3).eval()
    model.base_model.layers[1].train()
    model.gradient_checkpointing_enable()
    model.lm_head.weight.grad = gradient = torch.ones_like(model.lm_head.weight)

    def state():
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        flags = [getattr(m, "gradient_checkpointing", None) for m in model.modules()]
        return [m.training for m in model.modules()], hooks, flags, list(model._modules)

    before, random, weights = state(), torch.get_rng_state(), [p.clone() for p in model.parameters()]
    estimate(LanguageModelLoss(model), 128, 2, checkpointing=True)
    assert state() == before
    assert torch.equal(torch.get_rng_state(), random)
    assert model.lm_head.weight.grad is gradient
    assert all(p.grad is None for p in model.base_model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def training_step(shape: Shape, checkpointing: bool) -> Side:
    model = build(hidden_size=128, intermediate_size=256, vocab_size=8000).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss, tokens = LanguageModelLoss(model), torch.zeros(1, shape.length, dtype=torch.long)
    return Side(lambda: loss(tokens, tokens).backward(), reset=model.zero_grad)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_a_real_step_is_within_a_factor_of_two(checkpointing):
    shape = Shape(2048)
    model = build(hidden_size=128, intermediate_size=256, vocab_size=8000)
    found = estimate(
        LanguageModelLoss(model), shape.length, 1, checkpointing=checkpointing, optimizer_states=0
    ).beyond_weights
    peak = peak_bytes(functools.partial(training_step, checkpointing=checkpointing), shape)
    assert found / 2 < peak < 2 * found


def test_a_step_that_fits_passes_and_one_that_does_not_says_what_helps():
    step = MemoryEstimate(2 * 10**9, 10**9, 10**9, 10**9, 10**9, 4096, 2, False, True)
    assert str(step) == (
        "weights 2.00 GB, gradients 1.00 GB, optimiser 1.00 GB, activations 1.00 GB, loss 1.00 GB: 6.00 GB"
    )
    require_room(step, 4 * 10**9)
    with pytest.raises(EvaluationError, match=r"2 x 4096 tokens needs 4.00 GB .* there are 3.00 GB") as refused:
        require_room(step, 3 * 10**9)
    helps = "gradient checkpointing, fewer rows per micro-batch, LoRA instead of training everything, a shorter length"
    assert str(refused.value).endswith(f"what helps: {helps}")
    step = MemoryEstimate(2 * 10**9, 10**9, 10**9, 10**9, 10**9, 4096, 1, True, False)
    with pytest.raises(EvaluationError, match=r"what helps: a shorter length$"):
        require_room(step, 0)


def test_the_limit_of_a_control_group_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    unlimited = available("cpu")
    assert unlimited > 10**6
    for name, content in {
        "memory.max": "900\n",
        "memory.current": "500\n",
        "memory.stat": "inactive_file 30\n",
    }.items():
        (tmp_path / name).write_text(content)
    assert available("cpu") == 430
    (tmp_path / "memory.max").write_text("max\n")
    assert available("cpu") > 10**6


def test_sizes_that_make_no_step_are_refused():
    loss = LanguageModelLoss(build())
    with pytest.raises(EvaluationError, match="rows 0"):
        estimate(loss, 64, 0, checkpointing=False)
    with pytest.raises(EvaluationError, match="three different lengths"):
        estimate(loss, 64, 1, checkpointing=False, probes=(8, 16))
