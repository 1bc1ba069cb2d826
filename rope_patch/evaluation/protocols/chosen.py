"""Protocols that score only some of the last tokens. `far` scores tokens that repeat a passage far back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.protocols.last import Last
from rope_patch.evaluation.protocols.protocol import Context, Settings, blocks
from rope_patch.evaluation.scheme_specs import TRUNCATED


class Chosen(Last):
    """Like `last`, but it scores some of the targets of each window, the same ones at every length; the other targets
    are a second column.

    Windows have different numbers of chosen tokens, so `nll_by_document` is linear in their sums: with n[w] tokens of
    loss s[w] in block w of B, it holds nll + (s[w] - nll n[w]) B / sum n. The mean of these values is nll, and s /
    sqrt(B) is the error of a ratio, also for differences of two rows.
    """

    baseline: ClassVar[str] = TRUNCATED

    def chosen(self, window: int) -> torch.Tensor:
        """A boolean `(targets,)`, true for the targets of a window that count."""
        raise NotImplementedError

    @property
    def chosen_by(self) -> str:
        return str(self.lengths[-1])

    def row(self, fields: dict[str, Any], items: Sequence[Context], scores: Sequence[torch.Tensor]) -> dict[str, Any]:
        masks = [self.chosen(item.window) for item in items]
        chosen = [losses[mask] for losses, mask in zip(scores, masks, strict=True)]
        others = [losses[~mask] for losses, mask in zip(scores, masks, strict=True)]
        row = super().row(fields, items, chosen)
        count, total = row["scored_tokens"], sum(map(len, masks))
        by_block = [torch.cat(list(block)) for block in blocks(items, chosen)]
        each = max(1, count) / len(by_block)
        return row | {
            "chosen_share": count / total,
            "others_nll": self.mean(others),
            "nll_by_document": [round(row["nll"] + (block - row["nll"]).sum().item() / each, 6) for block in by_block],
        }


class Far(Chosen):
    """Score the tokens that end an n-gram which the text last had more than L tokens back.

        x[p] counts if the last n-gram x[q - 2], x[q - 1], x[q] = x[p - 2], x[p - 1], x[p] before it has p - q > L

    n = 3, and q lies within the context of the longest length. The protocol needs no other model, but the share of
    tokens that it finds depends on the text: 1 to 12 percent in novels, speeches and code, and far more if a text
    repeats whole files.

    Raises:
        EvaluationError: no length is more than L.
    """

    protocol = "far"
    scores = "the last tokens of windows"
    sentence = "NLL of those of the last {targets} tokens of {windows} that end a 3-gram last seen more than L back"

    def __init__(self, asked: Settings, lengths: Sequence[int], training_length: int) -> None:
        super().__init__(asked, lengths, training_length)
        if lengths[-1] <= training_length:
            raise EvaluationError(
                f"length {lengths[-1]}: protocol 'far' needs a length of more than the training length of "
                f"{training_length}"
            )

    def chosen(self, window: int) -> torch.Tensor:
        return repeats_far(self.selection.windows[window].tokens, self.training_length)[-self.targets :]


def repeats_far(tokens: torch.Tensor, distance: int, n: int = 3) -> torch.Tensor:
    """A boolean `(tokens,)`, true for tokens that end an n-gram whose last occurrence ended more than `distance` tokens
    before.
    """
    ids, far = tokens.tolist(), torch.zeros(len(tokens), dtype=torch.bool)
    last: dict[tuple[int, ...], int] = {}
    for place in range(n - 1, len(ids)):
        gram = tuple(ids[place - n + 1 : place + 1])
        far[place] = place - last.get(gram, place) > distance
        last[gram] = place
    return far
