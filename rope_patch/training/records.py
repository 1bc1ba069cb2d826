"""Result rows of a comparison, the settings that they share, and what is kept of one cost measurement."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.results import JsonLine, LineFile
from rope_patch.files import written_aside


@dataclass(frozen=True)
class RunRow(JsonLine):
    """One encoding, seed and length.

    Attributes:
        encoding: the scheme as the description names it.
        scheme: all its fields.
        slots: that it fills.
        seed: of the weights and of the batches.
        length: context length of the measurement in bytes.
        training_length: L.
        failure: why there is no number; None where there is one.
        nll: mean negative log-likelihood in nats per byte; NaN where it failed.
        perplexity: exp(nll), per byte.
        scored_tokens, documents, windows, targets: what is in the mean.
        protocol: always `last`.
        steps, tokens_seen: of the training.
        train_nll: of the last batch.
        parameters: of the whole model, those of the encoding included.
        encoding_parameters: those that the encoding brought.
        training_seconds: of all steps.
        settings: fingerprint of what all rows of a table share.
        precision, device: what it was computed with.
        code, versions, commit: see `Row` of `rope_patch.evaluation.results`.
    """

    encoding: str
    scheme: dict[str, Any]
    slots: list[str]
    seed: int
    length: int
    training_length: int
    failure: str | None
    nll: float
    perplexity: float
    scored_tokens: int
    documents: int
    windows: int
    targets: int
    protocol: str
    steps: int
    tokens_seen: int
    train_nll: float
    parameters: int
    encoding_parameters: int
    training_seconds: float
    settings: str
    precision: str
    device: str
    code: str
    versions: dict[str, str]
    commit: str | None

    def key(self) -> str:
        """What makes two rows the same measurement."""
        return run_key(self.encoding, self.seed, self.length)


def run_key(encoding: str, seed: int, length: int) -> str:
    """The key of a row, also of one that is still to be measured.

    Args:
        encoding: as the description names it.
        seed: of the run.
        length: of the measurement, in bytes.
    """
    return json.dumps([encoding, seed, length])


@dataclass(frozen=True)
class CostRow(JsonLine):
    """What a training step costs under one encoding, beside `rope`, timed in turn with it.

    Attributes:
        encoding: the scheme as the description names it.
        failure: why there is no number; None where there is one.
        tokens_per_second: of training, the median over the repetitions.
        relative_speed: tokens per second over those of `rope`, the median of the ratios within a repetition.
        slowest, fastest: quartiles of these ratios.
        repetitions: how many there were.
        memory_bytes: see `memory_kind`.
        relative_memory: over that of `rope`.
        memory_kind: `saved for backward` or `peak allocated`.
        settings, device, threads, code, versions, commit: as in `RunRow`.
    """

    encoding: str
    failure: str | None
    tokens_per_second: float
    relative_speed: float
    slowest: float
    fastest: float
    repetitions: int
    memory_bytes: int
    relative_memory: float
    memory_kind: str
    settings: str
    device: str
    threads: int
    code: str
    versions: dict[str, str]
    commit: str | None

    def key(self) -> str:
        """What makes two rows the same measurement."""
        return self.encoding


def fingerprint(settings: dict[str, Any]) -> str:
    """A short name of the settings that rows share."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings beside the results, or check that those which are there are the same.

    Raises:
        OSError: the folder cannot be written to.
        EvaluationError: the results were made with other settings; the message names the difference.
    """
    path = folder / "settings.json"
    if not path.exists():
        with written_aside(path) as aside:
            aside.write_text(json.dumps(settings, indent=2) + "\n")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise EvaluationError(f"{path} is not JSON ({error}); move the folder or choose another output") from error
    different = [
        f"{name}={found.get(name)!r} there, {settings.get(name)!r} here"
        for name in {**found, **settings}
        if found.get(name) != settings.get(name)
    ]
    if different:
        raise EvaluationError(
            f"{folder} holds results of other settings ({'; '.join(different)}); choose another output, or move it"
        )


def open_rows(path: Path, settings: dict[str, Any]) -> LineFile[RunRow]:
    """The file of result rows.

    Raises:
        OSError, EvaluationError: see `LineFile`; also where a row was made with other settings.
    """
    rows = LineFile(path, RunRow)
    _check_settings(path, [row.settings for row in rows.rows], settings)
    return rows


def open_costs(path: Path, settings: dict[str, Any]) -> LineFile[CostRow]:
    """The file of cost rows.

    Raises:
        OSError, EvaluationError: see `open_rows`.
    """
    rows = LineFile(path, CostRow)
    _check_settings(path, [row.settings for row in rows.rows], settings)
    return rows


def _check_settings(path: Path, found: list[str], settings: dict[str, Any]) -> None:
    if others := set(found) - {fingerprint(settings)}:
        raise EvaluationError(
            f"{path} has rows of settings {', '.join(sorted(others))} beside {fingerprint(settings)}; choose another "
            "output, or move it"
        )
