"""A pytest plugin: the outcome of every test on disk at once, a line of JSON each, a failure with its whole text.

    python -m pytest -p tests.outcomes --outcomes runs/gpu/tests.jsonl tests/test_cuda.py

A run that was cut goes on: tests that passed at this commit are left out, and those that failed come last. Under
pytest-xdist all workers compile kernels into one folder, as several processes of a user do: with a folder each, on a
GPU with 16 cores, nine workers needed 105 seconds for 262 tests, most of them to compile the same kernels.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="a file for one line of JSON per test")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--outcomes")
    worker = getattr(config, "workerinput", None)
    if path is None:
        return
    if worker is None:
        config.pluginmanager.register(Outcomes(path))
        return
    config.pluginmanager.register(Order(worker["outcomes"]))


class Order:
    """Leaves out what passed, and puts last what failed, by the last outcome of each test."""

    def __init__(self, last: dict[str, str]) -> None:
        self.last = last

    @pytest.hookimpl(trylast=True)  # after conftest.py has chosen
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if self.last.get(item.nodeid) in ("passed", "skipped")]
        config.hook.pytest_deselected(items=done)
        left = [item for item in items if item not in {*done}]
        items[:] = sorted(left, key=lambda item: item.nodeid in self.last)


class Outcomes(Order):
    """Writes them; of several processes, the one that has no tests of its own."""

    def __init__(self, path: Path) -> None:
        from rope_patch.evaluation.row import provenance
        from rope_patch.json_files import read_rows

        self.commit, self.path = provenance()["commit"], path
        self.found: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        content = path.read_bytes() if path.exists() else b""
        rows, whole = read_rows(path, content, json.loads)
        super().__init__(
            {row["test"]: row["outcome"] for row in rows if row["commit"] == self.commit and "test" in row}
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, whole)  # a line that was cut

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Of pytest-xdist: every worker has to choose the same tests, also one that starts later."""
        node.workerinput["outcomes"] = self.last

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            sections = [f"---- {title}\n{content}" for title, content in report.sections]
            self._put(report, "failed", when=report.when, text="\n".join([report.longreprtext, *sections]))
        elif report.nodeid not in self.found and (report.skipped or report.when == "teardown"):
            self._put(report, "skipped" if report.skipped else "passed")

    def pytest_sessionfinish(self) -> None:
        self._write(ran=len(self.found), **Counter(self.found.values()))

    def _put(self, report: pytest.TestReport, outcome: str, **more: Any) -> None:
        test, worker = report.nodeid, getattr(report, "worker_id", "")
        self.found[test] = outcome
        self._write(test=test, outcome=outcome, worker=worker, seconds=round(self.seconds[test], 3), **more)

    def _write(self, **fields: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**fields, "commit": self.commit}) + "\n")
