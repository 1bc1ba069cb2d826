"""One perplexity measurement from a description of it: what the command line and the recipe share."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from rope_patch.evaluation import chart, sharing
from rope_patch.evaluation.description import check_at_least
from rope_patch.evaluation.figures import can_draw
from rope_patch.evaluation.loading import load_tokenizer
from rope_patch.evaluation.measurement import Outcome, Say, SchemesAtLengths, silent
from rope_patch.evaluation.perplexity import measure
from rope_patch.evaluation.protocols import Request, check_request
from rope_patch.evaluation.results import ResultFile, Row


@dataclass(frozen=True)
class Experiment(SchemesAtLengths):
    """What to measure, on what, and where the results go. The fields are the keys of the YAML.

    Attributes:
        lengths, schemes, references, model, text, dataset, split, column, dtype, device, attention: see
            `SchemesAtLengths` and `Measurement`.
        protocol: `last`, `by_position`, `span_corruption`, `sliding`, `disjoint`, `yarn_compat` or `yarn_truncate`;
            `auto` chooses `last` or `span_corruption` by the model.
        targets: T, scored tokens per window; default min(L, 4096).
        stride: S of `sliding` and `yarn_compat`, in tokens; default 256, or the shortest length.
        tokens_per_document: where whole documents are scored, how many tokens of each; default all.
        documents: how many documents; default all.
        windows_per_document: how many places in each document are scored.
        output: folder of `perplexity.jsonl` and `perplexity.png`.
        seed: of the draw of documents.
    """

    _: KW_ONLY
    protocol: str = "auto"
    targets: int | None = None
    stride: int | None = None
    tokens_per_document: int | None = None
    documents: int | None = None
    windows_per_document: int = 1
    output: str = "runs/perplexity"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "documents", "windows_per_document", "stride", "tokens_per_document")

    @property
    def request(self) -> dict[str, Any]:
        """What is asked of the protocol, as `check_request` and `measure` take it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Request)}


def run(experiment: Experiment, say: Say = silent) -> Outcome[Row]:
    """Measure, writing every row to disk as it comes, and draw the chart. Started again, it goes on where it stopped.

    Started by `torchrun` or `accelerate launch`, the processes divide the windows; the main one writes and speaks.

    Args:
        experiment: what to measure.
        say: see `Say`.

    Raises:
        RopePatchError, OSError: something is wrong with the description, the checkpoint, the text or the output
            folder; whatever can be known before the model is loaded is raised before.
    """
    check_request(**experiment.request)
    say = experiment.begin(say)
    path = Path(experiment.output) / "perplexity.jsonl"
    results = sharing.only_main(lambda: ResultFile(path))
    lengths = ", ".join(map(str, experiment.lengths))
    say(f"measuring {len(experiment.lines)} schemes at {lengths} tokens on {experiment.source}")
    corpus = experiment.corpus()
    model, trained = experiment.load(say)
    rows = measure(
        model,
        load_tokenizer(experiment.checkpoint),
        corpus,
        experiment.lines,
        **experiment.request,
        name=experiment.name,
        results=results,
        trained=trained,
    )
    picture = sharing.on_main(lambda: chart.save(rows, path.with_suffix(".png")) if can_draw(say) else None)
    return Outcome(rows, path, picture)
