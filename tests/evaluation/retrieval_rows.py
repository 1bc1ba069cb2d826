from __future__ import annotations

from typing import Any

from rope_patch.evaluation.row import Row


def row(**changed: Any) -> Row:
    fields: dict[str, Any] = {
        "task": "spans",
        "model": "folder/tiny",
        "weights": "w",
        "line": "plain",
        "scheme": {"name": "plain"},
        "regime": "training-free",
        "mount": "none",
        "length": 256,
        "depth": 0.5,
        "training_length": 256,
        "prompt_tokens": 256.0,
        "distance": 100,
        "span": 32,
        "trials": 4,
        "seed": 0,
        "prompts": "p",
        "accuracy": 0.5,
        "exact": 0.0,
        "nll": 1.5,
        "control_accuracy": 0.25,
        "control_exact": 0.0,
        "control_nll": 3.0,
        "seconds": 1.5,
        "dtype": "float32",
        "attention": "sdpa",
        "device": "cpu",
        "versions": {"python": "3"},
        "commit": None,
    }
    return Row(**{**fields, **changed})
