"""A pytest plugin: every model of Transformers that a test makes is under a scheme before the test sees it.

It is loaded by its bare name, for the tests it goes into are a package `tests` of their own. Each test leaves one line
of JSON: what became of it, its first error, how many models were patched, and how many were not and why.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import random
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo
from transformers import PreTrainedModel, set_seed

import rope_patch
from rope_patch.models.record import Record

NATIVE, NATIVE_LATE, UNPATCHED = "native", "native-late", "unpatched"
"""In place of a scheme: the one that each model has already, by whatever mount or late, and none."""

_WRAPPED = "_patches_what_it_makes"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The scheme, and where the outcomes go."""
    group = parser.getgroup("rope_patch")
    group.addoption("--patch-scheme", default=UNPATCHED, help=f"a scheme, {NATIVE}, {NATIVE_LATE} or {UNPATCHED}")
    group.addoption("--outcomes", type=Path, help="a file for one line of JSON per test")


def pytest_configure(config: pytest.Config) -> None:
    """Patch the classes of Transformers, in this process alone."""
    patcher = Patcher(config.getoption("--patch-scheme"))
    if patcher.scheme != UNPATCHED:
        patcher.install()
    if (path := config.getoption("--outcomes")) is not None:
        config.pluginmanager.register(Outcomes(path, patcher))


def pytest_collection_finish() -> None:
    """What is there before the first test stays to the end: whoever looks through all objects can pass it by."""
    gc.collect()
    gc.freeze()


class Patcher:
    """Puts models under a scheme, as soon as they are whole.

    Attributes:
        scheme: a line of text, or one of the words above.
        patched: how many models carry it, since this was last set to zero.
        left: how many do not, by reason.
    """

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.patched = 0
        self.left: Counter[str] = Counter()
        self._depth = 0

    def install(self) -> None:
        """Wrap the constructor of every class of models, also of those to come, and `from_pretrained`."""
        known = [PreTrainedModel]
        for cls in known:  # which grows meanwhile
            known += [found for found in cls.__subclasses__() if found not in known]
            self._wrap_init(cls)
        inherited, load = vars(PreTrainedModel)["__init_subclass__"].__func__, PreTrainedModel.from_pretrained.__func__

        def init_subclass(cls: type, **kwargs: Any) -> None:
            inherited(cls, **kwargs)
            self._wrap_init(cls)

        @functools.wraps(load)
        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            with self._inside():
                loaded = load(cls, *args, **kwargs)
            if not self._depth:
                self.patch(loaded[0] if isinstance(loaded, tuple) else loaded, loaded=True)
            return loaded

        PreTrainedModel.__init_subclass__ = classmethod(init_subclass)
        PreTrainedModel.from_pretrained = classmethod(from_pretrained)

    def patch(self, model: PreTrainedModel, loaded: bool = False) -> None:
        """Patch a model; one that the library refuses, or that has no weights yet, stays as it is and is counted.

        Args:
            model: the outermost one.
            loaded: whether its weights are from a folder, which may have been saved under the scheme.
        """
        if any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers())):
            self.left["on the meta device"] += 1
            return
        try:
            if self.scheme == NATIVE_LATE:  # a record does not say by which mount
                rope_patch.patch(model, rope_patch.native_scheme(model), mount="late")
            elif loaded and Record.find(model) is not None:
                rope_patch.repatch(model)
            elif self.scheme == NATIVE:
                rope_patch.patch(model, rope_patch.native_scheme(model))
            else:
                rope_patch.patch(model, self.scheme)
        except rope_patch.RopePatchError as error:
            self.left[f"{type(model).__name__}: {type(error).__name__}: {error}"] += 1
        else:
            self.patched += 1

    def _wrap_init(self, cls: Any) -> None:
        """Models are made of models, and of mixins: only the constructor that was called first may patch."""
        init = cls.__init__
        if "__init__" not in vars(cls) and hasattr(init, _WRAPPED):
            return

        @functools.wraps(init)
        def wrapped(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
            with self._inside():
                init(model, *args, **kwargs)
            if not self._depth:
                self.patch(model)

        setattr(wrapped, _WRAPPED, True)
        cls.__init__ = wrapped

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


class Outcomes:
    """Writes a line of JSON for each test as soon as it is over, so that nothing is lost with the process.

    Args:
        path: of the file; lines are added to what it has.
        patcher: whose counts are written.
    """

    def __init__(self, path: Path, patcher: Patcher) -> None:
        self._path = path
        self._patcher = patcher
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Start each test from the same random numbers, whichever tests came before it."""
        self._reports = []
        self._patcher.patched, self._patcher.left = 0, Counter()
        _seed(zlib.crc32(item.nodeid.encode()))
        result = yield
        with self._path.open("a") as file:
            print(json.dumps(self._line(item)), file=file)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call, teardown, and subtests between them."""
        self._reports.append(report)

    def _line(self, item: pytest.Item) -> dict[str, Any]:
        whole = [report for report in self._reports if type(report) is pytest.TestReport]
        failed = [report for report in self._reports if report.failed]
        skipped = any(report.skipped for report in whole)
        return {
            "test": item.nodeid,
            "outcome": "failed" if failed else "skipped" if skipped else "passed",
            "error": _error(failed[0]) if failed else None,
            "traceback": failed[0].longreprtext if failed else None,
            "seconds": round(sum(report.duration for report in whole), 2),
            "patched": self._patcher.patched,
            "left": dict(self._patcher.left),
        }


def _seed(seed: int) -> None:
    """The generators of Python, NumPy and torch, and those that Transformers' testers made for themselves."""
    set_seed(seed)
    torch._dynamo.reset()
    for name, module in list(sys.modules.items()):
        own = vars(module).get("global_rng") if name.startswith("tests.") else None
        if isinstance(own, random.Random):
            own.seed(seed)


def _error(report: pytest.TestReport) -> str:
    """The first line of an error, and the line of code that raised it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return report.longreprtext.strip().splitlines()[-1]
    message = next(iter(crash.message.strip().splitlines()), "")
    return f"{message} ({'/'.join(Path(crash.path).parts[-2:])}:{crash.lineno})"
