"""What every measurement is told: a model, a text, a device and a folder for what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Generic, TypeVar

from datasets import Dataset
from torch import nn

from rope_patch.errors import EvaluationError
from rope_patch.evaluation import sharing
from rope_patch.evaluation.corpora import text_or_dataset
from rope_patch.evaluation.description import check_types, read_yaml
from rope_patch.evaluation.loading import check_checkpoint, default_checkpoint, load_model
from rope_patch.evaluation.results import Line
from rope_patch.evaluation.specs import REFERENCES, scheme_at
from rope_patch.evaluation.trained import Trained, take_off

M = TypeVar("M", bound="Measurement")
R = TypeVar("R", bound=Line)
T = TypeVar("T")

Say = Callable[[str], None]
"""Is told, in a sentence each, what happens and what the reader of the results should know."""


def silent(_: str) -> None:
    """What a process says that is not the main one."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A description that a YAML file can hold. The fields are its keys.

    Attributes:
        model: checkpoint folder; default the one that comes with the repository.
        text: a .txt, .jsonl or .parquet file, a folder of files, or a pattern; default the held-out modules of Python's
            standard library.
        dataset: a dataset's name or folder instead.
        split: of a dataset.
        column: that holds the text, wherever there are columns.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: `auto` or a name that torch knows.
        attention: `auto` or an attention implementation of Transformers.
        output: folder of the results.
        seed: of whatever is drawn.
    """

    model: str | None = None
    text: str | None = None
    dataset: str | None = None
    split: str | None = None
    column: str = "text"
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    output: str
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        if self.text is not None and self.dataset is not None:
            raise EvaluationError(f"text {self.text!r} and dataset {self.dataset!r}: give one of them")

    @classmethod
    def from_yaml(cls: type[M], path: str | Path) -> M:
        """Read a description.

        Raises:
            EvaluationError: the file is no YAML mapping, or a key or a value is wrong.
            OSError: it cannot be read.
        """
        return read_yaml(cls, path)

    @property
    def checkpoint(self) -> str:
        """The folder or the id that is loaded."""
        return self.model or default_checkpoint()

    @property
    def name(self) -> str:
        """The model, as the rows name it."""
        return self.model or "tiny-llama"

    @property
    def source(self) -> str:
        """The text, for people."""
        return self.text or self.dataset or "the held-out modules of Python's standard library"

    def begin(self, say: Say) -> Say:
        """Refuse what cannot be a checkpoint, and join the other processes where several were started.

        Returns:
            `say` on the main process, and on the others what says nothing.
        """
        check_checkpoint(self.checkpoint)
        sharing.join(self.device)
        return say if sharing.is_main() else silent

    def corpus(self) -> Dataset:
        """The documents, see `text_or_dataset`."""
        return _on_all(lambda: text_or_dataset(self.text, self.dataset, split=self.split, column=self.column))

    def load(self, say: Say) -> tuple[nn.Module, Trained | None]:
        """The model without a scheme, and what it learned under the one that it was saved under."""
        model = _on_all(
            lambda: load_model(self.checkpoint, dtype=self.dtype, device=self.device, attention=self.attention)
        )
        return model, take_off(model, say)


@dataclass(frozen=True)
class SchemesAtLengths(Measurement):
    """A measurement of named schemes at named lengths.

    Attributes:
        lengths: context lengths in tokens, ascending.
        schemes: such as `yarn:factor=auto` or `rerope:window=128+logn`; `plain` and `window` are added in front.
        references: whether `plain` and `window` are added where they are missing.
    """

    lengths: tuple[int, ...]
    schemes: tuple[str, ...] = ()
    _: KW_ONLY
    references: bool = True

    @property
    def lines(self) -> tuple[str, ...]:
        """The schemes in the order of the table, references first."""
        missing = [line for line in REFERENCES if line not in self.schemes] if self.references else []
        return (*missing, *self.schemes)

    def begin(self, say: Say) -> Say:
        """As every measurement does, once all schemes are spelled right."""
        for line in self.lines:
            scheme_at(line, 1, 2**62)  # spelling only: the model is not there yet
        return super().begin(say)


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """The rows of a finished measurement and where they are.

    Attributes:
        rows: in the order of the table.
        results: file of the rows.
        picture: file of the chart; None without matplotlib.
    """

    rows: list[R]
    results: Path
    picture: Path | None


def _on_all(action: Callable[[], T]) -> T:
    """What `action()` gives on this process; what it raises on one of several is raised on all of them."""
    kept: list[T] = []
    sharing.each(lambda _: kept.append(action()), range(sharing.world()))
    return kept[0]
