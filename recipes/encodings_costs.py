"""Time a training step of every encoding in turn with one of rope, and sum the memory that it takes.

    rope-patch compare recipes/configs/compare.yaml --costs
    python recipes/encodings_costs.py recipes/configs/compare.yaml

Model, batches and optimizer are those of `compare_encodings.py`, whose options this script has. Both models take their
steps in turn in one process, so that whatever else the machine does slows both; the ratio of the two times is taken
within each turn. Memory is what autograd keeps between the two passes, because the CPU's allocator counts no peak.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rope_patch.cli.options import load_recipe, run, say

compare = load_recipe("compare_encodings")
Options = compare.Options


def main(options: Any) -> None:
    """Time the encodings that have no row yet."""
    options.costs = True
    compare.main(options)


def measure(encodings: Sequence[str], stream: Any, options: Any) -> None:
    """Append a row to `costs.jsonl` for each of these encodings that has none."""
    path = Path(options.output) / "costs.jsonl"
    for spec in encodings:
        if spec not in {row["encoding"] for row in compare.read(path)}:
            compare.append(path, row := cost_of(spec, stream, options))
            say(f"{spec}: {row['relative_speed']:.2f}x the speed of rope, {row['relative_memory']:.2f}x its memory")


def cost_of(spec: str, stream: Any, options: Any) -> dict[str, Any]:
    """The row of one encoding: medians of the ratios to rope, with their quartiles."""
    import torch

    from rope_patch.evaluation.row import provenance

    def forward(model: Any, step: int) -> torch.Tensor:
        batch = torch.utils.data.default_collate(compare.draw(stream, 0, step, options))
        return compare.loss_of(model(batch["input_ids"].to(options.device)), batch["labels"].to(options.device))

    built = [compare.build(name, 0, options) for name in ("rope", spec)]
    sides = [(model, compare.make_optimizer(model, learned, options)) for model, learned in built]
    times: list[list[float]] = []
    for step in range(2 + options.cost_repetitions):
        times.append([])
        for model, optimizer in sides:
            began = time.perf_counter()
            forward(model, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            next(model.parameters()).sum().item()  # waits for an accelerator
            times[-1].append(time.perf_counter() - began)
    turns = times[2:]  # the first two warm up
    slowest, speed, fastest = statistics.quantiles([rope / own for rope, own in turns], n=4, method="inclusive")
    of_rope, kept = (kept_for_backward(model, lambda model=model: forward(model, 0)) for model, _ in sides)
    return {
        "encoding": spec,
        "tokens_per_second": options.batch_size * options.context / statistics.median(own for _, own in turns),
        "relative_speed": speed,
        "slowest": slowest,
        "fastest": fastest,
        "repetitions": len(turns),
        "memory_bytes": kept,
        "relative_memory": kept / of_rope,
        "device": options.device,
        "threads": torch.get_num_threads(),
        **provenance(),
    }


def kept_for_backward(model: Any, forward: Callable[[], Any]) -> int:
    """Bytes that autograd keeps between a forward pass and its backward pass, every storage once, without weights."""
    import torch

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward()  # while it lives, no address is used twice
    del loss
    return sum(kept.values())


if __name__ == "__main__":
    run(Options, main)
