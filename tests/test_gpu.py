"""`make gpu` at tiny sizes on a CPU: what a part has found is kept when it is cut, and the next run goes on."""

import dataclasses
import json
import os
import queue
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from benchmarks import candidates, checkpoint, compiled, gpu, profiled, run
from benchmarks.catalogue import COMPILED, PARTS, TABLE, rows
from benchmarks.comparison import Comparison, Shape, Side
from benchmarks.measure import Patience
from benchmarks.results import ResultFile
from rope_patch.attention.tile_kernels import FlashCPU

MODEL = ["--model", "recipes/assets/tiny-llama"]

# --- parts and their time ---


def statement(code):
    """A part that runs this code once, in a process of its own."""
    return gpu.Part(1, ("timeit", "-n", "1", "-r", "1", textwrap.dedent(code)), "tests.jsonl")


def ran(out, monkeypatch, parts, minutes=1.0):
    """The status of a run of these parts, and what became of each."""
    monkeypatch.setattr(gpu, "parts_of", lambda _: parts)
    names = ["--only", *parts]
    status = gpu.main(["--device", "cpu", "--minutes", str(minutes), "--out", str(out), *names])
    return status, json.loads((out / "gpu.json").read_text())["parts"]


def append(path, text):
    return f"print({text!r}, file=open({str(path)!r}, 'a'))"


def is_alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_part_that_runs_out_of_its_time_ends_with_all_it_started_and_keeps_its_rows(tmp_path, monkeypatch, capsys):
    line, child = '{"test": "a", "outcome": "passed"}', tmp_path / "child"
    endless = f"""
        import subprocess, sys, time
        {append(tmp_path / "tests.jsonl", line)}
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(started.pid, file=open({str(child)!r}, "w"))
        time.sleep(600)
    """
    parts = {"tests": statement(endless), "table": statement(append(tmp_path / "ran", "table"))}
    status, found = ran(tmp_path, monkeypatch, parts, minutes=0.1)
    assert (status, found["tests"]["state"], found["table"]["state"]) == (0, "cut", "done")
    assert found["tests"]["seconds"] < 10
    assert not is_alive(child.read_text().strip())
    assert (tmp_path / "tests.jsonl").read_text() == f"{line}\n"
    shown = capsys.readouterr().out
    assert "cut after 3 s of 3: 1 tests ran, 0 failed" in shown
    assert "the same command goes on" in shown
    ran(tmp_path, monkeypatch, {**parts, "tests": statement(append(tmp_path / "ran", "tests"))})
    assert (tmp_path / "ran").read_text().split() == ["table", "tests"]
    assert "goes on" not in capsys.readouterr().out


def test_a_part_that_fails_stops_no_other_and_is_tried_again_alone(tmp_path, monkeypatch):
    parts = {"tests": statement("1 / 0"), "table": statement(append(tmp_path / "ran", "table"))}
    status, found = ran(tmp_path, monkeypatch, parts)
    assert (status, found["tests"]["state"], found["table"]["state"]) == (1, "failed", "done")
    status, found = ran(tmp_path, monkeypatch, {**parts, "tests": statement("pass")})
    assert (status, found["tests"]["state"]) == (0, "done")
    assert (tmp_path / "ran").read_text().split() == ["table"]


def test_time_that_a_part_leaves_goes_to_the_later_ones(tmp_path, monkeypatch):
    _, found = ran(tmp_path, monkeypatch, {"tests": statement("pass"), "table": statement("pass")})
    assert found["tests"]["limit"] == pytest.approx(30, abs=1)
    assert found["table"]["limit"] > 50


def test_without_a_model_one_sentence_says_so(tmp_path, capsys):
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path), "--only", "model", "finetune"]) == 0
    assert capsys.readouterr().out.count("not run: no --model is given") == 2


