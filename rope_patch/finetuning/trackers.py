"""Trackers that accelerate knows, told what the log is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    get_available_trackers,
)

from rope_patch.errors import EvaluationError, did_you_mean
from rope_patch.evaluation.sharing import is_main


def check(names: Sequence[str]) -> None:
    """Refuse trackers before anything is computed.

    Raises:
        EvaluationError: accelerate does not know one, or its package is not installed.
    """
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise EvaluationError(f"report_to={name!r}: {did_you_mean(name, map(str, LOGGER_TYPE_TO_CLASS))}")
        if name not in get_available_trackers():
            raise EvaluationError(f"report_to={name!r}: its package is not installed")


class Trackers:
    """The trackers of one run, in a `with` statement; none on other processes than the main one.

    Args:
        names: such as `tensorboard`.
        folder: of the run, whose name becomes the name of the run there.
        settings: shown beside the curves.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: dict[str, Any]) -> None:
        self._names = names if is_main() else ()
        self._folder, self._settings = folder, {key: _plain(value) for key, value in settings.items()}
        self._trackers: list[GeneralTracker] = []

    def __enter__(self) -> Trackers:
        for name in self._names:
            kind = LOGGER_TYPE_TO_CLASS[name]
            places = {"logging_dir": str(self._folder)} if kind.requires_logging_directory else {}
            tracker = kind(self._folder.name, **places)
            self._trackers.append(tracker)
            tracker.start()
            tracker.store_init_configuration(self._settings)
        return self

    def __exit__(self, *_: object) -> None:
        """Write what is still to be written, also of a run that failed."""
        while self._trackers:
            self._trackers.pop().finish()

    def log(self, row: dict[str, Any]) -> None:
        """One row of the log; losses by length as `nll/1024`."""
        values = {name: value for name, value in row.items() if name not in ("step", "nll")}
        values |= {f"nll/{length}": nll for length, nll in row.get("nll", {}).items()}
        for tracker in self._trackers:
            tracker.log(values, step=row["step"])


def _plain(value: Any) -> Any:
    """Trackers take numbers and texts."""
    return value if isinstance(value, int | float | str | bool) else str(value)
