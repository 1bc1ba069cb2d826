"""Every scheme here is one that has learned something, and short texts take the ways of long ones."""

from __future__ import annotations

import pytest

from rope_patch.attention import behind_cache
from rope_patch.attention.bias import DiagonalTerm, KeyTerm
from rope_patch.attention.executors import chunked
from rope_patch.attention.tile_kernels import Dense, FlashCPU


@pytest.fixture(autouse=True)
def _learned_something(trained_parameters: None) -> None:
    """Parameters that start at zero would let every comparison hold."""


@pytest.fixture(autouse=True)
def _short_texts_take_the_ways_of_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles, bands and blocks of a few tokens, so that a text of `LENGTH` has several of each. A text of up to 7
    tokens is still scored in one dense block, and so is one of up to 31 under some biases.
    """
    monkeypatch.setattr(behind_cache, "SMALL", 1000)
    monkeypatch.setattr(chunked, "SCORES_PER_BLOCK", 600)
    for term in (KeyTerm, DiagonalTerm):
        monkeypatch.setattr(term, "rows", 16)
    for kernel in (Dense, FlashCPU):
        monkeypatch.setattr(kernel, "band_rows", lambda self, width: 16)
