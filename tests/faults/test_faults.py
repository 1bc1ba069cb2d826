"""The list of known faults: each has its place in the package, and tests of the usual run that must see it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.__main__ import FAULTS, ROOT, picked, read


def test_every_fault_has_its_place():
    faults = read(FAULTS)
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        assert fault.old != fault.new, fault.name
        assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1, f"{fault.name}: {fault.file}"


def test_a_word_picks_faults_by_name_or_file():
    faults = read(FAULTS)
    assert picked(faults, []) == faults
    files = {fault.file for fault in picked(faults, ["executors/joined", "attention/pieces"])}
    assert files == {"rope_patch/attention/executors/joined.py", "rope_patch/attention/pieces.py"}
    assert [fault.name for fault in picked(faults, [faults[0].name])] == [faults[0].name]


def test_a_word_that_picks_no_fault_is_an_error():
    """And not a run of everything."""
    command = [sys.executable, "-m", "tests.faults", "decode", "no such word"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no fault has 'no such word' in its name or file" in done.stderr


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
