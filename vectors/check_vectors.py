"""Hold Transformers to the vectors here: python vectors/check_vectors.py. `deviations` takes other readers' tables."""

import json
import math
from itertools import chain
from pathlib import Path

INDEX = json.loads(Path(__file__).with_name("index.json").read_text())


def transformers_tables(config, layer_type, positions):  # noqa: D103
    import torch
    import transformers as hf

    model, ids = hf.AutoModel.from_config(hf.AutoConfig.for_model(**config)), torch.tensor([positions]).transpose(0, -2)
    tables = getattr(model, "language_model", model).rotary_emb(torch.zeros(1), ids, *layer_type.split())
    return [table[0, :, : table.shape[-1] // 2].tolist() for table in tables]


def deviations(tables):
    """Name, and the largest errors of a frequency, of the factor (both relative) and of the tables; or an error."""
    for entry in INDEX["vectors"]:
        vector, off = json.loads(Path(__file__).with_name(entry["file"]).read_text()), ([0.0], [0.0], [0.0])
        try:
            for row in vector["rows"]:
                cos, sin = tables(json.loads(json.dumps(vector["config"])), vector["layer_type"], row["positions"])
                steps = list(zip(cos[1], sin[1], row["inv_freq"], strict=True))  # position 1 turns by a frequency
                off[0].extend(abs(math.atan2(s, c) - theta) / (theta or 1) for c, s, theta in steps)
                off[1].extend(abs(math.hypot(c, s) / row["attention_factor"] - 1) for c, s, theta in steps)
                slack, both = max(1, row["length"] / 256), (chain(*cos, *sin), chain(*row["cos"], *row["sin"]))
                off[2].extend(abs(found - wanted) / slack for found, wanted in zip(*both, strict=True))
            yield entry["name"], [math.inf if any(map(math.isnan, each)) else max(each) for each in off]
        except Exception as error:
            yield entry["name"], f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    bad = {name: off for name, off in deviations(transformers_tables) if isinstance(off, str) or max(off) > 1e-4}
    print(*bad.items(), f"vectors {INDEX['version']}: {len(bad)} of {len(INDEX['vectors'])} deviate", sep="\n")
    raise SystemExit(int(any("Transformers" not in each["known"] for each in INDEX["vectors"] if each["name"] in bad)))
