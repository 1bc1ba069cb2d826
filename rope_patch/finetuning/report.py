"""Losses before, during and after the training, for the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.text import Text

from rope_patch.evaluation.report import NumberTable, cell, check_shared, display_name, length_header
from rope_patch.evaluation.specs import REFERENCES
from rope_patch.finetuning.history import Point


@dataclass(frozen=True)
class Story:
    """All points of a report.

    Attributes:
        points: references first, then scheme by scheme in ascending steps.
        lengths: ascending, in tokens.
        training_length: L in tokens.
    """

    points: tuple[Point, ...]
    lengths: tuple[int, ...]
    training_length: int

    @classmethod
    def of(cls, points: Sequence[Point]) -> Story:
        """Arrange points.

        Raises:
            EvaluationError: see `check_shared`.
        """
        check_shared("points", points, ("training_length", "scored_tokens", "documents"))
        specs = [spec for spec in REFERENCES if any(point.scheme == spec for point in points)]
        specs += [spec for spec in dict.fromkeys(point.scheme for point in points) if spec not in specs]
        ordered = [p for spec in specs for p in sorted(points, key=lambda point: point.step) if p.scheme == spec]
        lengths = sorted({length for point in points for length in point.nll})
        return cls(tuple(ordered), tuple(lengths), points[0].training_length)

    @property
    def schemes(self) -> list[str]:
        """Those that were trained, or will be."""
        trained = [p.scheme for p in self.points if p.scheme not in REFERENCES or p.step]
        return list(dict.fromkeys(trained))

    def before(self, spec: str) -> Point | None:
        """The scheme without training."""
        return next((p for p in self.points if p.scheme == spec and not p.step), None)

    def last(self, spec: str) -> Point | None:
        """The scheme after the most steps."""
        return next((p for p in reversed(self.points) if p.scheme == spec and p.step), None)

    def best(self, length: int, points: Sequence[Point] | None = None) -> float:
        """The lowest loss at a length, of all points or of some; infinite where none is finite."""
        found = (p.nll.get(length, math.inf) for p in points or self.points)
        return min((nll for nll in found if math.isfinite(nll)), default=math.inf)

    def when(self, point: Point) -> str:
        """Where in the training a point stands, for people."""
        if not point.step:
            return "before"
        return f"after {point.step} step{'s' if point.step > 1 else ''}"

    @property
    def note(self) -> str:
        """What was scored."""
        point = self.points[0]
        return f"{point.scored_tokens} targets of {point.documents} held-out documents, the same at every length"


def table(points: Sequence[Point]) -> Group:
    """Schemes by lengths, before, during and after: NLL in nats per token, the best of each column bold and starred.

    Raises:
        EvaluationError: see `Story.of`.
    """
    story = Story.of(points)
    headers = [length_header(length, story.training_length) for length in story.lengths]
    shown = NumberTable({"scheme": 12, "training": 8}, headers)
    best = {n: story.best(n) for n in story.lengths}
    for point in story.points:
        cells = [_styled(point.nll.get(length, math.nan), best[length]) for length in story.lengths]
        shown.add_row(display_name(point.scheme), story.when(point), *cells)
    title = Text(f"NLL in nats per token by context length, L = {story.training_length}", style="bold")
    return Group(title, shown, *(Text(note, style="dim") for note in ("* best of its column", story.note)))


def print_table(points: Sequence[Point], console: Console | None = None) -> None:
    """Print `table(points)`."""
    (console or Console()).print(table(points))


def as_json(points: Sequence[Point]) -> str:
    """The points as JSON."""
    return json.dumps([json.loads(point.to_json()) for point in points], indent=2)


def _styled(nll: float, best: float) -> Text:
    is_best = math.isfinite(nll) and round(nll, 3) == round(best, 3)
    return Text(cell(nll) + ("*" if is_best else " "), style="bold green" if is_best else "")