def test_a_folder_of_another_size_is_refused_and_a_file_that_was_cut_is_begun_anew(tmp_path, monkeypatch, capsys):
    ran(tmp_path, monkeypatch, {"tests": statement("pass")})
    path, other = tmp_path / "gpu.json", ["--device", "cpu", "--length", "64", "--out", str(tmp_path)]
    whole = path.read_text()
    assert gpu.main([*other, "--only", "tests"]) == 2
    assert "give another --out" in capsys.readouterr().err
    path.write_text(whole[:-20])
    status, found = ran(tmp_path, monkeypatch, {"tests": statement("pass")})
    assert (status, found["tests"]["state"]) == (0, "done")


@pytest.mark.parametrize("name", ["tests.jsonl", "cuda.json", "profile.json", "checkpoint.json"])
def test_a_damaged_file_of_rows_does_not_hide_the_others(tmp_path, name):
    (tmp_path / name).write_text('{"half": \nof a file\n')
    assert gpu.found_in(tmp_path / name).startswith("the file is damaged")
    assert gpu.found_in(tmp_path / f"no-{name}") == "nothing was written"


def test_a_part_asks_for_rows_that_are_there_and_for_every_new_one():
    groups = {row.name.partition("/")[0] for row in rows("cuda")}
    assert groups >= {*TABLE, *COMPILED, *PARTS}
    names = {row.name for row in rows("cuda")}
    kernels = {f"value/{kernel}/{region}" for kernel in candidates.KERNELS for region in candidates.REGIONS}
    assert names >= kernels | {f"value/{executor}/rerope" for executor in ("fused", "merged")}


def test_executors_that_score_one_token_have_no_rows_of_a_prefill():
    """`make gpu` would write an error in each of them."""
    assert set(candidates.executors()) == {"fused", "flex", "intervals", "merged"}
    for executor in ("merged", "flex"):  # the others need a GPU
        assert candidates.models.attention_module(Shape(64, 4, 2, 16), "rerope", executor=executor).run() is not None


@pytest.mark.slow
@pytest.mark.parametrize("group", [*TABLE, *COMPILED[:1], *PARTS])
def test_rows_for_a_gpu_run_on_a_cpu_at_tiny_sizes(group):
    row = run.jobs_for("cpu", [group], quick=True, catalogue="cuda")[-1]
    found = run.measured(dataclasses.replace(row, memory_target=None), Patience(0.0, least=1))
    assert found.error is None
    if group in ("graphs", "breaks"):
        assert (found.value, found.yardstick_value) == ((1, 1) if group == "graphs" else (0, 0))


def test_a_wrong_value_of_a_kernel_or_an_executor_is_measured(monkeypatch):
    shape, forward = Shape(64, 4, 2, 16), FlashCPU.forward
    assert candidates.kernel_error(shape, "flash", "near")[0] < 1e-5
    assert candidates.executor_error(shape, "rerope", "merged")[0] < 1e-5
    with pytest.raises(RuntimeError, match="in place of fused"):
        candidates.executor_error(shape, "rerope", "fused")
    monkeypatch.setattr(
        FlashCPU, "forward", lambda kernel, work: (1.5 * forward(kernel, work)[0], forward(kernel, work)[1])
    )
    assert candidates.kernel_error(shape, "flash", "near")[0] == pytest.approx(0.5)
    assert candidates.executor_error(shape, "rerope", "merged")[0] > 0.1


@pytest.mark.slow
def test_rows_compile_side_by_side_and_each_is_written(tmp_path):
    words = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert compiled.main([*words, "--only", "generate/rerope", "generate/logn"]) == 0
    found = ResultFile.read(tmp_path / "cpu.json")
    assert {row.name.split("/")[1] for row in found.rows} == {"rerope", "logn"}
    assert all(row.ratio and row.error is None for row in found.rows)
    assert not found.unfinished


def test_a_row_that_does_not_compile_is_a_row_and_stops_no_other(tmp_path):
    def fails(_):
        raise RuntimeError("no compiler")

    good = Comparison("generate/good", "", "", lambda _: Side(int), lambda _: Side(int), Shape(1))
    bad = dataclasses.replace(good, name="generate/bad", ours=fails)
    free = threading.Event()
    free.set()
    for job in (bad, good):
        compiled.compiled_and_timed(
            job, tmp_path / "cpu.json", Patience(0.0, least=1), queue.Queue(), free, threading.Lock()
        )
    found = {row.name: row.error for row in ResultFile.read(tmp_path / "cpu.json").rows}
    assert found == {"generate/bad": "RuntimeError: no compiler", "generate/good": None}


