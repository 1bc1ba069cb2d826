"""Training one model per encoding and seed, and measuring each at every length."""

from __future__ import annotations

import math
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_patch.errors import RopePatchError
from rope_patch.evaluation.nll import chunked_nll
from rope_patch.evaluation.results import LineFile, provenance
from rope_patch.evaluation.texts import Selection
from rope_patch.patching import patch
from rope_patch.schemes import Scheme, get_scheme
from rope_patch.training.comparison import Comparison, Data
from rope_patch.training.loop import (
    draw_crops,
    even_crops,
    make_optimizer,
    next_token_loss,
    read_log,
    train,
)
from rope_patch.training.records import RunRow, claim, fingerprint, open_rows, run_key
from rope_patch.training.state import STATE

RESULTS = "results.jsonl"
_HELD_OUT_CROPS = 64
_WINDOWS_AT_ONCE = 4
"""How many windows are scored in one pass: a bias by content takes memory for every pair of tokens."""


@dataclass(frozen=True)
class Prepared:
    """A comparison with its texts and its output, checked before anything is trained.

    Attributes:
        comparison: what is compared.
        data: the texts.
        settings: what all rows of the output share.
        results: the rows so far.
    """

    comparison: Comparison
    data: Data
    settings: dict[str, Any]
    results: LineFile[RunRow]

    @property
    def output(self) -> Path:
        """The folder of the results."""
        return self.results.path.parent


def prepare(comparison: Comparison) -> Prepared:
    """Check everything that can be known to be wrong before training.

    Raises:
        RopePatchError, OSError: what it is, and what is allowed.
    """
    comparison.schemes()
    data = Data.of(comparison)
    settings = data.settings(comparison)
    output = Path(comparison.output)
    output.mkdir(parents=True, exist_ok=True)
    claim(output, settings)
    results = open_rows(output / RESULTS, settings)
    return Prepared(comparison, data, settings, results)


def compare(prepared: Prepared, say: Callable[[str], None] = lambda _: None, retry: bool = False) -> list[RunRow]:
    """Train and measure what is missing, seed by seed, so that a part of the seeds is a whole comparison.

    An encoding that fails gets rows that say why, and the others go on.

    Args:
        prepared: what to do.
        say: is told, in a sentence each, what was finished.
        retry: whether runs that failed before are made again.

    Returns:
        the rows of this comparison's encodings and seeds.
    """
    comparison = prepared.comparison
    total = len(comparison.encodings) * len(comparison.seeds)
    for number, (seed, spec) in enumerate(
        ((seed, spec) for seed in comparison.seeds for spec in comparison.encodings), start=1
    ):
        missing = [length for length in comparison.lengths if _is_missing(prepared.results, spec, seed, length, retry)]
        if not missing:
            continue
        began = time.monotonic()
        if any(prepared.results.find(run_key(spec, seed, length)) for length in missing):
            shutil.rmtree(run_folder(prepared.output, spec, seed), ignore_errors=True)  # again from the beginning
        rows = run_one(prepared, spec, seed, missing, f"{spec}, seed {seed} ({number}/{total})")
        for row in rows:
            prepared.results.append(row)
        if all(row.failure is None for row in rows):  # else the state is there to be looked at
            (run_folder(prepared.output, spec, seed) / STATE).unlink(missing_ok=True)
        say(f"{number}/{total} {_outcome(rows)} ({time.monotonic() - began:.0f} s)")
    wanted = (
        run_key(spec, seed, length)
        for spec in comparison.encodings
        for seed in comparison.seeds
        for length in comparison.lengths
    )
    return [found for key in wanted if (found := prepared.results.find(key)) is not None]


def run_one(prepared: Prepared, spec: str, seed: int, lengths: list[int], title: str) -> list[RunRow]:
    """Train one model, or go on where its training stopped, and measure it.

    Args:
        prepared: the comparison.
        spec: the encoding as the description names it.
        seed: of the weights and of the batches.
        lengths: to measure at, in bytes.
        title: what the progress bar says.

    Returns:
        a row per length.
    """
    comparison = prepared.comparison
    scheme = get_scheme(spec)
    folder = run_folder(prepared.output, spec, seed)
    if not (folder / STATE).exists():
        shutil.rmtree(folder, ignore_errors=True)  # the log of a run whose state is gone
    folder.mkdir(parents=True, exist_ok=True)
    shared: dict[str, Any] = {
        "encoding": spec,
        "scheme": scheme.to_dict(),
        "slots": sorted(scheme.slots),
        "seed": seed,
        "training_length": comparison.context,
        "documents": prepared.data.selection.documents,
        "windows": len(prepared.data.selection.windows),
        "targets": comparison.targets,
        "protocol": "last",
        "steps": comparison.steps,
        "tokens_seen": comparison.steps * comparison.batch_size * comparison.context,
        "train_nll": math.nan,
        "parameters": 0,
        "encoding_parameters": 0,
        "training_seconds": 0.0,
        "settings": fingerprint(prepared.settings),
        "precision": "float32",
        "device": comparison.device,
        **provenance(),
    }
    try:
        model, positional = build_patched(comparison, scheme, seed)
        shared["parameters"] = sum(p.numel() for p in model.parameters())
        shared["encoding_parameters"] = sum(p.numel() for p in positional)
        seconds = _train(comparison, prepared.data, model, positional, folder, seed, title)
        shared["training_seconds"] = round(seconds, 2)
        shared["train_nll"] = read_log(folder)[-1]["train_nll"]
    except Exception as error:
        failure = _reason(error, folder)
        return [RunRow(**shared, length=length, **_failed(failure)) for length in lengths]
    rows = []
    for length in lengths:
        try:
            nll = score(model, prepared.data.selection, length, comparison.targets, comparison.device)
        except Exception as error:
            rows.append(RunRow(**shared, length=length, **_failed(_reason(error, folder))))
            continue
        mean = nll.double().mean().item()
        if not math.isfinite(mean):
            rows.append(RunRow(**shared, length=length, **_failed(f"the NLL is {mean:g}")))
            continue
        numbers: dict[str, Any] = {"nll": mean, "perplexity": math.exp(min(mean, 700.0)), "scored_tokens": nll.numel()}
        rows.append(RunRow(**shared, length=length, failure=None, **numbers))
    return rows


