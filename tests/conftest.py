"""Fixtures that all tests share."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here needs the network, and nothing may wait for it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from transformers import PreTrainedModel
from transformers.utils import logging

from tests.families import build

logging.set_verbosity_error()


@pytest.fixture
def llama() -> PreTrainedModel:
    """A tiny Llama with grouped heads."""
    return build("llama")


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    """A tiny model of the family that the test is parametrised by."""
    return build(family)
