"""Positions of short rows, drawn from the range of a longer text: the training of Randomized YaRN.

A row of l tokens gets a random subset of l positions of {0, ..., L_t - 1}, in ascending order; all subsets are equally
likely. L_t, the range, grows during the training from the length of the rows to the target, such as 8K, 10K, 12K, 16K
and 16K in five epochs on rows of up to 8K. Frequencies are YaRN's, with the factor of the target. Later texts are read
with consecutive positions.

Source: Mehta, Yin and Durrett 2026, "Randomized YaRN Improves Length Generalization for Long-Context Reasoning",
arXiv 2606.23687; without the curriculum its gain is smaller. The formula and the ranges come from a summary of the
paper; no code of the authors was found. Ruoss et al. 2023, "Randomized Positional Encodings Boost Length Generalization
of Transformers", arXiv 2305.16843, drew positions first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from rope_patch.data.placing import PlacingCollator, Row
from rope_patch.errors import EvaluationError

NUMBER = "row_number"
"""The column that `numbered` adds."""


def curriculum(length: int, target_length: int) -> tuple[int, ...]:
    """The ranges of positions for five equal parts of a training: the rows' own length, a quarter and a half of the way
    to the target, and the target in the last two parts.

    Args:
        length: length of the rows in tokens.
        target_length: length of later texts in tokens.
    """
    beyond = target_length - length
    return length, length + beyond // 4, length + beyond // 2, target_length, target_length


def numbered(rows: Any, number: int, seed: int = 0) -> Any:
    """Put the rows of a whole training into their training order, with their places in a column `row_number`.

    Train on them in this order: `TrainingArguments(train_sampling_strategy="sequential", remove_unused_columns=False)`.

    Args:
        rows: a dataset of Transformers' `datasets`, or a stream, which keeps its order.
        number: number of rows in the whole training, steps times batch size; a dataset is repeated until it has so
            many.
        seed: seed of the order of a dataset.
    """
    from datasets import Dataset, concatenate_datasets

    if not isinstance(rows, Dataset):
        return rows.map(lambda _, place: {NUMBER: place}, with_indices=True)
    rows = rows.shuffle(seed=seed).flatten_indices()  # without indices, what follows copies nothing
    rows = rows.repeat(-(-number // len(rows))).take(number)
    return concatenate_datasets([rows, Dataset.from_dict({NUMBER: range(number)})], axis=1)


@dataclass(frozen=True)
class RandomizedCollator(PlacingCollator):
    """A data collator that pads rows on the right, and gives each row a random subset of the positions of a range, in
    ascending order. The range grows in equal parts of the training.

    The draw depends only on the seed, the tokens of a row and its number: neither workers nor a resumed run change it.
    The batch always has an `attention_mask`: without it every skip would count as the start of another document.
    """

    position_ranges: tuple[
        int, ...
    ]  # one more than the highest position in each part; rows of `numbered` if there are several
    rows: int = 0  # number of rows in the whole training, if there are several ranges
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.position_ranges or min(self.position_ranges) < 1:
            raise EvaluationError(
                f"position_ranges={self.position_ranges} is not allowed; it must be one or more lengths in tokens"
            )
        if self.rows < 1 < len(self.position_ranges):
            raise EvaluationError(f"rows={self.rows} is not allowed; give the number of rows in the whole training")

    def __call__(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Collate rows and draw their positions; for pads and labels see `PlacingCollator`.

        Raises:
            EvaluationError: see `PlacingCollator`, or a row has no number although there are several ranges, or rows
                come in another order.
        """
        if len(self.position_ranges) > 1:
            _check_order([row.get(NUMBER) for row in rows])
        return super().__call__(rows)

    def _place(self, ids: torch.Tensor, row: Row) -> torch.Tensor:
        number, last = int(row.get(NUMBER, 0)), len(self.position_ranges) - 1
        part = min(number * len(self.position_ranges) // self.rows, last) if last else 0
        self._room(ids, position_range=self.position_ranges[part])
        generator = self._generator(ids, *([number] if NUMBER in row else []))
        return torch.randperm(self.position_ranges[part], generator=generator)[: len(ids)].sort().values


def _check_order(numbers: list[Any]) -> None:
    if None in numbers:
        raise EvaluationError(
            f"several position_ranges need a {NUMBER} for each row; train on numbered(dataset, steps * batch_size), "
            "with remove_unused_columns=False"
        )
    # where the number of rows is no multiple of a batch's, accelerate fills the last batch with the first rows
    if sum(one >= other for one, other in pairwise(numbers)) > 1:
        raise EvaluationError(
            f"rows come in the order {numbers}; a curriculum needs theirs: train_sampling_strategy='sequential'"
        )
