import dataclasses

import numpy as np
import pytest
import torch

from rope_patch import InvalidField, Recurrent
from rope_patch.schemes.slots import Tokens
from tests.definition import Definition, no_rotation
from tests.schemes.entering import SHAPE, some_of, some_tokens, started, trained

CASES = ["rnn:width=16"]

SCHEMES = [Recurrent(), Recurrent(width=5)]
POSITIONS = [
    [0, 0, 0, 1, 2, 3, 4, 5],  # two pads on the left
    [0, 1, 2, 0, 1, 0, 1, 2],  # three documents
    [0, 1, 2, 3, 4, 5, 6, 7],
    [1, 1, 0, 1, 2, 3, 4, 5],  # pads that were given another position
]
schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def read(x, positions, weights, state=None):
    """The GRU of Cho et al. with PyTorch's two biases, one token of one row at a time; h after each token."""
    w_x, w_h, b_x, b_h, _ = (value.detach().double().numpy() for value in weights.values())
    width = w_h.shape[1]
    h = np.zeros(width) if state is None else state
    found = []
    for token, position in zip(x, positions, strict=True):
        if position == 0:
            h = np.zeros(width)
        (x_r, x_z, x_n), (h_r, h_z, h_n) = (np.split(gates, 3) for gates in (w_x @ token + b_x, w_h @ h + b_h))
        r, z = sigmoid(x_r + h_r), sigmoid(x_z + h_z)
        h = (1 - z) * np.tanh(x_n + r * h_n) + z * h
        found.append(h)
    return np.stack(found)


def remembered(text):
    names = ("gru_input", "gru_hidden", "gru_input_bias", "gru_hidden_bias", "gru_output")
    h = read(text.x, text.m, {name: torch.tensor(text.learned[name]) for name in names})
    return text.x + h @ text.learned["gru_output"].T


DEFINITIONS = {"rnn:width=16": Definition(distance=no_rotation, embedding=remembered)}


@schemes
@pytest.mark.parametrize("given", [False, True])
def test_every_token_is_given_what_was_read_so_far(scheme, given):
    tokens, weights = some_tokens([*POSITIONS, range(5, 13)]), trained(scheme)
    state = torch.randn(5, scheme.width or 8, dtype=torch.float64) if given else None
    found, states = scheme.advance(tokens, state, weights)
    for row in range(5):
        x = tokens.states[row].numpy()
        h = read(x, tokens.positions[row].tolist(), weights, state[row].numpy() if given else None)
        expected = x + h @ weights["gru_output"].detach().numpy().T
        np.testing.assert_allclose(found[row].detach().numpy(), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(states[row].detach().numpy(), h, rtol=0, atol=1e-12)


@schemes
def test_a_text_of_its_own_is_read_by_pytorchs_own_layer(scheme):
    weights, tokens = trained(scheme), some_tokens([range(6)], batch=3)
    layer = torch.nn.GRU(8, scheme.width or 8, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), weights.values(), strict=False):
            parameter.copy_(value)
    h, _ = layer(tokens.states)
    expected = tokens.states + h @ weights["gru_output"].T
    torch.testing.assert_close(scheme.embedding(tokens, weights), expected, rtol=0, atol=1e-12)


@schemes
@pytest.mark.parametrize("cuts", [(1,), (4,), (2, 3, 7), (1, 2, 3, 4, 5, 6, 7)])
def test_any_pieces_with_the_state_carried_are_the_whole(scheme, cuts):
    tokens, weights = some_tokens(POSITIONS), trained(scheme)
    whole, states = scheme.advance(tokens, None, weights)
    state, pieces = None, []
    for start, stop in zip((0, *cuts), (*cuts, 8), strict=True):
        piece, after = scheme.advance(some_of(tokens, slice(start, stop)), state, weights)
        state = after[:, -1]
        torch.testing.assert_close(after, states[:, start:stop], rtol=0, atol=1e-12)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-12)
    assert torch.equal(scheme.embedding(tokens, weights), whole)


