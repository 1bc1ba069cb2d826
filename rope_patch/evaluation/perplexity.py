"""Perplexity against context length: does the model predict the same tokens better when it sees more?

nll = sum of -ln p(target) / number of targets, perplexity = exp(nll). The protocols define the targets and their
contexts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.lines import SchemeAtLength, display_name, schemes_at_lengths
from rope_patch.evaluation.measured_model import Learned, MeasuredModel
from rope_patch.evaluation.nll import chunked_nll
from rope_patch.evaluation.processes import Progress, on_main, over_processes
from rope_patch.evaluation.protocols import Context, Protocol, check_request, protocol_for
from rope_patch.evaluation.rows import Row, Rows, recall
from rope_patch.evaluation.standard_errors import FEW
from rope_patch.models.config import rope_entries
from rope_patch.models.head import find_language_model
from rope_patch.saving.readers import served_by
from rope_patch.schemes import Scheme

BLOCKS = 32  # maximum number of blocks of windows, for standard errors over few documents


def measure(
    model: nn.Module,
    tokenizer: Any,
    corpus: Iterable[Mapping[str, Any]],
    schemes: Sequence[str | Scheme],
    lengths: Sequence[int],
    *,
    protocol: str = "auto",
    targets: int | None = None,
    stride: int | None = None,
    tokens_per_document: int | None = None,
    documents: int | None = None,
    windows_per_document: int | None = None,
    seed: int = 0,
    name: str | None = None,
    text: str = "",
    results: Rows[Row] | None = None,
    trained: Learned | None = None,
) -> list[Row]:
    """Measure every scheme at every length: one row each, scheme by scheme.

    The model has no scheme before, between and after the measurements. A patched model is measured as it is, and only
    under its own scheme.

    With several processes (`torchrun`, `accelerate launch`), all of them must make the same call. The windows are
    divided over the processes, and all return the same rows as a single process.

    Args:
        model: a language model of Transformers, causal or of T5's style, also inside PEFT or another wrapper.
        tokenizer: None where the corpus has tokens, which no start-of-text token is then set in front of.
        corpus: rows with `name` and `text`, such as `load_corpus()` gives, or `input_ids` in place of `text`.
        schemes: scheme objects or strings; a string may be `plain`, and may contain `target=auto` (see `scheme_at`).
        lengths: context lengths in tokens, ascending.
        protocol: one of `PROTOCOLS`; `"auto"` chooses `"last"` or `"span_corruption"` for the model.
        targets: T, scored tokens per window, or the tokens among which spans are hidden; default min(L, 4096).
        stride: S of `sliding` and `yarn_compat`; default 256, or the shortest length.
        tokens_per_document: for protocols that score whole documents: the number of tokens to read; default all.
        documents: number of documents, drawn at random if there are more; default all.
        windows_per_document: for protocols that score windows: maximum number per document; default one, or with few
            documents as many as make 16 windows in total.
        name: of the model in the rows; default `model.config.name_or_path`.
        text: name of the corpus in the rows.
        results: file for new rows; rows of an earlier run in it are not measured again.
        trained: learned parameters from `take_off`, used for lines of their scheme.

    Raises:
        EvaluationError: lengths, settings or texts do not fit together.
        AlreadyPatched: the model has another scheme than the requested one.
        UnknownScheme, InvalidField, SlotConflict, UnsupportedModel, NothingToPatch: a scheme does not fit the model.
            All errors are raised before anything is computed.
    """
    asked = {"targets": targets, "stride": stride, "tokens_per_document": tokens_per_document, "documents": documents}
    request = check_request(protocol, lengths, **asked, windows_per_document=windows_per_document, seed=seed)
    measured = MeasuredModel(model, trained)
    scoring = protocol_for(measured.language_model, request, tokenizer, measured.training_length)
    cells = scoring.cells()
    passes = schemes_at_lengths(schemes, list(cells), measured)
    if scoring.one_pass:
        _check_prefixes(passes, measured)
    chosen = scoring.select(corpus, tokenizer)
    contexts = {length: [c for window in chosen.windows for c in scoring.contexts(window, length)] for length in cells}
    facts = {
        **measured.facts(name),
        "protocol": scoring.name,
        "documents": chosen.documents,
        "short_documents": chosen.short_documents,
        "texts": chosen.fingerprint,
        "text": text,
        "asked": documents,
        "seed": seed,
    }
    rows: list[Row] = []
    with Progress(model, [[context.length for context in contexts[one.length]] for one in passes]) as bar:
        for one in passes:
            bar.begin(f"{display_name(one.line)} at {one.length}")
            read = contexts[one.length]
            same = {**facts, **one.facts, "served": served_by(one.scheme, measured.language_model.config)}
            wanted = [{**same, "length": at, "targets": scored} for at, scored in cells[one.length]]
            known = on_main(partial(_known, wanted, results))
            if known is None:
                began = time.perf_counter()
                with measured.under(one.scheme):
                    losses = over_processes(partial(_losses, model, scoring, bar), list(enumerate(read)), model)
                seconds = time.perf_counter() - began
                known = on_main(partial(_fill, wanted, scoring, read, losses, seconds, results))
            rows += known
    return rows


def _check_prefixes(passes: Sequence[SchemeAtLength], model: MeasuredModel) -> None:
    """Refuse length-dependent schemes: one pass has the losses of every prefix only if nothing depends on length."""
    types = {entry.get("rope_type") for entry in rope_entries(model.stacks[0].config).values()}
    dynamic = model.stacks[0].rotary and not types.isdisjoint({"dynamic", "longrope"})
    for one in passes:
        scheme = one.scheme
        if scheme.length_dependent if scheme is not None and "frequencies" in scheme.slots else dynamic:
            raise EvaluationError(
                f"{one.line} depends on the length of the text, so one pass at {one.length} tokens does not measure "
                "shorter ones; use protocol 'last'"
            )


def _known(wanted: Sequence[dict[str, Any]], results: Rows[Row] | None) -> list[Row] | None:
    """The rows of a pass, if an earlier run has all of them."""
    known = [row for fields in wanted if (row := recall(results, fields))]
    return known if len(known) == len(wanted) else None


def _losses(model: nn.Module, protocol: Protocol, bar: Progress, numbered: tuple[int, Context]) -> torch.Tensor:
    """-ln p of the scored positions of one context, `(scored,)`."""
    number, context = numbered
    tokens = torch.cat([context.prefix, context.text]).to(find_language_model(model).device)
    if protocol.hidden is not None:
        found = protocol.hidden.nll(model, tokens[1:], number)
    else:
        found = chunked_nll(model, tokens[None, :-1], tokens[None, context.start + 1 :])[0]
        found = found[: context.stop - context.start]
    found = found.double().cpu()
    bar.update([context.length])
    return found


def _fill(
    wanted: Sequence[dict[str, Any]],
    protocol: Protocol,
    contexts: Sequence[Context],
    losses: Sequence[torch.Tensor],
    seconds: float,
    results: Rows[Row] | None,
) -> list[Row]:
    """The rows of a pass with their numbers, also written to `results`."""
    rows = []
    for fields in wanted:
        scored = protocol.scored(losses, fields["length"], fields["targets"])
        nll = protocol.mean(scored)
        row = Row(
            **fields,
            windows=len(losses),
            scored_tokens=sum(of_context.numel() for of_context in scored),
            nll=nll,
            perplexity=math.inf if nll > 700 else math.exp(nll),
            seconds=round(seconds, 3),
            tokens_per_second=round(sum(context.length for context in contexts) / seconds, 1),
            nll_by_document=[round(protocol.mean(block), 6) for block in _blocks(contexts, scored)],
        )
        if results is not None:
            results.append(row)
        rows.append(row)
    return rows


def _blocks(contexts: Sequence[Context], scored: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """The losses of each document; with few documents those of their windows, or of blocks of many windows."""
    by_document: dict[str, list[torch.Tensor]] = {}
    for context, losses in zip(contexts, scored, strict=True):
        by_document.setdefault(context.document, []).append(losses)
    if len(by_document) >= FEW:
        return list(by_document.values())
    count, total = min(BLOCKS, len(scored)), len(scored)
    return [scored[i * total // count : (i + 1) * total // count] for i in range(count)]
