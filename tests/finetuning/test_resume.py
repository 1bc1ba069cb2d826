"""A run that was stopped at any moment and started again ends as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch
import yaml

from rope_patch.finetuning import run as running
from rope_patch.finetuning.experiment import run
from rope_patch.finetuning.run import _Trainer
from rope_patch.training import state
from rope_patch.training.loop import Diverged

from .conftest import Killed
from .kill import differences, finetune, kill_while_training, log_without_clock, weights

KINDS = {
    "full": {},
    "packed in micro-batches": {"micro_batch_size": 1},
    "LoRA with dropout": {"method": "lora", "dropout": 0.3, "micro_batch_size": 1, "evaluate_every": 3},
    "stream": {"streaming": True, "shuffle_buffer": 2, "layout": "padded"},
    "PoSE": {"layout": "pose"},
    "warm start": {"warm_start_steps": 4, "schemes": ("yarn:factor=2",)},
    "learned": {"schemes": ("kerple",)},
}
STEPS = 8


@pytest.fixture
def undisturbed(describe, tmp_path):
    def make(**settings):
        settings = {"steps": STEPS, **settings}
        run(describe(**settings, output=str(tmp_path / "undisturbed")))
        return tmp_path / "undisturbed"

    return make


def folder_of(output):
    (folder,) = [path for path in output.iterdir() if path.is_dir()]
    return folder


def assert_same(undisturbed, output):
    assert differences(undisturbed, output, folder_of(output).name) == []


@pytest.mark.parametrize("kind", KINDS)
def test_killed_five_times(kind, describe, undisturbed, kill_at, tmp_path):
    expected = undisturbed(**KINDS[kind])
    description = describe(steps=STEPS, save_every_seconds=0, **KINDS[kind])
    for step in sorted(random.Random(kind).choices(range(STEPS), k=5)):
        kill_at(step)
        with pytest.raises(Killed):
            run(description)
    run(description)
    assert_same(expected, tmp_path / "out")


def test_killed_in_the_middle_of_a_save(describe, undisturbed, monkeypatch, tmp_path):
    expected = undisturbed()
    save, saves = torch.save, []

    def interrupted(content, file):
        saves.append(content)
        if len(saves) == 3:
            file.write(b"half a state")
            raise Killed
        save(content, file)

    monkeypatch.setattr(torch, "save", interrupted)
    description = describe(steps=STEPS, save_every_seconds=0)
    with pytest.raises(Killed):
        run(description)
    (folder_of(tmp_path / "out") / f"{state.STATE}.tmp").write_bytes(b"half a state")  # nothing tidies after SIGKILL
    run(description)
    assert_same(expected, tmp_path / "out")


@pytest.mark.parametrize("name", ["save", "_measure"])
def test_killed_after_the_last_step(name, describe, undisturbed, monkeypatch, tmp_path):
    expected = undisturbed()

    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(*((running.saving, "save") if name == "save" else (_Trainer, "_measure")), killed)
        with pytest.raises(Killed):
            run(describe(steps=STEPS))
    run(describe(steps=STEPS))
    assert_same(expected, tmp_path / "out")


def test_a_line_of_the_log_that_was_cut_off(describe, undisturbed, kill_at, tmp_path):
    expected = undisturbed()
    kill_at(5)
    with pytest.raises(Killed):
        run(describe(steps=STEPS, save_every_seconds=0))
    with (folder_of(tmp_path / "out") / "log.jsonl").open("a") as log:
        log.write('{"step": 6, "train')
    run(describe(steps=STEPS))
    assert_same(expected, tmp_path / "out")


@pytest.mark.slow
def test_killed_by_the_system(describe, undisturbed, tmp_path):
    settings = {"steps": 40, "method": "lora", "dropout": 0.2, "streaming": True, "evaluate_every": 10}
    expected, output, choice = undisturbed(**settings), tmp_path / "out", random.Random(0)
    description = describe(**settings, save_every_seconds=0)
    config = tmp_path / "config.yaml"
    given = {name: value for name, value in dataclasses.asdict(description).items() if value is not None}
    config.write_text(yaml.safe_dump(json.loads(json.dumps(given))))
    for _ in range(2):
        assert kill_while_training(finetune(config, output), output / "yarn-factor-2", choice).startswith("killed")
    run(description)
    assert_same(expected, output)


def test_a_finished_run_is_left_alone(describe, monkeypatch, tmp_path):
    said = []
    first = run(describe())
    before = {path: path.stat().st_mtime_ns for path in folder_of(tmp_path / "out").rglob("*")}
    monkeypatch.setattr(running, "_load", None)
    again = run(describe(), said.append)
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in folder_of(tmp_path / "out").rglob("*")} == before
    assert any("trained before" in sentence for sentence in said)


def test_another_scheme_trains_alone(describe, monkeypatch, tmp_path):
    run(describe())
    trained = []
    train = _Trainer.train
    monkeypatch.setattr(_Trainer, "train", lambda self: (trained.append(self.task.spec), train(self)))
    outcome = run(describe(schemes=("yarn:factor=2", "pi:factor=2")))
    assert trained == ["pi:factor=2"]
    assert list(outcome.checkpoints) == ["yarn:factor=2", "pi:factor=2"]
    assert [(p.scheme, p.step) for p in outcome.points] == [
        ("plain", 0),
        ("window", 0),
        ("yarn:factor=2", 0),
        ("yarn:factor=2", 4),
        ("pi:factor=2", 0),
        ("pi:factor=2", 4),
    ]


def test_more_steps_than_before(describe, undisturbed, monkeypatch, tmp_path):
    expected = undisturbed(evaluate_every=4)
    run(describe(steps=4))
    description = describe(steps=STEPS)

    # killed between the last measurement and the checkpoint, the old checkpoint must not pass for the new one
    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(running.saving, "save", killed)
        with pytest.raises(Killed):
            run(description)
    run(description)
    assert_same(expected, tmp_path / "out")
    assert running.saving.facts_of(folder_of(tmp_path / "out") / "checkpoint")["step"] == STEPS


def test_fewer_steps_than_before(describe, kill_at):
    kill_at(3)
    with pytest.raises(Killed):
        run(describe(save_every_seconds=0))
    with pytest.raises(running.EvaluationError, match=r"steps=1, but .* is at step 2 already"):
        run(describe(steps=1))


def test_merging_after_the_training(describe, tmp_path):
    run(describe(method="lora"))
    checkpoint = folder_of(tmp_path / "out") / "checkpoint"
    assert (checkpoint / "adapter_config.json").exists()
    run(describe(method="lora", merge=True))
    assert not (checkpoint / "adapter_config.json").exists()
    assert (checkpoint / "model.safetensors").exists()


def test_a_smaller_learning_rate_after_the_loss_was_no_number(describe, monkeypatch, tmp_path):
    reached = run(describe(steps=3, output=str(tmp_path / "three")))
    losses_at = _Trainer._losses_at

    def diverging(trainer, step):
        scale = float("nan") if step == 3 else 1.0
        return (loss * scale for loss in losses_at(trainer, step))

    with monkeypatch.context() as patched:
        patched.setattr(_Trainer, "_losses_at", diverging)
        with pytest.raises(Diverged) as error:
            run(describe(save_every_seconds=0, steps=STEPS))
    folder = folder_of(tmp_path / "out")
    message = str(error.value)
    assert "step 4: the loss is nan" in message
    assert "another learning_rate goes on from step 2" in message  # 3 was never known to be good
    assert str(folder / "checkpoint-last-good") in message
    assert not (folder / "checkpoint").exists()

    outcome = run(describe(learning_rate=1e-4, steps=STEPS))
    assert outcome.points[-1].step == STEPS
    assert log_without_clock(folder)[:2] == log_without_clock(reached.checkpoints["yarn:factor=2"].parent)[:2]
    assert log_without_clock(folder)[2]["learning_rate"] == 1e-4


def test_a_learning_rate_that_ruins_the_weights_at_once(describe):
    with pytest.raises(Diverged, match=r"no state had been saved yet: .* begins anew"):
        run(describe(learning_rate=1e30, save_every_seconds=0))
    outcome = run(describe(save_every_seconds=0))
    assert outcome.points[-1].step == 4


def test_weights_that_are_no_numbers_from_the_start(describe, checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM

    from tests.evaluation.conftest import byte_tokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    byte_tokenizer().save_pretrained(tmp_path / "broken")
    with pytest.raises(Diverged, match=r"step 1: the loss is nan .* the weights came like this"):
        run(describe(model=str(tmp_path / "broken")))


@pytest.mark.parametrize("changed", [{"method": "lora"}, {"length": 48}, {"targets": 4}, {"seed": 1}])
def test_an_output_of_another_description(changed, describe):
    run(describe(steps=1))
    (name, value), before = *changed.items(), vars(describe())
    with pytest.raises(running.EvaluationError, match=f"{name} was {before[name]!r} and is {value!r}"):
        run(describe(steps=1, **changed))


def test_the_state_of_another_model(describe, kill_at, tmp_path):
    kill_at(3)
    with pytest.raises(Killed):
        run(describe(save_every_seconds=0))
    path = folder_of(tmp_path / "out") / state.STATE
    content = torch.load(path)
    content["model"] = {name: value[..., :-1] for name, value in content["model"].items()}
    torch.save(content, path)
    with pytest.raises(running.EvaluationError, match="the state of another model or of another way to train it"):
        run(describe())
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(running.EvaluationError, match="is damaged"):
        run(describe())


def test_other_texts_under_the_same_name(describe, kill_at, texts):
    kill_at(3)
    with pytest.raises(Killed):
        run(describe(save_every_seconds=0))
    (texts / "train.jsonl").write_text('{"text": "' + 60 * "other " + '"}\n')
    with pytest.raises(running.EvaluationError, match="the saved state belongs to other rows"):
        run(describe())


def test_a_full_disk_leaves_the_state_before(describe, kill_at, monkeypatch, tmp_path):
    kill_at(3)
    with pytest.raises(Killed):
        run(describe(save_every_seconds=0))
    path = folder_of(tmp_path / "out") / state.STATE
    before = path.read_bytes()

    def full(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space left") as error:
            run(describe())
    assert error.value.filename == str(path)
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.tmp"))


def test_the_same_whatever_the_caller_drew_before(describe, tmp_path):
    settings = {"method": "lora", "dropout": 0.3}
    outcomes = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        run(dataclasses.replace(describe(**settings), output=str(tmp_path / f"seed{seed}")))
        outcomes.append(weights(tmp_path / f"seed{seed}" / "yarn-factor-2"))
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])
