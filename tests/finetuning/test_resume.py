"""A run that was killed at any moment and started again ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rope_patch.data import training_rows
from rope_patch.evaluation import charts
from rope_patch.training import callbacks, checkpoints
from rope_patch.training.checkpoints import SafeTrainer, alone_in
from tests.evaluation.conftest import documents
from tests.processes import run_one
from tests.recipes import run_recipe

from .conftest import checkpoint_of, losses, rows, weights, words_of

KILLS = {
    "in a step": ("SafeTrainer.training_step", 4),
    "in the write of a checkpoint": ("SafeTrainer._save_optimizer_and_scheduler", 1),
    "before the old checkpoint is deleted": ("rotate_checkpoints", 1),
    "in the measurement of the third step": ("SafeTrainer._maybe_log_save_evaluate", 1),
    "in the write of what was trained": ("whole_folder", 4),
}
"""A function of `rope_patch.training.checkpoints`, and at which of its calls the process ends."""


def run_and_die(words, name, calls):
    """The recipe in this process, which SIGKILL ends in a call of a function."""
    owner = SafeTrainer if "." in name else checkpoints
    name = name.rpartition(".")[2]
    function, left = getattr(owner, name), [calls]

    def killed(*arguments, **keywords):
        left[0] -= 1
        if not left[0]:
            if name == "_save_optimizer_and_scheduler":
                Path(arguments[1], "optimizer.pt").write_bytes(b"half a state")
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)

    setattr(owner, name, killed)
    run_to_the_end(words)


def run_to_the_end(words):
    charts.save = lambda *_, **__: None
    sys.exit(run_recipe("finetune", words))


def test_five_sigkills_change_nothing(options, tmp_path):
    settings = {"steps": 6, "save_every": 1, "evaluate_every": 3, "scheme": ["kerple"], "micro_batch_size": 1}
    undisturbed, killed = options(**settings, output=tmp_path / "undisturbed"), options(**settings)
    assert run_one(run_to_the_end, words_of(undisturbed)) == 0
    for moment, (name, calls) in KILLS.items():
        assert run_one(run_and_die, words_of(killed), name, calls) == -signal.SIGKILL, moment
    assert run_one(run_to_the_end, words_of(killed)) == 0
    expected, found = weights(undisturbed, "kerple"), weights(killed, "kerple")
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
    assert rows(killed) == rows(undisturbed)
    assert losses(killed, "kerple") == losses(undisturbed, "kerple")
    assert len(rows(killed, "perplexity.jsonl")) == len(rows(undisturbed, "perplexity.jsonl"))
    assert [path.name for path in (checkpoint_of(killed, "kerple") / "trainer").iterdir()] == ["checkpoint-6"]


class Killed(BaseException):
    """Nothing in the library catches it, as nothing catches SIGKILL."""


@pytest.fixture
def kill_at(monkeypatch):
    """Interrupt the next run in this step."""

    def arm(step):
        training_step = SafeTrainer.training_step

        def interrupted(trainer, *arguments):
            if trainer.state.global_step == step:
                monkeypatch.setattr(SafeTrainer, "training_step", training_step)
                raise Killed
            return training_step(trainer, *arguments)

        monkeypatch.setattr(SafeTrainer, "training_step", interrupted)

    return arm


KINDS = {
    "LoRA with dropout": {"method": "lora", "dropout": 0.3},
    "norms, embeddings and learned tables": {"method": "lora_norms_embeddings", "scheme": ["rope+shaw:max_distance=8"]},
    "stream": {"streaming": True, "shuffle_buffer": 2, "layout": "padded"},
    "PoSE": {"layout": "pose"},
    "PoSE in short rows": {"layout": "pose", "pose_row": 8},
    "randomized": {"layout": "randomized"},
    "randomized stream": {"layout": "randomized", "streaming": True, "shuffle_buffer": 2, "position_ranges": "24,32"},
    "warm start": {"warm_start_steps": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_twice(kind, finetune, options, kill_at, tmp_path):
    settings = {"steps": 8, "save_every": 1, **KINDS[kind]}
    expected = finetune(**settings, output=tmp_path / "undisturbed")
    for step in (2, 5):
        kill_at(step)
        with pytest.raises(Killed):
            run_recipe("finetune", words_of(options(**settings)))
    found, scheme = finetune(**settings), settings.get("scheme", ["yarn:factor=2"])[0]
    ours, theirs = weights(found, scheme), weights(expected, scheme)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert rows(found) == rows(expected)


def test_a_finished_run_is_left_alone_and_measures_nothing(finetune, monkeypatch, capsys):
    chosen = finetune()
    before = {path: path.stat().st_mtime_ns for path in checkpoint_of(chosen).rglob("*")}
    monkeypatch.setattr(SafeTrainer, "train", None)
    monkeypatch.setattr(callbacks, "run", None)
    shown = capsys.readouterr().out
    finetune()
    assert {path: path.stat().st_mtime_ns for path in checkpoint_of(chosen).rglob("*")} == before
    again = capsys.readouterr()
    assert again.out == shown
    assert "already trained" in again.err


def test_more_steps_and_another_scheme_go_on(finetune, monkeypatch, tmp_path):
    finetune()
    measured, run = [], callbacks.run
    monkeypatch.setattr(callbacks, "run", lambda *a, **k: measured.append(run(*a, **k)) or measured[-1])
    chosen = finetune(steps=6, scheme=["yarn:factor=2", "pi:factor=2"])
    steps = [(row["line"], row["step"]) for row in rows(chosen) if row["length"] == 16]
    assert steps == [
        *[("plain", 0), ("window", 0), ("yarn:factor=2", 0), ("yarn:factor=2", 4), ("yarn:factor=2", 6)],
        *[("pi:factor=2", 0), ("pi:factor=2", 6)],
    ]
    straight = finetune(steps=6, output=tmp_path / "straight")
    assert all(torch.equal(value, weights(straight)[name]) for name, value in weights(chosen).items())


def test_merging_after_the_training(finetune):
    chosen = finetune(method="lora")
    assert (checkpoint_of(chosen) / "checkpoint" / "adapter_config.json").exists()
    finetune(method="lora", merge=True)
    assert not (checkpoint_of(chosen) / "checkpoint" / "adapter_config.json").exists()
    assert (checkpoint_of(chosen) / "checkpoint" / "model.safetensors").exists()


@pytest.mark.parametrize("changed", [{"method": "lora"}, {"length": 48}, {"targets": 4}, {"seed": 1}])
def test_an_output_of_other_options(changed, finetune, options, capsys):
    finetune(steps=1)
    ((name, value),) = changed.items()
    was = options().get(name, {"method": "full", "seed": 0}.get(name))
    finetune(2, steps=1, **changed)
    assert f"holds other runs ({name} was {was!r} and is {value!r}); choose another output" in capsys.readouterr().err


def test_the_same_end_of_a_text_is_held_out_again_and_no_other_can_be(finetune, given, tmp_path, capsys, monkeypatch):
    text = tmp_path / "mine.txt"
    text.write_text(documents(700)[0]["text"])
    trained_on, rows_of = [], training_rows.training_rows

    def watched(documents, *others, **settings):
        trained_on.append(list(documents["text"]))
        return rows_of(documents, *others, **settings)

    monkeypatch.setattr(training_rows, "training_rows", watched)
    mine = {"text": text, "eval_text": None}
    chosen = finetune(**mine)
    shown = capsys.readouterr()
    name = "the last 10% of mine.txt, held out"
    assert f"rope-patch: perplexity is measured on {name}\n" in shown.err
    assert name in shown.out
    assert {row["text"] for row in rows(chosen)} == {row["text"] for row in rows(chosen, "perplexity.jsonl")} == {name}
    finetune(**mine, steps=6)
    assert trained_on == [[text.read_text()[:-70]]] * 2
    assert len({row["texts"] for row in rows(chosen, "perplexity.jsonl")}) == 1
    capsys.readouterr()
    finetune(2, text=text, eval_text=given / "held_out.txt")
    assert f"holds other runs (measured on was '{name} (" in capsys.readouterr().err
    text.write_text(text.read_text() + "and so on")
    finetune(2, **mine)
    assert f"holds other runs (measured on was '{name} (" in capsys.readouterr().err


def test_a_second_run_on_one_folder_ends_at_once(finetune, options, capsys):
    with alone_in(options()["output"]):
        chosen = finetune(2)
    assert capsys.readouterr().err == (
        f"rope-patch: {chosen['output']} is in use by another run; wait for it, or choose another output\n"
    )
    finetune(steps=1)


@pytest.mark.parametrize("what", ["weights", "optimizer", "checkpoint"])
def test_a_full_disk_leaves_the_last_good_checkpoint(what, finetune, monkeypatch, capsys):
    chosen = finetune(steps=2)
    folder = checkpoint_of(chosen)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()

    def full(*_, **__):
        raise_full(what)

    owner = {"weights": "save_model", "optimizer": "_save_optimizer_and_scheduler", "checkpoint": "_save_scaler"}[what]
    with monkeypatch.context() as patched:
        patched.setattr(SafeTrainer, owner, full)
        finetune(2, steps=4)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"rope-patch: {folder / 'trainer' / 'checkpoint-4'} cannot be written")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    finetune(steps=4)


def raise_full(what):
    """What safetensors, torch and Python make of it."""
    from safetensors import SafetensorError

    if what == "weights":
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    if what == "optimizer":
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    raise OSError(28, "No space left on device")


@pytest.fixture
def disk(tmp_path):
    """A disk of 4 MiB, which only root can mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], check=False).returncode
    ):
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.nightly
@pytest.mark.parametrize(("left", "what"), [(0, "perplexity.jsonl"), (4, ""), (60, "serializing"), (400, "")])
def test_a_disk_that_is_full_at_any_moment_costs_nothing(left, what, disk, finetune, capsys, tmp_path):
    """With so many KiB left, a row of results, the folder, the weights or the optimiser has no room."""
    often = {"save_every": 2, "evaluate_every": 1}
    straight = finetune(steps=4, **often, output=tmp_path / "straight")
    chosen = finetune(steps=2, **often, output=disk / "out")
    state = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(state.f_bavail * state.f_bsize - left * 1024))
    capsys.readouterr()
    more = {**chosen, "steps": 4}
    assert run_recipe("finetune", words_of(more)) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert what in said
    assert "No space left" in said or "cannot be written" in said
    (disk / "ballast").unlink()
    assert run_recipe("finetune", words_of(more)) == 0
    assert all(torch.equal(value, weights(more)[name]) for name, value in weights(straight).items())
    assert rows(more) == rows(straight)


def test_a_learning_rate_that_ruins_the_weights_stops_with_the_last_good_checkpoint(finetune, capsys):
    chosen = finetune(2, learning_rate=1e30, warmup_steps=0, save_every=1, steps=9)
    assert "the gradient is not finite; try a smaller learning rate" in capsys.readouterr().err
    assert not (checkpoint_of(chosen) / "checkpoint").exists()
