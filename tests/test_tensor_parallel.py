"""Tensor parallelism by Transformers' own plan: a scheme is exact or refused by name."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import distributed
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.errors import UnsupportedModel
from tests.cases import CASES
from tests.families import VOCABULARY, build
from tests.processes import run_two

EXACT = [None, "rerope:window=6+logn:training_length=8", "layers:[0=nope+logn;rest=rerope:window=6]"]
EXACT += [CASES[name] for name in ("yarn", "dynamic_ntk", "dca", "xpos", "window", "sinusoidal", "learned", "rnn")]
REFUSED = [
    CASES[name] for name in ("alibi", "t5", "kerple", "shaw", "fox", "fire", "urpe", "ssmax", "learned_rope", "ms_poe")
]
REFUSED += ["layers:[0=alibi;rest=rerope:window=6]", "rerope:window=6+alibi"]
OTHERS = ["qwen3", "gemma3", "phi3", "mixtral"]


def in_parallel(rank, folder):
    distributed.init_process_group("gloo")
    warnings.simplefilter("ignore")
    ids = torch.randint(1, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    for spec in EXACT:
        alone, divided = (AutoModelForCausalLM.from_pretrained(folder, tp_plan=plan) for plan in (None, "auto"))
        for model in (alone, divided):
            if spec:
                rope_patch.patch(model, spec)
            model(ids, labels=ids).loss.backward()
        with torch.no_grad():
            torch.testing.assert_close(divided(ids).logits, alone(ids).logits, rtol=0, atol=1e-5, msg=spec)
        for one, other in zip(divided.parameters(), alone.parameters(), strict=True):
            whole = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
            torch.testing.assert_close(whole, other.grad, rtol=0, atol=1e-5, msg=spec)
    divided = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    for spec in REFUSED:
        with pytest.raises(UnsupportedModel, match="is under tensor parallelism"):
            rope_patch.patch(divided, spec)
    distributed.destroy_process_group()


def others_in_parallel(rank, folder):
    """With pads, and in models that norm queries, have windows, fuse projections, or choose experts."""
    distributed.init_process_group("gloo")
    warnings.simplefilter("ignore")
    ids = torch.randint(1, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    real = torch.arange(40) >= torch.tensor([[9], [0]])
    for family, spec in itertools.product(OTHERS, (EXACT[1], CASES["dca"])):
        logits = []
        for plan in (None, "auto"):
            model = AutoModelForCausalLM.from_pretrained(folder / family, tp_plan=plan)
            rope_patch.patch(model, spec)
            with torch.no_grad():
                logits.append(model(ids, attention_mask=real.long()).logits[real])
        torch.testing.assert_close(*logits, rtol=0, atol=1e-5, msg=lambda text, at=(family, spec): f"{at}: {text}")
        with pytest.raises(UnsupportedModel, match="is under tensor parallelism"):
            rope_patch.patch(AutoModelForCausalLM.from_pretrained(folder / family, tp_plan="auto"), REFUSED[0])
    distributed.destroy_process_group()


@pytest.mark.nightly
def test_every_kind_of_slot_is_exact_or_refused(tmp_path):
    build("llama", pad_token_id=None).save_pretrained(tmp_path)
    assert run_two(in_parallel, tmp_path) == [0, 0]


@pytest.mark.nightly
def test_other_families_are_exact_too(tmp_path):
    for family in OTHERS:
        build(family, pad_token_id=None).save_pretrained(tmp_path / family)
    assert run_two(others_in_parallel, tmp_path) == [0, 0]
