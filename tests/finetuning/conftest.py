from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from rope_patch.evaluation import charts
from tests.evaluation.conftest import TRAINING_LENGTH, byte_tokenizer, documents, tiny_llama
from tests.recipes import run_recipe

SCHEME = "yarn:factor=2"


def words_of(options):
    """A command line of these options."""
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [word for each in (value if name == "scheme" else [value]) for word in (flag, str(each))]
    return words


def checkpoint_of(options, scheme=SCHEME):
    return options["output"] / "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in scheme)


def weights(options, scheme=SCHEME, name="checkpoint"):
    (file,) = (checkpoint_of(options, scheme) / name).glob("*.safetensors")
    return load_file(file)


def rows(options, name="finetune.jsonl"):
    """Rows as they are on disk, without how long they took."""
    written = [json.loads(line) for line in (options["output"] / name).read_text().splitlines()]
    return [{key: row[key] for key in row if key not in ("seconds", "tokens_per_second")} for row in written]


def losses(options, scheme=SCHEME):
    (state,) = (checkpoint_of(options, scheme) / "trainer").glob("checkpoint-*/trainer_state.json")
    return [row["loss"] for row in json.loads(state.read_text())["log_history"] if "loss" in row]


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """A checkpoint, texts to train on as JSON lines, and one to measure on."""
    folder = tmp_path_factory.mktemp("finetuning")
    tiny_llama().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    lines = [json.dumps(document) for document in documents(70, 40, 90, 55)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "held_out.txt").write_text(documents(80)[0]["text"])
    return folder


@pytest.fixture
def options(given, tmp_path):
    """The smallest fine-tuning, at twice the training length; each test changes what it is about."""

    def make(**changed):
        settings = {
            "model": given / "model",
            "scheme": [SCHEME],
            "length": 2 * TRAINING_LENGTH,
            "text": given / "train.jsonl",
            "eval_text": given / "held_out.txt",
            "targets": 8,
            "steps": 4,
            "batch_size": 2,
            "learning_rate": 1e-3,
            "warmup_steps": 1,
            "log_every": 1,
            "device": "cpu",
            "output": tmp_path / "out",
        }
        return {name: value for name, value in {**settings, **changed}.items() if value is not None}

    return make


@pytest.fixture
def finetune(options, monkeypatch):
    """Run the recipe, without its picture, and give its options back."""
    monkeypatch.setattr(charts, "save", lambda *_, **__: None)

    def run(status=0, **changed):
        chosen = options(**changed)
        assert run_recipe("finetune", words_of(chosen)) == status
        return chosen

    return run
