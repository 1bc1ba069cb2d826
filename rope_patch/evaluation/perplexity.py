"""Perplexity against context length: does the model predict the same tokens better when it sees more?

protocol `last`         the last T tokens of every window, seen from contexts of each length that end at the same
                        token; the same targets at every length
protocol `by_position`  one pass at the longest length, the mean over the positions up to each length
protocol `span_corruption`  for encoders with decoders: spans among the last T tokens are hidden, the encoder reads
                        contexts of each length, the decoder says the same spans
protocol `sliding`      whole documents in windows of each length, S tokens apart, each token scored once
protocol `disjoint`     whole documents in windows of each length side by side
protocols `yarn_compat`, `yarn_truncate`  the numbers that YaRN's script gives

nll = sum of -ln p(target) / number of targets, perplexity = exp(nll); `protocols/` has the exact definitions.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from rope_patch.evaluation import sharing
from rope_patch.evaluation.nll import ROWS_PER_CHUNK, chunked_nll
from rope_patch.evaluation.passes import Pass, plan_passes
from rope_patch.evaluation.protocols import Cell, Context, Protocol, ProtocolName, check_request, protocol_for
from rope_patch.evaluation.results import ResultFile, Row
from rope_patch.evaluation.subject import Subject, evaluating, progress
from rope_patch.evaluation.trained import Trained
from rope_patch.patching import patch
from rope_patch.schemes import Scheme


def measure(
    model: nn.Module,
    tokenizer: Any,
    corpus: Iterable[Mapping[str, str]],
    schemes: Sequence[str | Scheme],
    lengths: Sequence[int],
    *,
    protocol: ProtocolName = "auto",
    targets: int | None = None,
    stride: int | None = None,
    tokens_per_document: int | None = None,
    documents: int | None = None,
    windows_per_document: int = 1,
    seed: int = 0,
    name: str | None = None,
    results: ResultFile | None = None,
    trained: Trained | None = None,
) -> list[Row]:
    """Measure every scheme at every length. The model is without a scheme before, between and after.

    A model that carries a scheme is measured as it is, never taken apart, where that scheme is all that is asked for.

    Where `torch.distributed` is initialised, every process has to call this alike; the windows are divided over them,
    and all get the rows that one process alone would have got.

    Args:
        model: a language model of Transformers, causal or of T5's style, also inside PEFT or another wrapper.
        tokenizer: its tokenizer.
        corpus: rows with `name` and `text`, such as `load_corpus()` gives.
        schemes: scheme objects or strings; a string may be `plain`, and may say `factor=auto` (see `scheme_at`).
        lengths: context lengths in tokens, ascending.
        protocol: one of `PROTOCOLS`; `"auto"` chooses `"last"` or `"span_corruption"` by the model.
        targets: T, scored tokens per window under `last`, or the tokens among which spans are hidden; default
            min(L, 4096).
        stride: S of `sliding` and `yarn_compat`; default 256, or the shortest length.
        tokens_per_document: of protocols that score whole documents: read the first so many; default all.
        documents: how many documents, drawn at random where there are more; default all.
        windows_per_document: of protocols that score windows: how many places in each document are scored.
        seed: of the draw.
        name: of the model in the rows; default `model.config.name_or_path`.
        results: where rows are appended as they come, and where rows of an earlier run are taken from. Of several
            processes only the main one needs it.
        trained: what the model learned under a scheme that it carried; a line of that scheme is measured with it.

    Returns:
        one row per scheme and length, scheme by scheme.

    Raises:
        EvaluationError: lengths, settings or texts do not fit each other; the message says how.
        AlreadyPatched: the model carries another scheme than the one that is asked for.
        UnknownScheme, InvalidField, SlotConflict, UnsupportedModel, NothingToPatch: a scheme is not right for it.
            All of them are raised before anything is computed.
    """
    request = check_request(
        protocol,
        lengths,
        targets,
        stride=stride,
        tokens_per_document=tokens_per_document,
        documents=documents,
        windows_per_document=windows_per_document,
        seed=seed,
    )
    subject = Subject.of(model, trained)
    scoring = protocol_for(subject.language_model, request, tokenizer, subject.training_length)
    passes = plan_passes(schemes, scoring, subject)
    chosen = scoring.select(corpus, tokenizer)
    shared = {
        **subject.fields(name),
        "protocol": scoring.name,
        "documents": chosen.documents,
        "short_documents": chosen.short_documents,
        "texts": chosen.fingerprint,
        "seed": seed,
    }
    contexts = {length: scoring.contexts(chosen, length) for length in {job.length for job in passes}}
    known = sharing.on_main(lambda: [_known(job, shared, results) for job in passes])
    rows: list[Row] = []
    with evaluating(model), _bar(passes, known, contexts) as bar:
        for job, found in zip(passes, known, strict=True):
            if found is not None:
                rows += found
                continue
            bar.set_description(f"{job.line} at {job.length}")
            with patch(model, job.scheme) if job.scheme and not subject.carried else nullcontext():
                subject.recall(job.scheme)
                scored = _score(model, contexts[job.length], shared["device"], bar)
            rows += sharing.on_main(partial(_fill, job, scoring, scored, shared, results))
    return rows


@dataclass(frozen=True)
class _Scored:
    """What a pass gave: -ln p of the scored positions of every context."""

    losses: list[torch.Tensor]
    tokens: int
    seconds: float


def _known(job: Pass, shared: dict[str, Any], results: ResultFile | None) -> list[Row] | None:
    """The rows of this pass where an earlier run has all of them, under the name that the line has now."""
    if results is None:
        return None
    found = [results.find(Row.identity(**shared, **_place(job, cell))) for cell in job.cells]
    return [dataclasses.replace(row, line=job.line) for row in found if row] if all(found) else None


def _place(job: Pass, cell: Cell) -> dict[str, Any]:
    """The fields of a row that are known before it is measured, beside the shared ones."""
    return {**job.fields, "length": cell.length, "targets": cell.targets}


def _score(model: nn.Module, contexts: Sequence[Context], device: str, bar: tqdm) -> _Scored:
    """One forward pass for every context, this process running its share of them."""

    def losses(context: Context) -> torch.Tensor:
        gather()
        tokens = context.tokens.to(device)
        if context.spans is not None:
            found = context.spans.nll(model, tokens[1:], context.number)
        else:
            found = chunked_nll(model, tokens[None, :-1], tokens[None, context.start + 1 :])[0]
            found = found[: context.stop - context.start]
        bar.update(context.length)
        return found.double().cpu()

    began = time.perf_counter()
    with sharing.gathering(model) as gather:
        found = sharing.each(losses, contexts, alike=_calls_of_the_head)
    return _Scored(found, sum(context.length for context in contexts), time.perf_counter() - began)


def _calls_of_the_head(context: Context) -> int:
    """How often `chunked_nll` calls the head, where weights that are spread over processes are gathered."""
    return -(-(context.length - context.start) // ROWS_PER_CHUNK)


def _fill(
    job: Pass, protocol: Protocol[Any], scored: _Scored, shared: dict[str, Any], results: ResultFile | None
) -> list[Row]:
    """The rows of a pass, written as far as there is a file."""
    rows = []
    for cell in job.cells:
        nll, count = protocol.mean(scored.losses, cell)
        row = Row(
            **shared,
            **_place(job, cell),
            windows=len(scored.losses),
            scored_tokens=count,
            nll=nll,
            perplexity=math.inf if nll > 700 else math.exp(nll),
            seconds=round(scored.seconds, 3),
            tokens_per_second=round(scored.tokens / scored.seconds, 1),
        )
        if results is not None:
            results.append(row)
        rows.append(row)
    return rows


def _bar(passes: list[Pass], known: list[list[Row] | None], contexts: dict[int, list[Context]]) -> tqdm:
    """Progress over the tokens that this process reads."""
    return progress(
        sum(
            contexts[job.length][index].length
            for job, found in zip(passes, known, strict=True)
            if found is None
            for index in sharing.share(contexts[job.length], _calls_of_the_head)
        )
    )
