"""One measurement of retrieval from a description of it: what the command line and the recipe share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.errors import CorpusError, EvaluationError, did_you_mean
from rope_patch.evaluation.corpora import load_corpus
from rope_patch.evaluation.description import check_at_least, check_types, read_yaml
from rope_patch.evaluation.loading import check_checkpoint, default_checkpoint, load_model, load_tokenizer
from rope_patch.evaluation.results import LineFile
from rope_patch.evaluation.retrieval import chart
from rope_patch.evaluation.retrieval.measure import check_depths, check_lengths, measure
from rope_patch.evaluation.retrieval.passkey import Passkey
from rope_patch.evaluation.retrieval.rows import RetrievalRow
from rope_patch.evaluation.retrieval.spans import Spans
from rope_patch.evaluation.retrieval.task import Task
from rope_patch.evaluation.specs import REFERENCES, scheme_at
from rope_patch.evaluation.trained import Trained
from rope_patch.patch import find_handle, unpatch

TASKS = ("passkey", "spans")


@dataclass(frozen=True)
class Retrieval:
    """What to hide where, on what, and where the results go. The fields are the keys of the YAML.

    Attributes:
        lengths: context lengths in tokens, ascending; the model never reads more.
        schemes: such as `yarn:factor=auto` or `rerope:window=128+logn`; `plain` and `window` are added in front.
        model: checkpoint folder; default the one that comes with the repository, which is for `spans`.
        task: `passkey`, in English, or `spans`, synthetic, for small checkpoints.
        depths: how many, evenly spaced from 0 to 1, or a list of shares; 0 is the beginning of the context.
        trials: prompts for each length and depth.
        span: tokens of a span; `spans` alone.
        text: of `spans`: a text file or a folder of them; default the held-out modules of Python's standard library.
        dataset: a dataset's name or folder instead, with its `split` and the `column` that holds the text.
        batch_size: prompts of equal length that are answered together.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: `auto` or a name that torch knows.
        attention: `auto` or an attention implementation of Transformers.
        output: folder of the rows, `TASK.jsonl`, and of the heat maps, `TASK.png`.
        seed: of the prompts.
        references: whether `plain` and `window` are added where they are missing.
    """

    lengths: tuple[int, ...]
    schemes: tuple[str, ...] = ()
    model: str | None = None
    task: str = "passkey"
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 10
    span: int = 32
    text: str | None = None
    dataset: str | None = None
    split: str | None = None
    column: str = "text"
    batch_size: int = 1
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    output: str = "runs/retrieval"
    seed: int = 0
    references: bool = True

    def __post_init__(self) -> None:
        if type(self.depths) is int:
            object.__setattr__(self, "depths", evenly_spaced(self.depths))
        check_types(self)
        check_depths(self.depths)
        check_at_least(self, 1, "trials", "span", "batch_size")
        if self.task not in TASKS:
            raise EvaluationError(f"task {self.task!r}: {did_you_mean(self.task, TASKS)}")
        if self.text is not None and self.dataset is not None:
            raise EvaluationError(f"text {self.text!r} and dataset {self.dataset!r}: give one of them")
        if self.task == "passkey" and (given := self.text or self.dataset):
            raise EvaluationError(f"text {given!r}: the filler of task 'passkey' is part of it; texts are for 'spans'")

    @classmethod
    def from_yaml(cls, path: str | Path) -> Retrieval:
        """Read a description.

        Raises:
            EvaluationError: the file is no YAML mapping, or a key or a value is wrong.
            OSError: it cannot be read.
        """
        return read_yaml(cls, path)

    @property
    def lines(self) -> tuple[str, ...]:
        """The schemes in the order of the report, references first."""
        missing = [line for line in REFERENCES if line not in self.schemes] if self.references else []
        return (*missing, *self.schemes)

    @property
    def checkpoint(self) -> str:
        """The folder or the id that is loaded."""
        return self.model or default_checkpoint()


@dataclass(frozen=True)
class Outcome:
    """The rows of a finished measurement and where they are."""

    rows: list[RetrievalRow]
    results: Path
    picture: Path


def evenly_spaced(count: int) -> tuple[float, ...]:
    """So many depths from 0 to 1; one alone is in the middle.

    Raises:
        EvaluationError: there are less than one.
    """
    if count < 1:
        raise EvaluationError(f"depths={count} is not allowed; at least one depth is needed")
    return tuple(i / (count - 1) for i in range(count)) if count > 1 else (0.5,)


def run(retrieval: Retrieval, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Measure, writing every row to disk as it comes, and draw the heat maps. Started again, it goes on.

    Args:
        retrieval: what to measure.
        say: is told, in a sentence each, what happens and what the reader of the results should know.

    Raises:
        RopePatchError, OSError: something is wrong with the description, the checkpoint, the text or the output
            folder; whatever can be known before the model is loaded is raised before.
    """
    checkpoint = retrieval.checkpoint
    check_checkpoint(checkpoint)
    check_lengths(retrieval.lengths)
    for line in retrieval.lines:
        scheme_at(line, 1, 2**62)  # spelling only: the model is not there yet
    results = LineFile(Path(retrieval.output) / f"{retrieval.task}.jsonl", RetrievalRow)
    lengths = ", ".join(map(str, retrieval.lengths))
    say(f"task {retrieval.task}: {len(retrieval.lines)} schemes at {lengths} tokens and {len(retrieval.depths)} depths")
    task = _task(retrieval, load_tokenizer(checkpoint))
    task.prompts(retrieval.lengths[0], retrieval.depths[0])  # where the shortest length has no room, say so now
    model = load_model(checkpoint, dtype=retrieval.dtype, device=retrieval.device, attention=retrieval.attention)
    trained = None
    if (handle := find_handle(model)) is not None:
        say(f"the checkpoint was saved under {handle.scheme}; it is measured without, unless a line names the scheme")
        trained = Trained.under(handle)
        unpatch(model)
    rows = measure(
        model,
        task,
        retrieval.lines,
        retrieval.lengths,
        retrieval.depths,
        seed=retrieval.seed,
        name=retrieval.model or "tiny-llama",
        results=results,
        trained=trained,
    )
    picture = results.path.with_suffix(".png")
    chart.save(rows, picture)
    return Outcome(rows, results.path, picture)


def _task(retrieval: Retrieval, tokenizer: Any) -> Task:
    settings = {"trials": retrieval.trials, "seed": retrieval.seed, "batch_size": retrieval.batch_size}
    if retrieval.task == "passkey":
        return Passkey(tokenizer, **settings)
    longest = retrieval.lengths[-1]
    return Spans(tokenizer, _corpus(retrieval), longest=longest, span=retrieval.span, **settings)


def _corpus(retrieval: Retrieval) -> Any:
    if retrieval.text is not None:
        if not Path(retrieval.text).exists():
            raise CorpusError(f"there is no text file or folder {retrieval.text!r}")
        return load_corpus(retrieval.text)
    return load_corpus(retrieval.dataset or "stdlib", split=retrieval.split, column=retrieval.column)
