"""What holds for every scheme that places tokens where they enter a model."""

import dataclasses

import pytest
import torch

from rope_patch import UnsupportedPositions, get_scheme
from tests.schemes.entering import SHAPE, some_of, some_tokens, started, trained

TABLES = {"learned": 32, "learned:num_positions=50": 50, "multiplicative": 32, "multiplicative:num_positions=9": 9}
TABLES |= {"hierarchical": 32 * 32, "hierarchical:num_positions=100": 100}
WHOLE = ["sinusoidal", "sinusoidal:grid_width=3", "complex_order", "complex_order:shared_words=True", *TABLES]
PLACED = [*WHOLE, "floater", "floater:blocks=True,solver=dopri5", "floater:solver=euler,width=5"]
SPECS = [*PLACED, "rnn", "rnn:width=5"]
POSITIONS = [[0, 0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 0, 1, 2], [1, 8, 5, 5, 0, 3, 2, 1]]
"""Left pads, packed documents, and no order at all."""


@pytest.mark.parametrize("spec", SPECS)
def test_every_parameter_belongs_to_the_stack_and_starts_in_float32(spec):
    scheme = get_scheme(spec)
    found = started(scheme)
    assert tuple(found) == scheme.shared
    assert all(value.dtype == torch.float32 and value.is_leaf for value in found.values())
    again = started(scheme)
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize("spec", [*TABLES, "complex_order:start=zeros", "floater", "floater:blocks=True", "rnn"])
def test_a_pretrained_model_starts_as_it_was_or_nearly(spec):
    scheme, tokens = get_scheme(spec), some_tokens([range(9)], dtype=torch.float32)
    found = scheme.embedding(tokens, started(scheme))
    torch.testing.assert_close(found, tokens.states, rtol=0, atol=0.01)
    assert torch.equal(found, tokens.states) == (spec in [*TABLES, "complex_order:start=zeros"])


@pytest.mark.parametrize("spec", PLACED)
def test_a_token_is_placed_by_its_position_alone(spec):
    scheme, tokens = get_scheme(spec), some_tokens(POSITIONS)
    weights = trained(scheme)
    whole = scheme.embedding(tokens, weights)
    for column in range(8):
        for row in range(3):
            alone = scheme.embedding(some_of(tokens, slice(column, column + 1), slice(row, row + 1)), weights)
            torch.testing.assert_close(alone[0, 0], whole[row, column], rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_may_share_their_positions(spec):
    scheme, weights = get_scheme(spec), trained(get_scheme(spec))
    shared = some_tokens([[0, 1, 2, 0, 1]], batch=3)
    each = dataclasses.replace(shared, positions=shared.positions.expand(3, -1))
    torch.testing.assert_close(scheme.embedding(shared, weights), scheme.embedding(each, weights), rtol=0, atol=0)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_half_precision_is_that_of_the_result_alone(spec, parameters):
    scheme = get_scheme(spec)
    tokens, weights = some_tokens(POSITIONS, dtype=torch.bfloat16), trained(scheme, dtype=parameters)
    found = scheme.embedding(tokens, weights)
    wide = dataclasses.replace(tokens, states=tokens.states.double())
    exact = scheme.embedding(wide, {name: value.double() for name, value in weights.items()})
    assert (found.shape, found.dtype) == (tokens.states.shape, torch.bfloat16)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=2e-5)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("weights_of", [started, trained])
def test_gradients_reach_every_parameter_and_the_tokens(spec, weights_of):
    scheme, tokens = get_scheme(spec), some_tokens(POSITIONS)
    tokens.states.requires_grad_()
    weights = {name: value.detach().double().requires_grad_() for name, value in weights_of(scheme).items()}
    aim = torch.randn(tokens.states.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = scheme.embedding(tokens, weights)
    (found * aim).sum().backward()
    assert tokens.states.grad.abs().min() > 0
    for name, value in weights.items():
        assert value.grad.abs().max() > 0, name


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_are_those_of_finite_differences(spec):
    scheme, tokens = get_scheme(spec), some_tokens([[0, 1, 2], [3, 0, 1]])
    weights = trained(scheme)

    def placed(states, *values):
        return scheme.embedding(dataclasses.replace(tokens, states=states), dict(zip(weights, values, strict=True)))

    # the adaptive solver chooses its steps by its start, which finite differences see and gradients do not
    atol = 1e-4 if "dopri5" in spec else 1e-8
    assert torch.autograd.gradcheck(placed, (tokens.states.requires_grad_(), *weights.values()), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_it_compiles_without_a_break_where_sizes_do_not_follow_from_positions(spec):
    scheme, tokens = get_scheme(spec), some_tokens(POSITIONS, dtype=torch.float32)
    weights = trained(scheme, dtype=torch.float32)
    compiled = torch.compile(scheme.embedding, fullgraph=spec in WHOLE, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, weights), scheme.embedding(tokens, weights), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("spec", "rows"), TABLES.items())
@pytest.mark.parametrize("beyond", [0, 1, 1000])
def test_positions_without_a_row_are_refused(spec, rows, beyond):
    scheme = get_scheme(spec)
    scheme.embedding(some_tokens([[0, rows - 1]]), started(scheme))
    with pytest.raises(UnsupportedPositions, match=rf"position {rows + beyond} has no vector; there are {rows}"):
        scheme.embedding(some_tokens([[0, rows + beyond]]), started(scheme))


@pytest.mark.parametrize("spec", [*TABLES, "floater"])
def test_positions_below_zero_are_refused(spec):
    scheme = get_scheme(spec)
    with pytest.raises(UnsupportedPositions, match="position -1 has no vector"):
        scheme.embedding(some_tokens([[-1, 0, 1]]), started(scheme))


def test_the_shape_is_one_where_confusions_show():
    assert len({SHAPE.num_layers, SHAPE.hidden_size, SHAPE.vocab_size, SHAPE.training_length}) == 4
