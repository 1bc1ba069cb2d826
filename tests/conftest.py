"""Fixtures that all tests share."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here needs the network, and nothing may wait for it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "--all-families" in sys.argv:  # tests are parametrised when they are imported, also by the workers
    os.environ["ROPE_PATCH_ALL_FAMILIES"] = "1"

import gc
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from rope_patch.models import llama as llama_style
from rope_patch.mounting import parameters
from tests.cases import home_of
from tests.families import build
from tests.poison import poison
from tests.reading import is_anew, remembering
from tests.sampling import in_nightly_run, in_usual_run

logging.set_verbosity_error()


gc.set_threshold(10_000, 20, 20)  # a patched model goes with a round of the collector: a few of them may wait for it


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is run: the long run, a part of a run, or one scheme."""
    every = "the long run: nightly tests, every family, and more squares of the board of families and schemes"
    parser.addoption("--all-families", action="store_true", help=every)
    parser.addoption("--part", metavar="N/OF", default="1/1", help="every OF-th test from the N-th on, such as 2/4")
    parser.addoption(
        "--scheme",
        metavar="NAME",
        help="the tests of one scheme: its file, those it is a case of, and those of all at once",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to the long run, to machines with a GPU and to other parts what belongs there."""
    every, cuda = config.getoption("all_families"), torch.cuda.is_available()
    scheme = config.getoption("scheme")

    def runs(item: pytest.Item) -> bool:
        if scheme is not None and not _is_of(item, scheme):
            return False
        taken = in_nightly_run(item) if every else in_usual_run(item, of_one_scheme=scheme is not None)
        return taken and (cuda or item.get_closest_marker("cuda") is None)

    number, parts = map(int, config.getoption("part").split("/"))
    kept = [item for item in items if runs(item)][number - 1 :: parts]
    config.hook.pytest_deselected(items=list({*items} - {*kept}))
    items[:] = kept


@pytest.fixture(autouse=True, scope="module")
def _little_to_walk_through() -> None:
    """Collected tests, imported modules and prototypes stay to the end: whoever collects garbage, or asks the collector
    for the models around a backbone, need not walk through them every time.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What was kept from the collector goes with the process, without complaints of extensions that it leaks."""
    gc.unfreeze()


def _is_of(item: pytest.Item, scheme: str) -> bool:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    code = getattr(getattr(item, "function", None), "__code__", None)
    judges_all = code is not None and "list_schemes" in code.co_names
    words = [part.partition(":")[0] for value in params.values() if isinstance(value, str) for part in value.split("+")]
    module = home_of(scheme).stem.removeprefix("test_")
    return judges_all or item.path == home_of(scheme) or scheme in words or f"rope_patch.schemes.{module}" in words


@pytest.fixture(autouse=True)
def _readings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of stack is read once, but in the long run, and where a test looks at the reading itself."""
    if not request.config.getoption("all_families") and not is_anew(request.path):
        monkeypatch.setattr(llama_style, "read", remembering(llama_style.read))


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where attention is computed, whoever reads memory before it is written finds NaN there."""
    if request.path.parent.name in ("attention", "serving") and not request.node.get_closest_marker("unpoisoned"):
        poison(monkeypatch)


@pytest.fixture(autouse=True)
def _compiled() -> Iterator[None]:
    """What a test compiled ends with it: Dynamo keeps eight graphs of a function, whichever model they are of."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture
def llama() -> PreTrainedModel:
    """A tiny Llama with grouped heads."""
    return build("llama")


@pytest.fixture
def model(family: str) -> PreTrainedModel:
    """A tiny model of the family that the test is parametrised by."""
    return build(family)


@pytest.fixture
def trained_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learned parameters start where they change little, often at zero. Here they start anywhere, as if they had been
    trained, and otherwise in each layer.
    """
    hold = parameters._hold

    def hold_trained(module: nn.Module, values: dict[str, torch.Tensor], *others: Any) -> None:
        hold(module, values, *others)
        with torch.no_grad():
            for name, value in getattr(module, parameters.NAME).named_parameters():
                seed = zlib.crc32(f"{name} of layer {getattr(module, 'layer_idx', None)}".encode())
                value += 0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).to(value)

    monkeypatch.setattr(parameters, "_hold", hold_trained)
