import dataclasses
import sys

import numpy as np
import pytest
import torch

from rope_patch import FLOATER, InvalidField
from rope_patch.errors import MissingPackage
from rope_patch.schemes.slots import Checkpoint
from tests.definition import Definition, no_rotation
from tests.schemes.entering import SHAPE, some_tokens, started, trained

CASES = ["floater:width=16", "floater:width=16,blocks=true"]

CHECKPOINT = Checkpoint(training_length=32, num_heads=2, max_length=32)


def path(weights, stride, tokens, block=0, steps=40):
    """p at positions 0, 1, ..., tokens - 1, by the classical Runge-Kutta method in `steps` steps per token."""
    initial, w_1, b_1, w_2, b_2 = (value.detach().double().numpy() for value in weights.values())

    def h(tau, p):
        return w_2 @ np.tanh(w_1 @ np.append(p, tau) + b_1) + b_2

    p, tau, dt = initial[block], 0.0, stride / steps
    found = [p]
    for _ in range(tokens - 1):
        for _ in range(steps):
            k_1 = h(tau, p)
            k_2 = h(tau + dt / 2, p + dt / 2 * k_1)
            k_3 = h(tau + dt / 2, p + dt / 2 * k_2)
            k_4 = h(tau + dt, p + dt * k_3)
            p, tau = p + dt / 6 * (k_1 + 2 * k_2 + 2 * k_3 + k_4), tau + dt
        found.append(p)
    return np.stack(found)


def carried(text, block=0, dt=0.01):
    """x + p by Kutta's 3/8 rule, which is the "rk4" of torchdiffeq, in one step per token."""
    initial, w_1, b_1, w_2, b_2 = (
        text.learned[name]
        for name in ("initial_positions", "dynamics_in", "dynamics_in_bias", "dynamics_out", "dynamics_out_bias")
    )

    def h(tau, p):
        return w_2 @ np.tanh(w_1 @ np.append(p, tau) + b_1) + b_2

    p = [initial[block]]
    for tau in dt * text.m[:-1]:
        k_1 = h(tau, p[-1])
        k_2 = h(tau + dt / 3, p[-1] + dt * k_1 / 3)
        k_3 = h(tau + 2 * dt / 3, p[-1] + dt * (k_2 - k_1 / 3))
        k_4 = h(tau + dt, p[-1] + dt * (k_1 - k_2 + k_3))
        p.append(p[-1] + dt * (k_1 + 3 * k_2 + 3 * k_3 + k_4) / 8)
    return text.x + np.stack(p)


DEFINITIONS = {
    "floater:width=16": Definition(distance=no_rotation, embedding=carried),
    # in steps so long that one rule of order 4 differs from another
    "floater:width=16,stride=0.5": Definition(distance=no_rotation, embedding=lambda text: carried(text, dt=0.5)),
    "floater:width=16,blocks=true": Definition(
        distance=no_rotation, block_embedding=lambda block, text: carried(text, block)
    ),
}


@pytest.mark.parametrize(("solver", "within"), [("rk4", 2e-6), ("midpoint", 3e-3), ("euler", 6e-2), ("dopri5", 3e-5)])
@pytest.mark.parametrize("width", [None, 5])
def test_the_tokens_are_moved_along_the_path_of_the_flow(solver, within, width):
    scheme, tokens = FLOATER(width, solver, stride=0.05), some_tokens([[0, 0, 1, 2, 3], [30, 4, 0, 1, 29]])
    weights = trained(scheme)
    found = (scheme.embedding(tokens, weights) - tokens.states).detach().numpy()
    expected = path(weights, 0.05, 31)
    assert np.abs(expected[1:] - expected[:-1]).max() > 0.03  # so that the tolerances say something
    np.testing.assert_allclose(found, expected[tokens.positions.numpy()], rtol=0, atol=within)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("rk4", 4)])
def test_each_solver_is_of_its_order(solver, order):
    weights = trained(FLOATER())
    errors = []
    for halves in (4, 8):
        found = FLOATER(solver=solver, stride=2 / halves).embedding(some_tokens([[halves]], seed=1), weights)
        found = (found - some_tokens([[halves]], seed=1).states).detach().numpy()
        errors.append(np.abs(found[0, 0] - path(weights, 2.0, 2, steps=200)[1]).max())
    assert np.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.6)


def test_one_flow_carries_the_initial_vector_of_each_block():
    scheme = FLOATER(blocks=True)
    weights = trained(scheme)
    assert scheme.every_block
    assert not FLOATER().every_block
    assert weights["initial_positions"].shape == (SHAPE.num_layers, SHAPE.hidden_size)
    assert started(FLOATER())["initial_positions"].shape == (1, SHAPE.hidden_size)
    for block in range(SHAPE.num_layers):
        tokens = some_tokens([[0, 3, 11]], block=block)
        found = (scheme.embedding(tokens, weights) - tokens.states).detach().numpy()
        np.testing.assert_allclose(found[0], path(weights, 0.01, 12, block)[[0, 3, 11]], rtol=0, atol=1e-10)


@pytest.mark.parametrize("solver", ["euler", "midpoint", "rk4", "dopri5"])
def test_what_comes_later_does_not_change_a_position(solver):
    scheme, tokens = FLOATER(solver=solver), some_tokens([range(40)])
    weights = trained(scheme)
    whole = scheme.embedding(tokens, weights)
    for n in (1, 2, 17):
        part = dataclasses.replace(tokens, states=tokens.states[:, :n], positions=tokens.positions[:, :n])
        torch.testing.assert_close(scheme.embedding(part, weights), whole[:, :n], rtol=0, atol=1e-12)


def test_positions_stay_bounded_far_beyond_the_trained_length():
    scheme = FLOATER(solver="euler", stride=10.0)
    weights = {name: 20 * value for name, value in trained(scheme, dtype=torch.float32).items()}
    tokens = some_tokens([[2000]], dtype=torch.float32)
    reach = weights["initial_positions"][0].abs() + 20_000 * (
        weights["dynamics_out"].abs().sum(1) + weights["dynamics_out_bias"].abs()
    )
    assert ((scheme.embedding(tokens, weights) - tokens.states).abs() <= 1.001 * reach + 1).all()


def test_without_torchdiffeq_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(MissingPackage, match="floater needs torchdiffeq: pip install torchdiffeq"):
        FLOATER().resolve(CHECKPOINT)


def test_nothing_depends_on_the_checkpoint():
    assert FLOATER(width=3).resolve(CHECKPOINT) == FLOATER(width=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("width", 0), ("width", 1.5), ("solver", "rk5"), ("stride", 0), ("blocks", 1), ("initial_std", 0)],
)
def test_fields_are_named(field, value):
    with pytest.raises(InvalidField, match=f"floater: {field}="):
        FLOATER(**{field: value})