@schemes
def test_documents_in_one_row_do_not_know_of_each_other(scheme):
    weights, packed = trained(scheme), some_tokens([[0, 1, 2, 0, 1, 0, 1, 2]])
    found = scheme.embedding(packed, weights)
    for start, stop in ((0, 3), (3, 5), (5, 8)):
        alone = scheme.embedding(some_of(packed, slice(start, stop)), weights)
        torch.testing.assert_close(found[:, start:stop], alone, rtol=0, atol=1e-12)


@schemes
@pytest.mark.parametrize("pad", [0, 1])
def test_pads_on_the_left_are_invisible(scheme, pad):
    weights, tokens = trained(scheme), some_tokens([[pad, pad, pad, 0, 1, 2]])
    found, states = scheme.advance(tokens, None, weights)
    alone, expected = scheme.advance(some_of(tokens, slice(3, None)), None, weights)
    torch.testing.assert_close(found[:, 3:], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(states[:, 3:], expected, rtol=0, atol=1e-12)


@schemes
def test_gradients_flow_through_the_state(scheme):
    tokens, weights = some_tokens([[0, 1, 2, 3], [0, 0, 1, 2]]), trained(scheme)
    tokens.states.requires_grad_()
    _, states = scheme.advance(some_of(tokens, slice(0, 2)), None, weights)
    later, _ = scheme.advance(some_of(tokens, slice(2, 4)), states[:, -1], weights)
    later.sum().backward()
    pieces = tokens.states.grad.clone(), weights["gru_hidden"].grad.clone()
    tokens.states.grad, weights["gru_hidden"].grad = None, None
    scheme.embedding(tokens, weights)[:, 2:].sum().backward()
    torch.testing.assert_close(pieces, (tokens.states.grad, weights["gru_hidden"].grad), rtol=0, atol=1e-12)
    assert pieces[0][0, 0].abs().min() > 0
    assert not pieces[0][1, 0].any()  # a pad, whatever comes after it


def test_the_state_of_half_precision_is_kept_in_full():
    tokens, weights = some_tokens(POSITIONS, dtype=torch.bfloat16), trained(Recurrent(), dtype=torch.bfloat16)
    found, states = Recurrent().advance(tokens, None, weights)
    assert (found.dtype, states.dtype) == (torch.bfloat16, torch.float32)
    later = dataclasses.replace(tokens, positions=tokens.positions + 8)
    found, states = Recurrent().advance(later, states[:, -1], weights)
    assert (found.dtype, states.dtype) == (torch.bfloat16, torch.float32)


def test_many_pads_take_no_memory_of_their_own():
    tokens = Tokens(torch.zeros(1, 4000, 8), torch.cat([torch.zeros(1, 2000).long(), torch.arange(2000)[None]], dim=1))
    seen = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(
                value.numel() for value in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(value)
            )
            return out

    with torch.no_grad(), Sizes():
        Recurrent().embedding(tokens, started(Recurrent()))
    assert max(seen) <= 4000 * 3 * 8


def test_it_starts_as_the_layer_of_pytorch_does():
    found = started(Recurrent(width=5))
    assert [tuple(value.shape) for value in found.values()] == [(15, 8), (15, 5), (15,), (15,), (8, 5)]
    for name in ("gru_input", "gru_hidden", "gru_input_bias", "gru_hidden_bias"):
        assert found[name].abs().max() <= 5**-0.5
    wide = started(Recurrent(width=64), dataclasses.replace(SHAPE, hidden_size=512))["gru_output"]
    assert wide.std() == pytest.approx(0.001 / 8, rel=0.05)


@pytest.mark.parametrize(("field", "value"), [("width", 0), ("width", 2.5), ("initial_std", 0), ("initial_std", "1")])
def test_fields_are_named(field, value):
    with pytest.raises(InvalidField, match=f"rnn: {field}="):
        Recurrent(**{field: value})
