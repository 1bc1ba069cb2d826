from __future__ import annotations

import math
from typing import Any

from rope_patch.evaluation.row import Row


def row(**changed: Any) -> Row:
    nll = changed.get("nll", 2.0)
    fields: dict[str, Any] = {
        "model": "folder/tiny",
        "weights": "w",
        "line": "plain",
        "scheme": {"name": "plain"},
        "regime": "training-free",
        "mount": "none",
        "protocol": "last",
        "length": 256,
        "training_length": 256,
        "targets": 128,
        "documents": 12,
        "windows": 12,
        "short_documents": 0,
        "texts": "t",
        "scored_tokens": 12 * 128,
        "nll": nll,
        "perplexity": math.exp(min(nll, 700)),
        "seconds": 1.5,
        "tokens_per_second": 100.0,
        "dtype": "float32",
        "attention": "sdpa",
        "device": "cpu",
        "seed": 0,
        "versions": {"python": "3"},
        "commit": None,
    }
    return Row(**{**fields, **changed})
