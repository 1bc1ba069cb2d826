"""When a trial is a verdict: a wrong result, or an error that comes again. No path changes without a warning."""

import json
import subprocess
import sys
import warnings

import pytest
import torch

from rope_patch import RopePatchWarning
from rope_patch.attention import trials
from rope_patch.attention.trials import Trial

ERRORS = {
    "a file of the cache that another process moved": FileNotFoundError("tmp.pid_7/kernel.json"),
    "a file of the cache that is partly written": json.JSONDecodeError("Expecting value", "{", 1),
    "a library that is partly written": ImportError("launcher.so: file too short"),
    "a compiler that was killed": subprocess.CalledProcessError(-9, "ptxas"),
    "a compiler that took too long": subprocess.TimeoutExpired("ptxas", 60),
}


def failing(*errors):
    """A trial whose runs raise these errors in turn, and succeed where there is None; and the list of what is left."""
    left = list(errors)

    def compare(*arguments):
        if (error := left.pop(0)) is not None:
            raise error
        yield "output", torch.ones(3), torch.ones(3)

    return Trial("A kernel", compare, 0.03), left


@pytest.mark.parametrize("what", ERRORS)
def test_an_error_that_passes_is_no_verdict(what):
    trial, left = failing(ERRORS[what], None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trial("cuda") == trial("cuda") == ""
    assert not left


def test_an_error_that_comes_again_is_a_verdict_and_is_told_once():
    trial, left = failing(FileNotFoundError("one"), PermissionError("two"), None)
    with pytest.warns(
        RopePatchWarning, match=r"A kernel is not used \(cuda\): it does not run here: PermissionError: two$"
    ):
        reason = trial("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trial("cuda") == reason
    assert left == [None]
    trial.forget()
    assert trial("cuda") == ""


def test_a_wrong_result_is_a_verdict_at_once():
    runs = []

    def compare():
        runs.append(1)
        yield "output", torch.ones(3), 2 * torch.ones(3)

    trial = Trial("A kernel", compare, 0.03)
    with pytest.warns(RopePatchWarning, match="differed from the definition by 0.5"):
        assert trial() == trial()
    assert len(runs) == 1


def test_a_path_that_changes_for_want_of_memory_is_told_once_and_again_tried_at_every_call():
    no_memory = torch.OutOfMemoryError("out of memory")
    trial, left = failing(no_memory, no_memory, None)
    with pytest.warns(RopePatchWarning, match="out of memory; the next call tries it again"):
        reason = trial("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trial("cuda") == reason
        assert trial("cuda") == ""
    assert not left


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch):
    """The trial reads its results, which no capture allows."""
    trial, left = failing(None)
    with monkeypatch.context() as capture:
        capture.setattr(trials.torch.cuda, "is_initialized", lambda: True)
        capture.setattr(trials.torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.warns(RopePatchWarning, match="call the model once before; the next call tries it again"):
            assert trial("cuda")
    assert left == [None]
    assert trial("cuda") == ""


def compiled(folder: str) -> str:
    """Compile a kernel for an H100 that is not here into a cache; the error, if there is one."""
    import os

    os.environ["TRITON_CACHE_DIR"] = folder
    from benchmarks.registers import Kernel, needs

    try:
        needs(Kernel("sm_90", "decode", "plain", "bfloat16", 64))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.nightly
def test_many_processes_compile_into_one_cold_cache(tmp_path):
    pytest.importorskip("triton")
    words = [
        "-c",
        "import sys; from tests.attention.test_trials import compiled; sys.exit(compiled(sys.argv[1]) or None)",
    ]
    begun = [subprocess.Popen([sys.executable, *words, tmp_path], stderr=subprocess.PIPE, text=True) for _ in range(6)]
    assert [process.communicate()[1] for process in begun if process.wait()] == []
