"""What a run went through is counted over all processes, and said at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.hardening.exploring import Tally

_COUNTED = "counted: "


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Callable[[str, Tally | int], None]:
    """To be called with what was counted and how much of it there was."""

    def counted(what: str, tally: Tally | int) -> None:
        number, refused = (tally, 0) if isinstance(tally, int) else (tally.cases, tally.refused)
        record_property(_COUNTED + what, number)
        if refused:
            record_property(f"{_COUNTED}{what} refused", refused)

    return counted


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line: `2,000 property cases, 10,000 fuzzed inputs, ...`."""
    totals: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        for name, number in report.user_properties:
            if name.startswith(_COUNTED):
                totals[name.removeprefix(_COUNTED)] += number
    said = [f"{number:,} {what}" for what, number in totals.items() if not what.endswith(" refused")]
    if said:
        terminalreporter.write_line("hardening: " + ", ".join(said))
    refused = [f"{number:,} {what}" for what, number in totals.items() if what.endswith(" refused")]
    if refused:
        terminalreporter.write_line("  of them: " + ", ".join(refused))
