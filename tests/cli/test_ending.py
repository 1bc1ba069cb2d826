"""How commands end when they are not left to end by themselves."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import sys
import time

import pytest
import torch

from rope_patch.cli import main
from rope_patch.cli.common import NO_READER, ROWS, as_typed, in_own_process, run_politely
from rope_patch.evaluation import perplexity
from tests.evaluation.conftest import checkpoint, documents  # noqa: F401  # a fixture

FORK = multiprocessing.get_context("fork")
"""A child that has imported everything already; an interpreter of its own would take seconds."""


@pytest.fixture
def words(checkpoint, tmp_path):  # noqa: F811
    text = tmp_path / "a text.txt"
    text.write_text(documents(80)[0]["text"])
    shared = ["--text", str(text), "--output", str(tmp_path / "out"), "--device", "cpu", "--targets", "8"]
    return ["perplexity", "--model", str(checkpoint), "--lengths", "16,32", *shared]


def measure_slowly(words, folder):
    """The command as a process of its own, which waits once it has written a row."""
    torch.set_num_threads(1)
    measured, score = [], perplexity.chunked_nll

    def wait(*arguments, **settings):
        measured.append(1)
        if len(measured) > 2:
            (folder / "waiting").touch()
            time.sleep(60)
        return score(*arguments, **settings)

    perplexity.chunked_nll = wait
    sys.argv = ["rope-patch", *words]
    sys.stdout, sys.stderr = ((folder / name).open("w", buffering=1) for name in ("stdout", "stderr"))
    status = main()
    (folder / "ending").touch()
    time.sleep(0.2)  # as an interpreter takes its time to end
    os._exit(status)


def appears(path, seconds=60.0):
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return path.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_rows_and_says_how_to_go_on(number, status, words, tmp_path, capsys, monkeypatch):
    process = FORK.Process(target=measure_slowly, args=(words, tmp_path))
    process.start()
    try:
        assert appears(tmp_path / "waiting")
        rows = (tmp_path / "out" / "perplexity.jsonl").read_text()
        os.kill(process.pid, number)
        assert appears(tmp_path / "ending")
        os.kill(process.pid, signal.SIGINT)  # an impatient second one
        process.join(30)
        assert process.exitcode == status
    finally:
        process.kill()
    assert 0 < rows.count("\n") < 4
    said = (tmp_path / "stderr").read_text()
    assert "Traceback" not in said
    assert (tmp_path / "stdout").read_text() == ""
    promise, _, command = said.strip().splitlines()[-1].partition("; to go on: ")
    assert promise == f"rope-patch: interrupted; {ROWS}"
    program, *again = shlex.split(command)
    assert program.endswith("rope-patch")
    assert main(again) == 0
    assert (tmp_path / "out" / "perplexity.jsonl").read_text().startswith(rows)


def interrupted():
    raise KeyboardInterrupt


def test_what_cannot_be_resumed_only_says_that_it_ended(capsys, monkeypatch):
    assert run_politely(interrupted) == 130
    assert capsys.readouterr().err.strip() == "rope-patch: interrupted; nothing was written"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert run_politely(interrupted, ROWS, "python recipe.py") == 130
    assert "start the same processes again" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert run_politely(interrupted, ROWS) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "orig_argv", "typed"),
    [
        (["nowhere/rope-patch", "list"], ["python", "nowhere/rope-patch", "list"], "nowhere/rope-patch list"),
        (["bin/rope-patch", "plot", "a b"], ["python", "bin/rope-patch", "plot", "a b"], "rope-patch plot 'a b'"),
        (["recipes/sweep.py", "a b"], ["python3", "recipes/sweep.py", "a b"], "python3 recipes/sweep.py 'a b'"),
        (["-m", "list"], ["python", "-m", "rope_patch.cli", "list"], "python -m rope_patch.cli list"),
    ],
)
def test_the_command_is_the_one_that_was_typed(argv, orig_argv, typed, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "rope-patch"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert as_typed() == typed


@pytest.mark.parametrize("words", ["list", "list --json", "recipes list", "--help"])
def test_a_reader_that_goes_away_is_no_error(words, capfd, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "argv", ["rope-patch", *words.split()])
        assert main() == NO_READER
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")
def test_a_full_disk_is_one_line(capsys, monkeypatch):
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert in_own_process(lambda: run_politely(lambda: print("x"))) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_signals_are_as_they_were_after_a_command(monkeypatch, capsys):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(sys, "argv", ["rope-patch", "recipes", "list"])
    assert main() == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_defect_of_ours_is_a_traceback():
    with pytest.raises(ZeroDivisionError):
        run_politely(lambda: 1 / 0)
