"""Every scheme on a simulated GPU: values are the CPU's, no operator meets two devices, and the host waits rarely.

`operators.json` has the most operators that a prefill and a decoded step may take in a model of two layers. To write it
anew after a change that you meant: `python -m tests.test_simulated_device`.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, StaticCache

from rope_patch import patch
from tests.cases import CASES
from tests.families import build
from tests.runs import gradients, left_padded, positions_of, tokens
from tests.simulated_device import Simulated, SimulatedDevice, moved, values

LENGTH = 40
PREFILL = {"floater": 999, "rnn": 3}
"""Synchronisations of a prefill in this package, where there are more than one: a solver and a GRU read values."""
TABLES = ("hierarchical", "learned", "multiplicative")
STEP = {**PREFILL, "kerple": 2, "sandwich": 1, "t5": 1, **dict.fromkeys(TABLES, 1)}
"""Likewise of a decoded step, where there are any: a bias by distance that is not linear is asked whether it hides a
token from itself, and a table whether it has a row for the position.
"""
COPIES = {"alibi": 1, "dynamic_yarn": 8, "learned_rope": 4, "longrope": 8, "rnn": 9, "sandwich": 1}
"""Copies from the host in a step, where there are any: slopes, and frequencies made anew for a length or a weight."""

OPERATORS = Path(__file__).with_name("operators.json")


def own(counted):
    """How many of these happen in this package."""
    return sum(number for place, number in counted.items() if " at rope_patch/" in place)


def both(spec, run):
    """The results of `run(model, move, device)` on the CPU and on the device."""
    model = build(num_hidden_layers=2)
    patch(model, spec)
    expected = run(model, lambda x: x, None)
    with SimulatedDevice() as device:
        found = run(moved(model), Simulated, device)
    return [values(x) for x in found], [x.detach() for x in expected], device


def decoded(model, move, device, cache):
    """Logits of a prefill and of two steps; the device records the last step alone."""
    logits = [model(move(tokens(LENGTH, rows=2)), past_key_values=cache, use_cache=True).logits]
    for step in range(2):
        if device is not None:
            device.clear()
        token = move(tokens(1, rows=2, seed=step))
        logits.append(model(token, past_key_values=cache, use_cache=True).logits)
    return logits


def situations(model, move, device, most):
    """Gradients, a padded and a packed batch, a prefill in which the host waits `most` times, and decoded steps."""
    found = [gradient for gradient in gradients(model, move(tokens(LENGTH))).values() if gradient is not None]
    ids, mask = left_padded([tokens(LENGTH), tokens(LENGTH - 9)])
    padded = {"attention_mask": move(mask), "position_ids": move(positions_of(mask))}
    documents = torch.cat([torch.arange(25), torch.arange(LENGTH - 25)])[None]
    with torch.no_grad():
        found.append(values(model(move(ids), use_cache=False, **padded).logits)[mask.bool()])
        found.append(model(move(tokens(LENGTH)), position_ids=move(documents), use_cache=False).logits)
        if device is not None:
            device.clear()
        found.append(model(move(tokens(LENGTH, rows=2)), use_cache=False).logits)
        if device is not None:
            assert own(device.synchronisations) <= most, device.synchronisations
            device.prefill = device.operators.total()
        return found + decoded(model, move, device, DynamicCache(config=model.config))


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name == "floater" else ()) for name in CASES]
)
def test_values_are_those_of_the_cpu_and_a_step_neither_waits_nor_copies(name):
    def run(model, move, device):
        return situations(model, move, device, PREFILL.get(name, 1))

    found, expected, device = both(CASES[name], run)
    assert_same(found, expected)
    assert own(device.synchronisations) <= STEP.get(name, 0), device.synchronisations
    assert own(device.copies) <= COPIES.get(name, 0), device.copies
    budget = json.loads(OPERATORS.read_text())[name]
    assert device.prefill <= budget["prefill"]
    assert device.operators.total() <= budget["step"]


@pytest.mark.parametrize("name", ["yarn", "rerope", "dca", "alibi", "logn"])
def test_a_static_cache_is_read_on_the_device(name):
    @torch.no_grad()
    def run(model, move, device):
        return decoded(model, move, device, StaticCache(config=model.config, max_cache_len=LENGTH + 4))

    found, expected, _ = both(CASES[name], run)
    assert_same(found, expected)


def test_two_devices_are_refused():
    with SimulatedDevice(), pytest.raises(RuntimeError, match="two devices"):
        Simulated(torch.ones(3)) + torch.ones(3)


def test_what_costs_time_on_a_gpu_is_counted():
    with SimulatedDevice() as device:
        x = Simulated(torch.arange(3.0))
        float(x[1] * 2)
        x.tolist()
        _ = x[x > 1]
        torch.ones(2).to(x.device)
        torch.tensor([1.0], device=x.device)
    assert sum(device.synchronisations.values()) == 3
    assert sum(device.copies.values()) == 2
    assert device.operators["mul"] == 1


if __name__ == "__main__":
    budgets = {}
    for name, spec in CASES.items():
        *_, device = both(spec, lambda model, move, device: situations(model, move, device, 999))
        budgets[name] = {"prefill": device.prefill, "step": device.operators.total()}
    OPERATORS.write_text(
        "{\n" + ",\n".join(f' "{name}": {json.dumps(most)}' for name, most in budgets.items()) + "\n}\n"
    )
