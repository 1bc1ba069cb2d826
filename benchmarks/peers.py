"""What the authors' own code costs, beside the model that it patches and beside ours; peers.md has the figures.

python -m benchmarks.peers FOLDER [repository ...]

FOLDER has a checkout of each repository under its last name (rerope, LongLM, ChunkLlama), and each release of
Transformers that they name, from `pip install --target`, as transformers-4.31.0 and so on.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from transformers import LlamaConfig, LlamaForCausalLM, __version__

from benchmarks.comparison import Shape, Side
from benchmarks.measure import resident_peak

LENGTH, LAYERS, STEPS, ROUNDS = 4096, 2, 8, 3
RESULTS = Path(__file__).parent / "results" / "peers.json"
SIDES = {
    "theirs": "theirs",
    "their model": "its model, unpatched",
    "ours": "ours",
    "our model": "our model, unpatched",
}
Patch = Callable[[LlamaForCausalLM], Any]


class Peer(NamedTuple):
    """A repository of the authors.

    Attributes:
        commit: that was measured.
        transformers: the release that it names.
        scheme: the same for `patch`.
        prepare: loads their code and returns what puts it into a model.
    """

    commit: str
    transformers: str
    scheme: str
    prepare: Callable[[], Patch]


def _rerope() -> Patch:
    importlib.import_module("rerope_patch")
    return lambda model: None


def _self_extend() -> Patch:
    with _stubs("flash_attn", "triton", "triton.language"):  # imported by every path, used by those for GPUs
        apply = importlib.import_module("SelfExtend").apply
    return lambda model: apply(model, group_size=4, window_size=512)


def _chunk_llama() -> Patch:
    with _stubs("flash_attn", "flash_attn.flash_attn_interface"):
        module: Any = importlib.import_module("chunkllama_attn_replace")
    module.flash_attn_func = _flash
    module.replace_with_chunkllama(pretraining_length=2048)
    return lambda model: None


def _flash(*states: torch.Tensor, causal: bool, return_attn_probs: bool) -> tuple[torch.Tensor, torch.Tensor, None]:
    """FlashAttention's call by PyTorch's kernel for CPUs; `(batch, length, heads, head_dim)`."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = flash(*(x.transpose(1, 2) for x in states), is_causal=causal)
    return output.transpose(1, 2), lse, None


@contextmanager
def _stubs(*names: str) -> Iterator[None]:
    """Let packages be imported that are not there."""
    sys.modules.update({name: MagicMock(__spec__=ModuleSpec(name, None), __path__=[]) for name in names})
    yield
    for name in names:
        del sys.modules[name]


PEERS = {
    "bojone/rerope": Peer("acfe78840357a94d0bb504cb8865eeaa752df1a6", "4.31.0", "rerope:window=512", _rerope),
    "datamllab/LongLM": Peer(
        "cdbbb061dc76438c46d7e1ddc500f8e4bf255574", "4.38.2", "self_extend:group_size=4,window=512", _self_extend
    ),
    "HKUNLP/ChunkLlama": Peer(
        "2add4d7c99d24dcc1ab03414cc602abb2e28cf2c", "4.37.2", "dca:chunk_size=1536,local_window=256", _chunk_llama
    ),
}


class Worker:
    """A model in a process of its own, which measures when it is asked."""

    def __init__(self, folder: Path, repository: str, side: str) -> None:
        paths = [Path.cwd()]
        if side in ("theirs", "their model"):
            paths += [folder / f"transformers-{PEERS[repository].transformers}", folder / repository.split("/")[1]]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers", "--worker", repository, side],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: str) -> Any:
        """What it answers: seconds, bytes, logits or a version."""
        print(question, file=self._process.stdin, flush=True)
        return json.loads(next(line for line in self._process.stdout or () if line.startswith("> "))[2:])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def answer(repository: str, side: str) -> None:
    """Measure one side in this process; every line of the input is a question."""
    torch.set_num_threads(1)
    maker = partial(_model, change=_change(repository, side), implementation="eager" if "their" in side else "sdpa")
    run = step = None
    for question in map(str.strip, sys.stdin):
        found: Any = __version__
        if question == "peak":
            found = resident_peak(maker, Shape(LENGTH))[0]
        elif question != "version":
            run = run or maker(Shape(LENGTH)).run
            if question == "decode":
                step = step or _decoding(run)
                found = statistics.median(_cpu_seconds(step) for _ in range(STEPS))
            else:
                found = run().logits[0, ::64, :64].flatten().tolist() if question == "logits" else _cpu_seconds(run)
        print(">", json.dumps(found), flush=True)


