"""A protocol that needs text farther back than L: a passage that the window repeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from rope_patch.data.windows import Window, spread
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.protocols.protocol import Context, Protocol, Settings
from rope_patch.evaluation.scheme_specs import NEAR, TRUNCATED
from rope_patch.evaluation.tasks.task import Cell

BEFORE = 32  # tokens of a window before its passage
CUE = 32  # tokens of the copy before the first scored one: from them on a model that copies knows what follows
DEFAULT_TARGETS = 256  # scored tokens of a copy, or what a quarter of L leaves room for
DEFAULT_WINDOWS = 8  # in all documents


class Repeat(Protocol):
    """Append a passage near the start of a window again, and score the copy from its 33rd token.

        x[0], ..., x[31], P, x[p + 32], ..., x[n], P      P = x[32], ..., x[p + 31], p = T + 32

    At every length the passage and the last tokens before its copy are the same; shorter contexts leave out text after
    the passage. Beyond L the passage ends more than L tokens before the first scored prediction, so a model that reads
    L tokens cannot copy it. Two controls under the plain checkpoint show the gain from copying: `near` has the passage
    inside L, and `cut` reads the last L tokens. If neither `near` nor a scheme beats `cut`, the checkpoint cannot copy,
    and the rows mean nothing.

    Raises:
        EvaluationError: a length has no room for passage and copy, or leaves less than L between them.
    """

    protocol = "repeat"
    settings = frozenset({"targets", "windows_per_document"})
    scores = "the copy of a passage"
    sentence = "NLL of {targets} tokens of a passage, repeated at the end of {windows}"
    references: ClassVar[Sequence[str]] = (NEAR, TRUNCATED)
    needed = references
    baseline = TRUNCATED
    shared_targets: ClassVar[str | None] = "targets"

    def __init__(self, asked: Settings, lengths: Sequence[int], training_length: int) -> None:
        super().__init__(asked, lengths, training_length)
        self.targets = asked.targets or min(DEFAULT_TARGETS, max(1, training_length // 4 - CUE))
        self.passage = self.targets + CUE
        front = len(self.prefix) + BEFORE + self.passage
        for length in {*lengths, training_length}:
            least = front + self.passage - 1 if length <= training_length else front + training_length
            if length < least:
                raise EvaluationError(
                    f"length {length}: a passage of {self.passage} tokens and its copy, of which {self.targets} are "
                    f"scored, need a length of {least} {'within' if length <= training_length else 'beyond'} the "
                    f"training length of {training_length}; use other lengths or fewer targets"
                )

    @property
    def chosen_by(self) -> str:
        return str(self.lengths[-1])  # where the passages are

    def places(self, counts: Sequence[int]) -> Sequence[Sequence[tuple[int, int]]]:
        needed = self.lengths[-1] + 1 - len(self.prefix) - self.passage
        return spread(counts, needed, self.passage, self.asked.windows_per_document, DEFAULT_WINDOWS)

    def contexts(self, window: Window, length: int) -> Iterable[tuple[torch.Tensor, int, int]]:
        front, rest = window.tokens[: BEFORE + self.passage], window.tokens[BEFORE + self.passage :]
        left = length + 1 - len(window.prefix) - len(front) - self.passage
        tokens = torch.cat([window.prefix, front, rest[len(rest) - left :], front[BEFORE:]])
        return [(tokens, length - self.targets, length)]

    def control(self, line: str) -> list[Cell]:
        longest, reach = self.lengths[-1], min(self.lengths[-1], self.training_length)
        cell = self._plain_at(reach, self.lengths, line)
        if line == NEAR:
            return [cell]
        items = [self._cut(context) for context in self.cells(longest)[0].items]
        return [replace(cell, items=items, same_as=None)] if longest > reach else []

    def _cut(self, context: Context) -> Context:
        """Truncate a context to its last L tokens."""
        kept = context.tokens[len(context.tokens) - (self.training_length + 1 - len(self.prefix)) :]
        tokens, gone = torch.cat([self.prefix, kept]), context.length - self.training_length
        return replace(context, tokens=tokens, start=context.start - gone, stop=context.stop - gone)