def build_patched(comparison: Comparison, scheme: Scheme, seed: int) -> tuple[nn.Module, list[nn.Parameter]]:
    """The model of one run, and the parameters that the encoding brought.

    Args:
        comparison: says the size of the model.
        scheme: to mount.
        seed: of the weights.
    """
    model = comparison.build(seed)
    own = {id(parameter) for parameter in model.parameters()}
    patch(model, scheme)
    return model, [parameter for parameter in model.parameters() if id(parameter) not in own]


def batch_at(comparison: Comparison, stream: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """`(batch, L + 1)` on the device: a function of the seed and the step alone.

    Args:
        comparison: says the size of the batch.
        stream: training text, `(bytes,)`.
        seed, step: of the run, and the number of the step.
    """
    random = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return draw_crops(stream, comparison.context, comparison.batch_size, random).long().to(comparison.device)


@torch.no_grad()
def score(model: nn.Module, selection: Selection, length: int, targets: int, device: str) -> torch.Tensor:
    """NLL of the last targets of every window, seen from a context of `length`: `(windows, targets)`.

    Args:
        model: patched.
        selection: the windows.
        length: of the context, in bytes.
        targets: how many are scored in each window.
        device: of the model.
    """
    model.eval()
    tokens = torch.stack([window.context(length) for window in selection.windows])
    parts = [part.to(device) for part in tokens.split(_WINDOWS_AT_ONCE)]
    return torch.cat([chunked_nll(model, part[:, :-1], part[:, -targets:]).cpu() for part in parts])


def run_folder(output: Path, spec: str, seed: int) -> Path:
    """Where one run keeps its log and, until it is finished, its state.

    Args:
        output: folder of the comparison.
        spec: the encoding as the description names it.
        seed: of the run.
    """
    readable = "".join(letter if letter.isalnum() else "_" for letter in spec)
    return output / "runs" / f"{readable}-{fingerprint({'encoding': spec})[:6]}" / f"seed_{seed}"


def log_of(output: Path, spec: str, seed: int) -> list[dict[str, Any]]:
    """The loss curve of one run: the rows of its log.

    Args:
        output, spec, seed: see `run_folder`.
    """
    return read_log(run_folder(output, spec, seed))


def _train(
    comparison: Comparison,
    data: Data,
    model: nn.Module,
    positional: list[nn.Parameter],
    folder: Path,
    seed: int,
    title: str,
) -> float:
    schedule = comparison.schedule(folder, seed)
    crops = even_crops(data.held_out, comparison.context, _HELD_OUT_CROPS).long().to(comparison.device)

    @torch.no_grad()
    def observe(_: int) -> dict[str, Any]:
        parts = crops.split(comparison.batch_size)
        total = sum(next_token_loss(model, part).item() * len(part) for part in parts)
        return {"held_out_nll": round(total / len(crops), 4)}

    model.train()
    return train(
        schedule,
        model,
        make_optimizer(model, schedule, undecayed=positional),
        lambda step: [next_token_loss(model, batch_at(comparison, data.stream, seed, step))],
        observe,
        title,
    )


def _is_missing(results: LineFile[RunRow], spec: str, seed: int, length: int, retry: bool) -> bool:
    row = results.find(run_key(spec, seed, length))
    return row is None or (retry and row.failure is not None)


def _failed(reason: str) -> dict[str, Any]:
    return {"failure": reason, "nll": math.nan, "perplexity": math.nan, "scored_tokens": 0}


def _reason(error: Exception, folder: Path) -> str:
    """The error in a line for the row; what is not of this library also leaves its traceback beside the log.

    Nothing but a full or missing disk is worth stopping the other encodings for.
    """
    if isinstance(error, OSError):
        raise error
    if not isinstance(error, RopePatchError):
        (folder / "error.txt").write_text("".join(traceback.format_exception(error)))
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _outcome(rows: list[RunRow]) -> str:
    first = rows[0]
    cells = ", ".join(f"{row.nll:.3f}" if row.failure is None else "failed" for row in rows)
    lengths = ", ".join(f"{row.length // row.training_length}L" for row in rows)
    reasons = "; ".join(dict.fromkeys(row.failure for row in rows if row.failure))
    return f"{first.encoding}, seed {first.seed}: NLL {cells} at {lengths}" + (f" ({reasons})" if reasons else "")
