"""Hold the rotary functions of three more readers to the vectors: rows of docs/results/serving/more_readers.jsonl.

    python -m benchmarks.more_readers transformers4 --output FILE     # in an environment with transformers 4.57
    python -m benchmarks.more_readers exllamav3 --output FILE --sources FOLDER
    python -m benchmarks.more_readers mlx-vlm --output FILE --sources FOLDER

FOLDER is the package as its wheel has it, such as `pip download --no-deps exllamav3`, unpacked. Of exllamav3 and
mlx-vlm only the Python that computes frequencies runs, so neither a GPU nor their other requirements are needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.machinery import SourceFileLoader
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from benchmarks.readers import check_vectors

Tables = list[list[list[float]]]


def main() -> None:
    """Append a row for each vector that the reader's functions can be given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", choices=["transformers4", "exllamav3", "mlx-vlm"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sources", type=Path, help="the folder that contains the package")
    arguments = parser.parse_args()
    sources = arguments.sources
    if (sources is None) != (arguments.reader == "transformers4"):
        parser.error("--sources goes with exllamav3 and mlx-vlm")

    def tables(config: dict[str, Any], layer_type: str, positions: list[int]) -> Tables:
        if arguments.reader == "transformers4":
            return transformers4_tables(config, positions)
        if arguments.reader == "exllamav3":
            return exllamav3_tables(config, positions, sources)
        return mlx_vlm_tables(config, layer_type, positions, sources)

    left_out = {"transformers4": ("partial", "nested"), "exllamav3": ("nested",), "mlx-vlm": ()}[arguments.reader]
    for vector, worst in check_vectors().deviations(tables):
        if vector.startswith(left_out):
            continue  # the model's class reads these, not the functions
        agrees = not isinstance(worst, str) and max(worst) < 1e-4
        row = {"reader": named(arguments.reader, sources), "vector": vector, "agrees": agrees, "errors": worst}
        print(*row.values(), sep="  ")
        with arguments.output.open("a") as file:
            file.write(json.dumps(row) + "\n")


def named(reader: str, sources: Path | None) -> str:
    """The program and its version."""
    if sources is None:
        return f"Transformers {version('transformers')}"
    (wheel,) = sources.glob(f"{reader.replace('-', '_')}-*.dist-info")
    return f"{reader} {wheel.stem.rpartition('-')[2]}"


def transformers4_tables(config: dict[str, Any], positions: list[int]) -> Tables:
    """cos and sin, `(positions, d/2)`, by Transformers 4, given its own words, as an export writes them."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    entry = config.pop("rope_parameters", None)
    if entry is not None:
        older = {"rope_scaling": {"type": entry["rope_type"], **entry}, "rope_theta": entry["rope_theta"]}
        config = {"partial_rotary_factor": entry.get("partial_rotary_factor", 1.0), **older, **config}
    read = LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"})
    scaling = read.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](read, "cpu", seq_len=positions[-1] + 1)
    return _tables(inv_freq, factor, positions)


def exllamav3_tables(config: dict[str, Any], positions: list[int], sources: Path) -> Tables:
    """cos and sin by exllamav3's `RoPE`, without its compiled extension."""
    for name in ("exllamav3", "exllamav3.util", "exllamav3.model"):
        package: Any = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = [str(sources / name.replace(".", "/"))]
        package.Timer = package.profile_opt = MagicMock()
    extension: Any = sys.modules.setdefault("exllamav3.ext", ModuleType("exllamav3.ext"))
    extension.exllamav3_ext = MagicMock()
    from exllamav3.model.config import Config
    from exllamav3.util.rope import RoPE, RopeStyle

    holder = SimpleNamespace(config_dict=config, head_dim=config["head_dim"])
    rope = RoPE("cpu", Config.read_rope_settings_default(holder, RopeStyle.NEOX))
    return _tables(rope.inv_freq, rope.attn_factor, positions)


def mlx_vlm_tables(config: dict[str, Any], layer_type: str, positions: list[int], sources: Path) -> Tables:
    """cos and sin by mlx-vlm's `initialize_rope`, given the entry of the layer type."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    functions = SourceFileLoader("rope_utils", str(sources / "mlx_vlm/models/rope_utils.py")).load_module()
    entry = config.get("rope_parameters") or {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
    entry = entry[layer_type] if layer_type else entry
    share = 1.0 if entry.get("rope_type") == "proportional" else entry.get("partial_rotary_factor", 1.0)
    width, length = int(config["head_dim"] * share), positions[-1] + 1
    rope = functions.initialize_rope(width, entry["rope_theta"], False, entry, config["max_position_embeddings"])
    ones = mx.concatenate([mx.ones((1, 1, length, width // 2)), mx.zeros((1, 1, length, width // 2))], axis=-1)
    rotated = rope(ones, offset=0)[0, 0].tolist()
    rows = [rotated[position] for position in positions]
    return [[row[: width // 2] for row in rows], [row[width // 2 :] for row in rows]]


def _tables(inv_freq: Any, factor: float, positions: list[int]) -> Tables:
    import torch

    angles = torch.outer(torch.tensor(positions).float(), inv_freq.float())
    return [(angles.cos() * factor).tolist(), (angles.sin() * factor).tolist()]


if __name__ == "__main__":
    main()