def test_a_compiled_row_that_is_not_there_is_named(tmp_path, capsys):
    assert compiled.main(["--device", "cpu", "--only", "generate/none", "--out", str(tmp_path)]) == 2
    assert "there are generate, traced, mode" in capsys.readouterr().err


def test_a_call_is_profiled_once_and_an_error_is_kept(tmp_path, monkeypatch, capsys):
    def fails(_):
        raise RuntimeError("out of memory")

    calls = {"good": (lambda _: Side(lambda: torch.ones(3) + 1), Shape(1)), "bad": (fails, Shape(1))}
    monkeypatch.setattr(profiled, "cases", lambda _: calls)
    words = ["--device", "cpu", "--out", str(tmp_path)]
    assert profiled.main(words) == 1
    found = json.loads((tmp_path / "profile.json").read_text())["calls"]
    assert found["bad"] == {"error": "RuntimeError: out of memory"}
    assert "aten::add" in {name for name, *_ in found["good"]["kernels"]}
    capsys.readouterr()
    calls["bad"] = calls["good"]
    assert profiled.main(words) == 0
    assert capsys.readouterr().out.startswith("bad:")


# --- outcomes of tests ---

TESTS = """
import os
import pytest

def test_passes():
    pass

def test_fails():
    print("what it printed")
    assert os.path.exists("repaired"), "why it failed"

def test_skips():
    pytest.skip("not here")

@pytest.mark.skipif(os.path.exists("repaired"), reason="once")
def test_ends_the_process():
    os._exit(3)
"""


