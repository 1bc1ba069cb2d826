"""How commands end when they are not left to end by themselves."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import pytest

from rope_patch.cli import available, load, main
from rope_patch.cli.describe import Options
from rope_patch.cli.options import INTERRUPTED, NO_READER, Measured, run
from rope_patch.errors import InvalidField


@dataclass(kw_only=True)
class Resumed(Measured):
    """Options of a measurement."""


def ends(error, options=Options):
    def stop(_):
        raise error

    return run(options, stop, [])


def test_errors_of_a_user_are_one_line(capsys):
    assert ends(InvalidField("factor=0\nis wrong")) == 2
    assert ends(OSError(28, "No space left on device", "runs/a")) == 2
    assert capsys.readouterr().err == "rope-patch: factor=0 is wrong\nrope-patch: runs/a: No space left on device\n"


def test_an_interruption_tells_how_to_go_on(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/rope-patch", "sweep", "--target", "4 x"])
    assert ends(KeyboardInterrupt(), Resumed) == INTERRUPTED
    said = capsys.readouterr().err
    assert said == "rope-patch: interrupted; the results so far are saved; to resume: rope-patch sweep --target '4 x'\n"
    assert ends(KeyboardInterrupt()) == INTERRUPTED
    assert capsys.readouterr().err == "rope-patch: interrupted\n"


def test_every_command_whose_help_promises_it_resumes():
    for command in available():
        if command != "doctor":
            module = load(command)
            assert getattr(module.Options, "resumes", False) == ("resume" in module.__doc__), command


def test_only_the_main_process_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert ends(InvalidField("wrong")) == 2
    assert capsys.readouterr().err == ""


def test_a_defect_of_ours_is_a_traceback():
    with pytest.raises(ZeroDivisionError):
        ends(ZeroDivisionError())


@pytest.mark.parametrize("words", [["list"], ["list", "--json"]])
def test_a_reader_that_goes_away_is_no_error(words, capfd, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(words) == NO_READER
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")
def test_a_full_disk_is_one_line(capsys, monkeypatch):
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["list"]) == 2
    assert "No space left on device" in capsys.readouterr().err
