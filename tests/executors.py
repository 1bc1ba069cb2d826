"""Which executor scored each call of a patched model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from rope_patch.patching import find_handles


@contextmanager
def executors_of(model: nn.Module) -> Iterator[list[str]]:
    """The names of the executors that score the layers of a patched model within the block, in order."""
    states = [state for handle in find_handles(model) for state in handle.layer_states]
    taken: list[str] = []
    for state in states:
        state.watch = lambda name, problem: taken.append(name)
    try:
        yield taken
    finally:
        for state in states:
            state.watch = None