def outcomes(folder, *words):
    """Run the tests with the plugin, and read its lines."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.outcomes", *words]
    # this run may itself be split
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**outer, "PYTHONPATH": str(gpu.ROOT)}
    subprocess.run([*command, "--outcomes", "out/tests.jsonl"], cwd=folder, env=environment, capture_output=True)
    return [json.loads(line) for line in (folder / "out/tests.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("split", [(), ("-n", "2")])
def test_outcomes_are_there_after_a_crash_and_the_next_run_goes_on(tmp_path, split):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    found = outcomes(tmp_path, *split)
    of = {line["test"].partition("::")[2]: line for line in found if "test" in line}
    assert of["test_passes"]["outcome"] == "passed"
    assert of["test_skips"]["outcome"] == "skipped"
    assert "why it failed" in of["test_fails"]["text"]
    assert "what it printed" in of["test_fails"]["text"]
    if split:
        assert "crashed" in of["test_ends_the_process"]["text"]
        assert (found[-1]["ran"], found[-1]["failed"]) == (4, 2)
    with (tmp_path / "out/tests.jsonl").open("a") as file:
        file.write('{"test": "half a li')
    (tmp_path / "repaired").touch()
    again = outcomes(tmp_path, *split)[len(found) :]
    assert {line["test"].partition("::")[2] for line in again if "test" in line} == {
        "test_fails",
        "test_ends_the_process",
    }
    assert gpu.found_in(tmp_path / "out/tests.jsonl") == "4 tests ran, 0 failed, 2 skipped"


# --- a checkpoint ---


def words(out, *only):
    sizes = ["--length", "512", "--steps", "2", "--rows", "2", "--prompt", "16", "--new", "2"]
    return ["--device", "cpu", *MODEL, *sizes, "--out", str(out), "--only", *only]


def results(out):
    return json.loads((out / "checkpoint.json").read_text())["done"]


def test_parts_that_are_done_are_kept_and_failed_ones_are_tried_again(tmp_path, monkeypatch):
    asked = []

    def serve(stages, scheme, cudnn):
        asked.append((scheme, cudnn))
        if len(asked) == 2:
            raise RuntimeError("out of memory")
        return {"tokens_per_second": 1.0}

    monkeypatch.setattr(checkpoint.Stages, "_served", serve)
    assert checkpoint.main(words(tmp_path, "serve")) == 1
    assert results(tmp_path)["serve/plain without cuDNN"]["error"] == "RuntimeError: out of memory"
    assert checkpoint.main(words(tmp_path, "serve")) == 0
    assert asked == [(None, True), (None, False), ("rerope:window=128", False), (None, False)]


def test_a_cut_fine_tune_goes_on_at_its_last_step(tmp_path, monkeypatch):
    save = torch.save

    def interrupted(state, path):
        if len(state["losses"]) == 2:
            path.write_bytes(b"half a file")
            raise KeyboardInterrupt
        save(state, path)

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.main(words(tmp_path / "cut", "finetune"))
    monkeypatch.setattr(torch, "save", save)
    for out in ("cut", "whole"):
        assert checkpoint.main(words(tmp_path / out, "finetune")) == 0
    cut, whole = (results(tmp_path / out)["finetune/yarn:target=512"]["result"] for out in ("cut", "whole"))
    assert (cut["resumed_at"], whole["resumed_at"]) == (1, 0)
    assert cut["losses"] == whole["losses"]


def test_nothing_is_measured_without_the_device(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for main, more in ((checkpoint.main, MODEL), (gpu.main, [])):
        assert main([*more, "--only", "serve"]) == 2
        assert "no CUDA device" in capsys.readouterr().err


def test_losses_are_drawn_and_nothing_that_is_scored_is_trained_on(tmp_path, monkeypatch):
    taken, tokens = [], checkpoint.Stages._tokens
    monkeypatch.setattr(checkpoint, "WINDOWS", 2)

    def recorded(stages, start, count):
        taken.append((start, start + count))
        return tokens(stages, start, count)

    monkeypatch.setattr(checkpoint.Stages, "_tokens", recorded)
    assert checkpoint.main(words(tmp_path, "far", "finetune")) == 0
    rows = sorted(span for span in taken if span[1] - span[0] == 512)  # windows have a target more
    assert rows[0][0] >= max(end for start, end in taken if (start, end) not in rows)
    assert len(set(rows)) == 2
    assert (tmp_path / "losses.png").stat().st_size > 5000
    found = results(tmp_path)
    compared = ["plain", "yarn:target=512", "rerope:window=128+logn", "self_extend:target=512,window=128"]
    compared += ["dca:chunk_size=192", "lm_infinite:local_window=252"]
    assert [name for name in found if name.startswith("far/")] == [f"far/{scheme}" for scheme in compared]
    after = ["last 256 after 256", "last 256 after 512", "repeat", "repeat, cut at L"]  # L/8 and L/2 are below 256
    assert all(list(found[f"far/{scheme}"]["result"]) == after for scheme in compared)


def test_a_checkpoint_of_32k_is_measured_in_short_text_and_at_two_factors():
    assert checkpoint.lengths(32768, 131072) == [4096, 16384, 32768, 65536, 131072]
    factors = [scheme for scheme in checkpoint.schemes(32768, 131072) if scheme and scheme.startswith("yarn")]
    assert factors == ["yarn:target=65536", "yarn:target=131072"]


def test_the_text_can_be_a_file(tmp_path):
    (tmp_path / "text.txt").write_text("a text of my own " * 9)
    options = checkpoint.argparse.Namespace(text=tmp_path / "text.txt", model=MODEL[1], length=1, steps=0, rows=1)
    options.prompt, options.device, options.out, options.only = 1, "cpu", tmp_path, []
    assert checkpoint.Stages(options)._text.shape[1] < 9 * 20


def test_a_text_that_is_too_short_is_an_error_and_within_l_there_is_no_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "WINDOWS", 2)
    within = ["--device", "cpu", *MODEL, "--length", "256", "--steps", "1", "--out", str(tmp_path), "--only", "far"]
    assert checkpoint.main(within) == 0
    assert not (tmp_path / "losses.png").exists()
    monkeypatch.setattr(checkpoint.Stages, "_text", torch.ones(1, 600, dtype=torch.long))
    assert checkpoint.main([*within[:-2], "--only", "finetune"]) == 1
    assert "600 tokens" in results(tmp_path)["finetune/yarn:target=256"]["error"]
