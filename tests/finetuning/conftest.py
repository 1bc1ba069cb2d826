from __future__ import annotations

import json

import pytest

from rope_patch.finetuning.description import FineTuning
from rope_patch.finetuning.run import _Trainer
from tests.evaluation.conftest import TRAINING_LENGTH, byte_tokenizer, checkpoint, documents, tiny_llama  # noqa: F401


class Killed(BaseException):
    """Nothing in the library catches it, as nothing catches SIGKILL."""


def write_texts(folder):
    """Texts to train on, as JSON lines, and to measure on; the same at every call."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(document) for document in documents(70, 40, 90, 55)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "held_out.txt").write_text(documents(80)[0]["text"])
    return folder


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


@pytest.fixture
def describe(checkpoint, texts, tmp_path):  # noqa: F811
    """The smallest fine-tuning, at twice the training length; each test changes what it is about."""

    def make(**changed) -> FineTuning:
        settings = {
            "model": str(checkpoint),
            "schemes": ("yarn:factor=2",),
            "length": 2 * TRAINING_LENGTH,
            "text": str(texts / "train.jsonl"),
            "eval_text": str(texts / "held_out.txt"),
            "targets": 8,
            "steps": 4,
            "batch_size": 2,
            "learning_rate": 1e-3,
            "warmup_steps": 1,
            "log_every": 1,
            "check_memory": False,
            "device": "cpu",
            "output": str(tmp_path / "out"),
        }
        return FineTuning(**{**settings, **changed})

    return make


@pytest.fixture
def kill_at(monkeypatch):
    """Interrupt the next run when it asks for the loss of a step."""

    def arm(step) -> None:
        losses_at = _Trainer._losses_at

        def interrupted(trainer, asked):
            if asked == step:
                monkeypatch.setattr(_Trainer, "_losses_at", losses_at)
                raise Killed
            return losses_at(trainer, asked)

        monkeypatch.setattr(_Trainer, "_losses_at", interrupted)

    return arm


@pytest.fixture
def trained(tmp_path):
    """What runs leave that were given to it: the weights of the checkpoint, log rows and points."""
    from safetensors.torch import load_file

    def read(output, scheme="yarn-factor-2", name="checkpoint"):
        (file,) = (output / scheme / name).glob("*.safetensors")
        return load_file(file)

    return read
