"""Hold Transformers to the vectors here: python vectors/check_vectors.py. `deviations` takes other readers' tables."""

import json
import math
from itertools import chain
from pathlib import Path


def transformers_tables(config, layer_type, positions):  # noqa: D103
    import torch
    from transformers import AutoConfig, AutoModel

    rotary = AutoModel.from_config(AutoConfig.for_model(**config)).rotary_emb
    layer = (layer_type,) if layer_type else ()
    tables = rotary(torch.zeros(1), torch.tensor([positions]), *layer)
    return [table[0, :, : table.shape[-1] // 2].tolist() for table in tables]


def deviations(tables):
    """Name, and the largest errors of a frequency, of the factor (both relative) and of the tables; or an error."""
    for path in sorted(Path(__file__).parent.glob("*.json")):
        vector, worst = json.loads(path.read_text()), [0.0, 0.0, 0.0]
        try:
            for row in vector["rows"]:
                cos, sin = tables(json.loads(json.dumps(vector["config"])), vector["layer_type"], row["positions"])
                for c, s, theta in zip(cos[1], sin[1], row["inv_freq"], strict=True):  # position 1 is a frequency
                    worst[0] = max(worst[0], abs(math.atan2(s, c) - theta) / (theta or 1))
                    worst[1] = max(worst[1], abs(math.hypot(c, s) / row["attention_factor"] - 1))
                for found, wanted in zip(chain(*cos, *sin), chain(*row["cos"], *row["sin"]), strict=True):
                    worst[2] = max(worst[2], abs(found - wanted))
        except Exception as error:
            worst = f"{type(error).__name__}: {error}"
        yield path.stem, worst


if __name__ == "__main__":
    for name, worst in deviations(transformers_tables):
        print(name, worst if isinstance(worst, str) or max(worst) > 1e-4 else "agrees")
