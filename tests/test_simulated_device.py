"""Every scheme on a simulated GPU: values are the CPU's, no operator meets two devices, and the host waits rarely.

`operators.json` has what a prefill and a decoded step may cost each scheme in a model of two layers: operators,
synchronisations (`waits`) and copies from the host, the last two in this package. A step waits where a table is asked
whether it has a row for the position; it copies frequencies made anew for a length or a weight. `python -m tests.lists`
adds a new scheme; `python -m tests.test_simulated_device` writes all anew after a change that you meant. Operators
are counted where an unpatched model starts as many as its budget says: other releases of torch and Transformers start
others.
"""

import functools
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
BUDGETS = Path(__file__).with_name("operators.json")
UNPATCHED = "unpatched"
"""The name of a model without a scheme among the budgets."""
OPERATORS = "prefill", "step"
"""The budgets that count operators."""


def own(counted):
    """How many of these happen in this package."""
    return sum(number for place, number in counted.items() if " at rope_patch/" in place)


def both(spec, run):
    """The results of `run(model, move, device)` on the CPU and on the device."""
    model = build(num_hidden_layers=2)
    if spec is not None:
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


def situations(model, move, device):
    """Gradients, a padded and a packed batch, a prefill, and decoded steps."""
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
            device.prefill = {"prefill": device.operators.total(), "prefill waits": own(device.synchronisations)}
        return found + decoded(model, move, device, DynamicCache(config=model.config))


def costs(device):
    """What the prefill and the last step of `situations` cost, as `operators.json` has it."""
    step = {"step": device.operators.total(), "waits": own(device.synchronisations), "copies": own(device.copies)}
    return device.prefill | step


def write_budgets(names, budgets):
    """Write what each of these schemes costs, beside the budgets that stay."""
    budgets = budgets | {name: costs(both(CASES.get(name), situations)[2]) for name in names}
    lines = [f' "{name}": {json.dumps(budgets[name])}' for name in sorted(budgets)]
    BUDGETS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def write_missing():
    """Write what schemes cost that have no budget."""
    budgets = json.loads(BUDGETS.read_text())
    if missing := sorted({UNPATCHED, *CASES} - budgets.keys()):
        write_budgets(missing, budgets)


@functools.cache
def counts_operators():
    """Whether the installed releases start as many operators for an unpatched model as its budget says."""
    found, budget = costs(both(None, situations)[2]), json.loads(BUDGETS.read_text())[UNPATCHED]
    return all(found[cost] == budget[cost] for cost in OPERATORS)


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name == "floater" else ()) for name in CASES]
)
def test_values_are_those_of_the_cpu_and_a_step_neither_waits_nor_copies(name):
    budgets = json.loads(BUDGETS.read_text())
    assert name in budgets, "`python -m tests.lists`, which `make scheme` runs, writes what this scheme costs"
    found, expected, device = both(CASES[name], situations)
    assert_same(found, expected)
    over = {cost: number for cost, number in costs(device).items() if number > budgets[name][cost]}
    if not counts_operators():
        over = {cost: number for cost, number in over.items() if cost not in OPERATORS}
    assert not over, (over, budgets[name], device.synchronisations, device.copies)


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
    write_budgets([UNPATCHED, *CASES], {})
