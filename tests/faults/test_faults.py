"""The list of known faults: each has its place in the package, and tests of the usual run that must see it."""

from __future__ import annotations

import pytest

from tests.faults.__main__ import FAULTS, ROOT, read


def test_every_fault_has_its_place():
    faults = read(FAULTS)
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        assert fault.old != fault.new, fault.name
        assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1, f"{fault.name}: {fault.file}"


def test_the_tests_of_every_fault_belong_to_the_usual_run(request: pytest.FixtureRequest):
    """As far as this run collected their files."""
    config = request.config
    some = config.getoption("scheme") or config.getoption("keyword") or config.getoption("part") != "1/1"
    if some or any("::" in word for word in config.args):
        pytest.skip("this run is of some tests of a file")
    whole = {item.nodeid for item in request.session.items}
    collected = whole | {name.partition("[")[0] for name in whole}
    files = {name.partition("::")[0] for name in whole}
    for fault in read(FAULTS):
        for test in fault.tests:
            file = test.partition("::")[0]
            assert (ROOT / file).is_file(), f"{fault.name}: {file}"
            assert file not in files or test in collected, f"{fault.name}: {test} is not in the usual run"
