"""What was measured before, during and after the training of a scheme."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.evaluation.results import Row


def point_key(scheme: str, step: int) -> str:
    """What makes two points the same measurement."""
    return f"{scheme} {step}"


@dataclass(frozen=True)
class Point:
    """The loss at every length, after so many steps.

    Attributes:
        scheme: as it was asked for, such as `yarn:factor=auto`.
        step: how many were over; 0 is before the training.
        nll: in nats per token, by context length in tokens.
        training_length: L in tokens.
        scored_tokens: number of targets in each mean.
        documents: that were scored.
        weights: fingerprint of the parameters, which finds the full rows in `perplexity.jsonl`.
    """

    scheme: str
    step: int
    nll: dict[int, float]
    training_length: int
    scored_tokens: int
    documents: int
    weights: str

    @classmethod
    def of(cls, scheme: str, step: int, rows: Sequence[Row]) -> Point:
        """From the rows of one scheme.

        Args:
            scheme: as the description names it.
            step: steps of training before it.
            rows: one for each length.
        """
        first = rows[0]
        return cls(
            scheme,
            step,
            {row.length: row.nll for row in rows},
            first.training_length,
            first.scored_tokens,
            first.documents,
            first.weights,
        )

    def key(self) -> str:
        """What makes two points the same measurement."""
        return point_key(self.scheme, self.step)

    def to_json(self) -> str:
        """One line. A loss that is not finite, which JSON has no word for, becomes null."""
        finite = {length: nll if math.isfinite(nll) else None for length, nll in self.nll.items()}
        return json.dumps({**dataclasses.asdict(self), "nll": finite}, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Point:
        """The point that `to_json` wrote.

        Raises:
            ValueError: when the line is something else.
        """
        fields: Any = json.loads(line)
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or set(fields) != names:
            raise ValueError("not the fields of a point")
        nll = {int(length): math.nan if nll is None else nll for length, nll in fields["nll"].items()}
        return cls(**{**fields, "nll": nll})
