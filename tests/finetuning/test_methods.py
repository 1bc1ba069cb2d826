"""Which parameters train, and that what saves memory changes no loss."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel

import rope_patch
from rope_patch import patch
from rope_patch.errors import EvaluationError
from rope_patch.finetuning import adapters
from rope_patch.finetuning.experiment import run
from rope_patch.training.loop import read_log
from tests.evaluation.conftest import tiny_llama

from .kill import weights

LEARNED = ("kerple", "rope+shaw:max_distance=8")


def prepared(method, scheme="yarn:factor=2", tied=False):
    model = tiny_llama()
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    patch(model, scheme)
    return adapters.prepare(model, method, rank=4, alpha=8.0, dropout=0.0)


def trained(model):
    """Names as they are without PEFT."""
    names = {name for name, value in model.named_parameters() if value.requires_grad}
    return {name.removeprefix("base_model.model.").replace(".modules_to_save.default", "") for name in names}


def of_layers(*names):
    return {f"model.layers.{layer}.{name}" for layer in range(2) for name in names}


ADAPTERS = of_layers(*(f"self_attn.{name}_proj.lora_{m}.default.weight" for name in "qkvo" for m in "AB"))
NORMS = {"model.norm.weight"} | of_layers("input_layernorm.weight", "post_attention_layernorm.weight")
TRAINED = {"lora": ADAPTERS, "lora_norms_embeddings": ADAPTERS | NORMS | {"model.embed_tokens.weight"}}
BY_SCHEME = {
    "yarn:factor=2": set(),
    "kerple": of_layers("self_attn.rope_patch.kernel_scale", "self_attn.rope_patch.kernel_shape"),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", [*BY_SCHEME, LEARNED[1]])
@pytest.mark.parametrize("method", ["full", "lora", "lora_norms_embeddings"])
def test_what_is_trained(method, scheme, tied):
    model = prepared(method, scheme, tied)
    learned = {name for name in trained(model) if "rope_patch" in name}
    assert bool(learned) == (scheme in LEARNED)
    if scheme in BY_SCHEME:
        assert learned == BY_SCHEME[scheme]
    if method == "full":
        assert all(value.requires_grad for value in model.parameters())
    else:
        assert trained(model) - learned == TRAINED[method]


def test_a_tied_head_stays_tied():
    model = prepared("lora_norms_embeddings", tied=True).get_base_model()
    embeddings = model.get_input_embeddings().modules_to_save["default"].weight
    named = model.named_parameters(remove_duplicate=False)
    (head,) = [value for name, value in named if name.startswith("lm_head") and value.requires_grad]
    assert head is embeddings


def test_an_untied_head_is_left_alone():
    assert "lm_head.weight" not in trained(prepared("lora_norms_embeddings"))


@pytest.mark.parametrize("method", ["full", "lora", "lora_norms_embeddings"])
@pytest.mark.parametrize("scheme", ["yarn:factor=2", *LEARNED])
def test_training_moves_what_is_trained_and_nothing_else(method, scheme, describe, checkpoint):
    outcome = run(describe(method=method, schemes=(scheme,), learning_rate=1e-2, steps=8, log_every=4))
    assert losses(outcome).diff() < 0
    model = rope_patch.from_pretrained(outcome.checkpoints[scheme])
    started, now = tiny_llama().state_dict(), model.state_dict()
    moves = trained(prepared(method, scheme))
    for name, value in started.items():
        if method == "full":
            assert not torch.equal(now[name], value), name
            continue
        copies = [
            key
            for key in now
            if key.replace(".base_layer", "").replace(".modules_to_save.default", "") == f"base_model.model.{name}"
        ]
        (copy,) = copies
        assert torch.equal(now[copy], value) == (name not in moves), name
    fresh = tiny_llama()
    patch(fresh, scheme)
    starts = {name: value for name, value in fresh.state_dict().items() if "rope_patch" in name}
    learned = {
        name.removeprefix("base_model.model."): value
        for name, value in model.state_dict().items()
        if "rope_patch" in name and "original_module" not in name
    }
    for name, value in learned.items():
        assert not torch.equal(value, starts[name.replace(".modules_to_save.default", "")]), name
    assert len(learned) == len(starts)


def losses(outcome):
    (folder,) = {path.parent for path in outcome.checkpoints.values()}
    return torch.tensor([row["train_nll"] for row in read_log(folder)])


THRIFTY = {"gradient_checkpointing": True, "micro_batch_size": 3}


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        ("yarn:factor=2", {"micro_batch_size": 1}),
        *((s, THRIFTY) for s in ("yarn:factor=2", "rerope:window=8", "kerple")),
    ],
)
def test_what_saves_memory_changes_no_loss(settings, scheme, describe, tmp_path):
    shared = {"schemes": (scheme,), "batch_size": 4, "learning_rate": 1e-2}
    plain, saving = run(describe(**shared)), run(describe(**shared, **settings, output=str(tmp_path / "saving")))
    torch.testing.assert_close(losses(saving), losses(plain), rtol=0, atol=2e-4)
    assert plain.points[-1].nll == pytest.approx(saving.points[-1].nll, abs=1e-4)


@pytest.mark.parametrize(
    ("method", "layout"), [("full", "packed"), ("full", "pose"), ("lora_norms_embeddings", "padded")]
)
def test_bfloat16(method, layout, describe, tmp_path):
    shared = {"method": method, "layout": layout, "learning_rate": 1e-2}
    exact = losses(run(describe(**shared)))
    outcome = run(describe(**shared, precision="bfloat16", output=str(tmp_path / "bfloat16")))
    rounded = losses(outcome)
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.1)
    assert all(value.dtype == torch.float32 for value in weights(outcome.checkpoints["yarn:factor=2"].parent).values())


def test_dropout_of_adapters_is_on_in_training_and_off_in_measurements(describe, tmp_path):
    shared = {"method": "lora", "learning_rate": 1e-2, "warmup_steps": 0}
    without = run(describe(**shared))
    with_it = run(describe(**shared, dropout=0.5, output=str(tmp_path / "dropout")))
    assert without.points[:3] == with_it.points[:3]
    assert not torch.equal(losses(without), losses(with_it))


def test_a_peft_model_is_what_comes_back(describe):
    outcome = run(describe(method="lora"))
    assert isinstance(rope_patch.from_pretrained(outcome.checkpoints["yarn:factor=2"]), PeftModel)


def test_adapters_are_not_trained_on(describe, tmp_path):
    outcome = run(describe(method="lora"))
    with pytest.raises(EvaluationError, match="holds adapters; merge them before training on"):
        run(describe(model=str(outcome.checkpoints["yarn:factor=2"]), output=str(tmp_path / "again")))


@pytest.mark.parametrize("scheme", ["yarn:factor=2", "rerope:window=8", "kerple"])
@pytest.mark.parametrize("method", ["lora", "lora_norms_embeddings"])
def test_weights_in_bfloat16_under_adapters(method, scheme, describe, tmp_path):
    settings = {"method": method, "schemes": (scheme,), "precision": "bfloat16", "steps": 4, "learning_rate": 1e-2}
    outcomes = [
        run(describe(weights=dtype, output=str(tmp_path / dtype), **settings)) for dtype in ("bfloat16", "float32")
    ]
    for half, whole in zip(*(outcome.points for outcome in outcomes), strict=True):
        for length in whole.nll:
            assert abs(half.nll[length] - whole.nll[length]) < 0.1
    model = rope_patch.from_pretrained(outcomes[0].checkpoints[scheme])
    assert isinstance(model, PeftModel)
    assert {value.dtype for name, value in model.named_parameters() if "base_layer" in name} == {torch.bfloat16}


def test_what_is_trained_beside_weights_in_bfloat16_is_float32():
    model = adapters.prepare(tiny_llama().bfloat16(), "lora_norms_embeddings", rank=4, alpha=8.0, dropout=0.0)
    assert {(value.requires_grad, value.dtype) for value in model.parameters()} == {
        (True, torch.float32),
        (False, torch.bfloat16),
    }


@pytest.mark.parametrize("settings", [{"method": "full", "precision": "bfloat16"}, {"method": "lora"}])
def test_weights_in_bfloat16_where_they_would_be_trained_or_computed_with_in_float32(settings, describe):
    with pytest.raises(EvaluationError, match="weights='bfloat16' with"):
        describe(weights="bfloat16", **settings)