def _change(repository: str, side: str) -> Patch:
    if side == "theirs":
        return PEERS[repository].prepare()
    if side == "ours":
        return lambda model: importlib.import_module("rope_patch").patch(model, PEERS[repository].scheme)
    return lambda model: None


@torch.no_grad()
def _model(shape: Shape, change: Patch, implementation: str) -> Side:
    """A forward that leaves a cache; the weights are the same under every release of Transformers."""
    width = shape.heads * shape.head_dim
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2 * LENGTH,  # ChunkLlama scales scores beyond it, as its paper does not
        attn_implementation=implementation,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    for _, weight in sorted(model.named_parameters()):
        if weight.dim() == 2:
            weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)
    change(model)
    text = torch.randint(1, 1024, (1, shape.length), generator=generator)
    call = torch.no_grad()(lambda tokens=text, cache=None: model(tokens, past_key_values=cache, use_cache=True))
    return Side(call)


def _decoding(run: Callable[..., Any]) -> Callable[[], None]:
    cache, token = run().past_key_values, torch.ones(1, 1, dtype=torch.long)

    def step() -> None:
        nonlocal cache
        cache = run(token, cache).past_key_values

    return step


def _cpu_seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measured(folder: Path, repository: str) -> dict[str, Any]:
    """All sides of one repository; each question goes to all in turn."""
    found: dict[str, dict[str, Any]] = {side: {} for side in SIDES}
    for side in SIDES:
        worker = Worker(folder, repository, side)
        found[side]["peak"] = worker.ask("peak")
        worker.close()
    workers = {side: Worker(folder, repository, side) for side in SIDES}
    logits = {}
    for side, worker in workers.items():
        found[side]["transformers"] = worker.ask("version")
        logits[side] = torch.tensor(worker.ask("logits"))
    for question in ("forward", "decode"):
        times = [{side: worker.ask(question) for side, worker in workers.items()} for _ in range(ROUNDS + 1)]
        for side in SIDES:
            found[side][question] = statistics.median(turn[side] for turn in times[1:])  # the first warms up
    for worker in workers.values():
        worker.close()
    apart = {side: (logits[side] - logits["theirs"]).abs().max().item() for side in ("ours", "our model")}
    return {**PEERS[repository]._asdict(), "prepare": None, "sides": found, "largest_difference_of_logits": apart}


def table(rows: dict[str, Any]) -> str:
    """For peers.md."""
    lines = [("code", "what", *SIDES.values(), "theirs / its model", "theirs / ours", "ours / our model")]
    lines += [("---",) * len(lines[0])]
    units = {"forward": ("forward, s", 1.0), "decode": ("decoding, ms", 1e3), "peak": ("peak memory, MiB", 2**-20)}
    for repository, row in rows.items():
        for what, (label, unit) in units.items():
            theirs, model, ours, plain = (row["sides"][side][what] for side in SIDES)
            ratios = (f"{ratio:.2f}x" for ratio in (theirs / model, theirs / ours, ours / plain))
            lines.append((repository, label, *map(_number, (unit * x for x in (theirs, model, ours, plain))), *ratios))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main(folder: str, *repositories: str) -> None:
    """Measure the repositories that are named, or all, and print the table."""
    from benchmarks.machine import facts  # the other processes have a Transformers that this library refuses

    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    for repository in repositories or PEERS:
        rows[repository] = measured(Path(folder).resolve(), repository)
        RESULTS.write_text(json.dumps({"length": LENGTH, "facts": facts("cpu"), "rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        answer(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
