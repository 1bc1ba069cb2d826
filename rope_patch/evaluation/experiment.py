"""One perplexity measurement from a description of it: what the command line and the recipe share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.errors import CorpusError, EvaluationError
from rope_patch.evaluation import chart, sharing
from rope_patch.evaluation.corpora import load_corpus
from rope_patch.evaluation.description import check_at_least, check_types, read_yaml
from rope_patch.evaluation.loading import check_checkpoint, default_checkpoint, load_model, load_tokenizer
from rope_patch.evaluation.perplexity import measure
from rope_patch.evaluation.protocols import Request, check_request
from rope_patch.evaluation.results import ResultFile, Row
from rope_patch.evaluation.specs import REFERENCES, scheme_at
from rope_patch.evaluation.trained import Trained
from rope_patch.patch import find_handle, unpatch


@dataclass(frozen=True)
class Experiment:
    """What to measure, on what, and where the results go. The fields are the keys of the YAML.

    Attributes:
        lengths: context lengths in tokens, ascending.
        schemes: such as `yarn:factor=auto` or `rerope:window=128+logn`; `plain` and `window` are added in front.
        model: checkpoint folder; default the one that comes with the repository.
        text: a text file or a folder of them; default the held-out modules of Python's standard library.
        dataset: a dataset's name or folder instead, with its `split` and the `column` that holds the text.
        protocol: `last`, `by_position`, `span_corruption`, `sliding`, `disjoint`, `yarn_compat` or `yarn_truncate`;
            `auto` chooses `last` or `span_corruption` by the model.
        targets: T, scored tokens per window; default min(L, 4096).
        stride: S of `sliding` and `yarn_compat`, in tokens; default 256.
        tokens_per_document: where whole documents are scored, how many tokens of each; default all.
        documents: how many documents; default all.
        windows_per_document: how many places in each document are scored.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: `auto` or a name that torch knows.
        attention: `auto` or an attention implementation of Transformers.
        output: folder of `perplexity.jsonl` and `perplexity.png`.
        seed: of the draw of documents.
        references: whether `plain` and `window` are added where they are missing.
    """

    lengths: tuple[int, ...]
    schemes: tuple[str, ...] = ()
    model: str | None = None
    text: str | None = None
    dataset: str | None = None
    split: str | None = None
    column: str = "text"
    protocol: str = "auto"
    targets: int | None = None
    stride: int | None = None
    tokens_per_document: int | None = None
    documents: int | None = None
    windows_per_document: int = 1
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    output: str = "runs/perplexity"
    seed: int = 0
    references: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        if self.text is not None and self.dataset is not None:
            raise EvaluationError(f"text {self.text!r} and dataset {self.dataset!r}: give one of them")
        check_at_least(self, 1, "documents", "windows_per_document", "stride", "tokens_per_document")

    @classmethod
    def from_yaml(cls, path: str | Path) -> Experiment:
        """Read a description.

        Raises:
            EvaluationError: the file is no YAML mapping, or a key or a value is wrong.
            OSError: it cannot be read.
        """
        return read_yaml(cls, path)

    @property
    def lines(self) -> tuple[str, ...]:
        """The schemes in the order of the table, references first."""
        missing = [line for line in REFERENCES if line not in self.schemes] if self.references else []
        return (*missing, *self.schemes)

    @property
    def source(self) -> str:
        """The text, for people."""
        return self.text or self.dataset or "the held-out modules of Python's standard library"

    @property
    def request(self) -> dict[str, Any]:
        """What is asked of the protocol, as `check_request` and `measure` take it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Request)}

    @property
    def checkpoint(self) -> str:
        """The folder or the id that is loaded."""
        return self.model or default_checkpoint()


@dataclass(frozen=True)
class Outcome:
    """The rows of a finished experiment and where they are."""

    rows: list[Row]
    results: Path
    picture: Path


def _silence(_: str) -> None:
    """What a process says that is not the main one."""


def run(experiment: Experiment, say: Callable[[str], None] = _silence) -> Outcome:
    """Measure, writing every row to disk as it comes, and draw the chart. Started again, it goes on where it stopped.

    Started by `torchrun` or `accelerate launch`, the processes divide the windows; the main one writes and speaks.

    Args:
        experiment: what to measure.
        say: is told, in a sentence each, what happens and what the reader of the results should know.

    Raises:
        RopePatchError, OSError: something is wrong with the description, the checkpoint, the text or the output
            folder; whatever can be known before the model is loaded is raised before.
    """
    checkpoint = experiment.checkpoint
    check_checkpoint(checkpoint)
    check_request(**experiment.request)
    for line in experiment.lines:
        scheme_at(line, 1, 2**62)  # spelling only: the model is not there yet
    sharing.join(experiment.device)
    if not sharing.is_main():
        say = _silence
    path = Path(experiment.output) / "perplexity.jsonl"
    results = sharing.only_main(lambda: ResultFile(path))
    lengths = ", ".join(map(str, experiment.lengths))
    say(f"measuring {len(experiment.lines)} schemes at {lengths} tokens on {experiment.source}")
    corpus = _corpus(experiment)
    model = load_model(checkpoint, dtype=experiment.dtype, device=experiment.device, attention=experiment.attention)
    trained = None
    if (handle := find_handle(model)) is not None:
        say(f"the checkpoint was saved under {handle.scheme}; it is measured without, unless a line names the scheme")
        trained = Trained.under(handle)
        unpatch(model)
    rows = measure(
        model,
        load_tokenizer(checkpoint),
        corpus,
        experiment.lines,
        **experiment.request,
        name=experiment.model or "tiny-llama",
        results=results,
        trained=trained,
    )
    picture = sharing.on_main(lambda: chart.save(rows, path.with_suffix(".png")))
    return Outcome(rows, path, picture)


def _corpus(experiment: Experiment) -> Any:
    if experiment.text is not None:
        if not Path(experiment.text).exists():
            raise CorpusError(f"there is no text file or folder {experiment.text!r}")
        return load_corpus(experiment.text)
    return load_corpus(experiment.dataset or "stdlib", split=experiment.split, column=experiment.column)
