"""What the layers of a forward share is computed once for the same arguments, never across forwards or in a graph."""

import pytest
import torch

from rope_patch import graphs
from rope_patch.attention import forward as module
from rope_patch.attention.forward import Forward, StackForwards


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
