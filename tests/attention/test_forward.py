"""What the layers of a forward share is computed once for the same arguments, never across forwards or in a graph."""

import pytest
import torch

from rope_patch import graphs
from rope_patch.attention import forward as module
from rope_patch.attention.decay import Decay
from rope_patch.attention.forward import Forward, StackForwards
from rope_patch.attention.visibility import Visibility
from rope_patch.schemes.tools.rotary import half_split
from rope_patch.typing import Frequencies


def doubled_in(computed):
    def doubled(x, factor, region):
        computed.append((factor, region))
        return factor * x

    return doubled


def test_a_value_is_computed_once_for_the_same_arguments():
    computed, forward, x = [], Forward(), torch.ones(3)
    doubled = doubled_in(computed)
    first = forward.shared(doubled)(x, 2, (0, None))
    assert forward.shared(doubled)(x, 2, (0, None)) is first
    assert forward.shared(doubled)(x.clone(), 2, (0, None)) is not first  # equal, but another tensor
    assert forward.shared(doubled)(x, 3, (0, None)) is not first
    assert forward.shared(doubled)(x, 2, (0, 5)) is not first
    assert Forward().shared(doubled)(x, 2, (0, None)) is not first
    assert len(computed) == 5


def test_a_tensor_stays_alive_as_long_as_what_was_computed_from_it():
    computed, forward = [], Forward()
    doubled = doubled_in(computed)
    for _ in range(20):  # without a reference the next tensor would often get the same identity
        forward.shared(doubled)(torch.ones(3), 2, None)
    assert len(computed) == 20


@pytest.mark.parametrize(
    "made",
    [
        lambda x, number: Visibility(x, None, True, number, 3, 3),
        lambda x, number: Frequencies(x, float(number), x),
        lambda x, number: Decay(half_split(2 * number), x),
    ],
)
def test_data_classes_are_equal_if_their_tensors_are_the_same_objects(made):
    # Python 3.13 compares field by field, where two tensors of three numbers have no truth value
    computed, forward, x = [], Forward(), torch.ones(3)
    doubled = doubled_in(computed)
    first = forward.shared(doubled)(x, 2, made(x, 1))
    assert forward.shared(doubled)(x, 2, made(x, 1)) is first
    assert forward.shared(doubled)(x, 2, made(x.clone(), 1)) is not first
    assert forward.shared(doubled)(x, 2, made(x, 2)) is not first
    assert made(x, 1) != (x, 1)


def test_a_graph_remembers_nothing(monkeypatch):
    computed, forward, x = [], Forward(), torch.ones(3)
    monkeypatch.setattr(module, "traced", lambda: True)
    for _ in range(2):
        forward.shared(doubled_in(computed))(x, 2, None)
    assert len(computed) == 2


def test_layers_share_equal_positions_of_cached_keys():
    forward, past = Forward(), torch.arange(5)[None]
    assert forward.earlier(past) is past
    assert forward.earlier(past.clone()) is past
    other, shorter = past + 1, past[:, :4]
    assert forward.earlier(other) is other
    assert forward.earlier(shorter) is shorter


def test_a_bias_that_learns_nothing_is_computed_anew_only_where_a_text_outgrows_its_table():
    computed, forwards = [], StackForwards()

    class Scheme:
        linear = False

        def bias(self, distance, num_heads, weights):
            computed.append(len(distance))
            scale = weights["scale"] if weights else torch.ones(num_heads)
            return scale[:, None] * distance.sqrt()

    scheme, like = Scheme(), torch.zeros(1, 2, 1, 4)
    for length in (3, 5, 60, 64, 65, 100, 129):
        forwards.forget(counted=True)
        forward = forwards.for_positions(torch.arange(length)[None])
        with torch.inference_mode(length == 3):
            values = forward.bias(scheme, like).values(1, length)
        assert torch.equal(values, torch.arange(1, length).sqrt().expand(2, -1))
        (values * torch.ones(1, requires_grad=True)).sum().backward()  # also after a table of inference mode
    assert computed == [64, 128, 256]
    one = forward.bias(scheme, like, num_heads=2, some=slice(1, 2))
    assert one.values(0, 4).shape == (1, 4)

    computed.clear()
    weights = {"scale": torch.tensor([1.0, 2.0])}
    for length in (3, 3):
        forwards.forget(counted=True)
        forward = forwards.for_positions(torch.arange(length)[None])
        for _ in range(2):  # layers
            values = forward.bias(scheme, like, weights).values(0, length)
            assert torch.equal(values, weights["scale"][:, None] * torch.arange(3).sqrt())
        weights["scale"].mul_(2)
    assert computed == [3, 3]
    assert forward.bias(scheme, like).values(-2, 1).shape == (2, 3)


def test_positions_are_counted_by_the_stack_only_in_its_own_forward():
    forwards, own, others = StackForwards(), torch.arange(3)[None], torch.arange(3)[None]
    assert not forwards.for_positions(own).counted
    forwards.forget(counted=True)
    forward = forwards.for_positions(own)
    assert forward.counted
    assert forwards.for_positions(own) is forward
    assert forwards.current(own) is forward
    assert forwards.current(others) is None
    assert not forwards.for_positions(others).counted  # a module was called with positions of its own


def test_what_a_graph_cannot_read_it_asserts():
    graphs.require(torch.tensor(True), ValueError, "it holds")
    with pytest.raises(ValueError, match="it does not hold"):
        graphs.require(torch.tensor(False), ValueError, "it does not hold")
    compiled = torch.compile(
        lambda x: graphs.require((x > 0).all(), ValueError, "not all are positive"), backend="eager", fullgraph=True
    )
    compiled(torch.ones(2))
    with pytest.raises(RuntimeError, match="rope_patch: not all are positive"):
        compiled(-torch.ones(2))
