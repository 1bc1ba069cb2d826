from __future__ import annotations

import pytest

from rope_patch.training.comparison import Comparison
from rope_patch.training.records import RunRow
from tests.evaluation.conftest import documents


@pytest.fixture
def settings(tmp_path):
    """The smallest comparison that trains."""
    for name, lengths in (("train", (300, 200)), ("held_out", (80, 90, 20))):
        folder = tmp_path / name
        folder.mkdir()
        for document in documents(*lengths):
            (folder / f"{document['name']}.txt").write_text(document["text"])
    return {
        "encodings": ("rope", "alibi"),
        "output": str(tmp_path / "out"),
        "train_text": str(tmp_path / "train"),
        "held_out_text": str(tmp_path / "held_out"),
        "context": 16,
        "multiples": (1, 2, 4),
        "targets": 8,
        "windows_per_document": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "layers": 2,
        "heads": 2,
        "batch_size": 2,
        "steps": 3,
        "warmup_steps": 1,
        "decay_steps": 1,
        "evaluate_every": 1,
        "save_every_seconds": 0,
        "cost_repetitions": 1,
    }


@pytest.fixture
def comparison(settings):
    return Comparison(**settings)


def row(encoding="rope", seed=0, length=16, nll=1.0, **changed) -> RunRow:
    """A row as a run would write it."""
    fields = {
        "encoding": encoding,
        "scheme": {"name": encoding},
        "slots": ["frequencies"],
        "seed": seed,
        "length": length,
        "training_length": 16,
        "failure": None,
        "nll": nll,
        "perplexity": 2.0,
        "scored_tokens": 32,
        "documents": 2,
        "windows": 4,
        "targets": 8,
        "protocol": "last",
        "steps": 3,
        "tokens_seen": 96,
        "train_nll": 5.0,
        "parameters": 1000,
        "encoding_parameters": 0,
        "training_seconds": 0.1,
        "settings": "s",
        "precision": "float32",
        "device": "cpu",
        "code": "c",
        "versions": {},
        "commit": None,
    }
    return RunRow(**{**fields, **changed})
