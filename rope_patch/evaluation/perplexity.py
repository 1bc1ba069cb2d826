"""Perplexity against context length: does the model predict the same tokens better when it sees more?

protocol `last`         the last T tokens of every window, seen from contexts of each length that end at the same
                        token; the same targets at every length
protocol `by_position`  one pass at the longest length, the mean over the positions up to each length
protocol `span_corruption`  for encoders with decoders: spans among the last T tokens are hidden, the encoder reads
                        contexts of each length, the decoder says the same spans
nll = sum of -ln p(target) / number of targets, perplexity = exp(nll)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from rope_patch.errors import AlreadyPatched, EvaluationError, did_you_mean
from rope_patch.evaluation.nll import chunked_nll, find_language_model
from rope_patch.evaluation.results import ResultFile, Row, identity, provenance, weights_fingerprint
from rope_patch.evaluation.span_corruption import HiddenSpans
from rope_patch.evaluation.specs import PLAIN, scheme_at
from rope_patch.evaluation.texts import Selection, select_windows
from rope_patch.evaluation.trained import Trained
from rope_patch.models.base import Stack
from rope_patch.models.config import rope_entries
from rope_patch.models.reading import read_stacks
from rope_patch.mounts import plan_mounts
from rope_patch.patch import find_handle, patch
from rope_patch.schemes import Scheme

Protocol = Literal["auto", "last", "by_position", "span_corruption"]
"""`auto` is what a model calls for: `span_corruption` where it has an encoder and a decoder, else `last`."""

DEFAULT_TARGETS = 4096
"""T where the training length does not set it lower."""


@dataclass(frozen=True)
class Bin:
    """The targets of one row: positions `start < p <= stop` of a context, `stop` being the length that it is named by.

    Position p is predicted by the first p tokens.
    """

    start: int
    stop: int


@dataclass(frozen=True)
class Pass:
    """One scheme at one context length: what one forward pass per window measures.

    Attributes:
        line: the scheme as the table names it.
        scheme: with all defaults filled in; None for the plain checkpoint.
        mount: where it will be mounted.
        length: tokens of context.
        bins: the rows that the pass yields.
    """

    line: str
    scheme: Scheme | None
    mount: str
    length: int
    bins: tuple[Bin, ...]


def measure(
    model: nn.Module,
    tokenizer: Any,
    corpus: Iterable[Mapping[str, str]],
    schemes: Sequence[str | Scheme],
    lengths: Sequence[int],
    *,
    protocol: Protocol = "auto",
    targets: int | None = None,
    documents: int | None = None,
    windows_per_document: int = 1,
    seed: int = 0,
    name: str | None = None,
    results: ResultFile | None = None,
    trained: Trained | None = None,
) -> list[Row]:
    """Measure every scheme at every length. The model is unpatched before, between and after.

    Args:
        model: a language model of Transformers that carries no scheme, causal or of T5's style.
        tokenizer: its tokenizer.
        corpus: rows with `name` and `text`, such as `load_corpus()` gives.
        schemes: scheme objects or strings; a string may be `plain`, and may say `factor=auto` (see `scheme_at`).
        lengths: context lengths in tokens, ascending.
        protocol: `"last"`, `"by_position"` for schemes that do not depend on the length, or `"span_corruption"`;
            `"auto"` chooses by the model.
        targets: T, scored tokens per window under `last`, or the tokens among which spans are hidden; default
            min(L, 4096).
        documents, windows_per_document, seed: see `select_windows`.
        name: of the model in the rows; default `model.config.name_or_path`.
        results: where rows are appended as they come, and where rows of an earlier run are taken from.
        trained: what the model learned under a scheme that it carried; a line of that scheme is measured with it.

    Returns:
        one row per scheme and length, scheme by scheme.

    Raises:
        EvaluationError: lengths, targets or texts do not fit each other; the message says how.
        AlreadyPatched: the model carries a scheme.
        UnknownScheme, InvalidField, SlotConflict, UnsupportedModel, NothingToPatch: a scheme is not right for it.
            All of them are raised before anything is computed.
    """
    check_request(protocol, lengths, targets)
    if (handle := find_handle(model)) is not None:
        raise AlreadyPatched(f"{type(model).__name__} carries {handle.scheme}; unpatch it before measuring")
    stacks = read_stacks(model)
    language_model = find_language_model(model)
    protocol = _protocol_for(language_model, protocol)
    training_length = stacks[0].training_length
    if targets is None:
        targets = _default_targets(protocol, lengths, training_length)
    passes = _plan(schemes, lengths, protocol, targets, stacks)
    hidden = HiddenSpans(tokenizer, targets, seed) if protocol == "span_corruption" else None
    selection = select_windows(
        corpus,
        tokenizer,
        longest=lengths[-1],
        targets=targets,
        documents=documents,
        windows_per_document=windows_per_document,
        seed=seed,
    )
    shared = {
        "model": name or getattr(language_model.config, "name_or_path", "") or type(language_model).__name__,
        "weights": weights_fingerprint(model) if trained is None else trained.weights,
        "protocol": protocol,
        "training_length": training_length,
        "documents": selection.documents,
        "windows": len(selection.windows),
        "short_documents": selection.short_documents,
        "texts": selection.fingerprint,
        "dtype": str(language_model.dtype).removeprefix("torch."),
        "attention": language_model.config._attn_implementation,
        "device": str(language_model.device),
        "seed": seed,
        **provenance(),
    }
    known = [_known(job, shared, results) for job in passes]
    rows: list[Row] = []
    with _evaluating(model), _bar(passes, known, selection) as bar:
        for job, found in zip(passes, known, strict=True):
            learned = trained if trained and trained.belong_to(job.scheme, stacks[0].checkpoint) else None
            rows += found or _compute(model, job, learned, selection, hidden, shared, results, bar)
    return rows


def check_request(protocol: str, lengths: Sequence[int], targets: int | None) -> None:
    """What can be known to be wrong before a model is there.

    Raises:
        EvaluationError: lengths, protocol or targets are not allowed; the message says what is.
    """
    shown = ", ".join(map(str, lengths))
    if not lengths:
        raise EvaluationError("no lengths were given; give at least one, in tokens")
    if not all(_is_count(length) for length in lengths):
        raise EvaluationError(f"lengths {shown}: every length must be a whole number of at least 1 token")
    for shorter, longer in pairwise(lengths):
        if shorter == longer:
            raise EvaluationError(f"lengths {shown}: {shorter} is there twice")
        if shorter > longer:
            raise EvaluationError(f"lengths {shown}: they must ascend, but {longer} follows {shorter}")
    if protocol not in get_args(Protocol):
        raise EvaluationError(f"protocol {protocol!r}: {did_you_mean(str(protocol), get_args(Protocol))}")
    if targets is None:
        return
    if protocol == "by_position":
        raise EvaluationError(f"targets={targets}: protocol 'by_position' scores every token, leave targets out")
    if not _is_count(targets):
        raise EvaluationError(f"targets={targets!r} is not allowed; a whole number of at least 1 token is")
    if targets > lengths[0]:
        raise EvaluationError(
            f"targets={targets} is more than the shortest length of {lengths[0]} tokens: every length has to score "
            f"the same targets, so give at most {lengths[0]} targets or a longer shortest length"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _protocol_for(language_model: PreTrainedModel, protocol: Protocol) -> Protocol:
    two_parts = language_model.config.is_encoder_decoder
    if protocol == "auto":
        return "span_corruption" if two_parts else "last"
    if two_parts != (protocol == "span_corruption"):
        kind = "an encoder with a decoder" if two_parts else "a decoder alone"
        raise EvaluationError(f"protocol {protocol!r} is not for {type(language_model).__name__}, which is {kind}")
    return protocol


def _default_targets(protocol: str, lengths: Sequence[int], training_length: int) -> int:
    if protocol == "by_position":
        return lengths[-1]
    targets = min(training_length, DEFAULT_TARGETS)
    check_request(protocol, lengths, targets)
    return targets


def _plan(
    schemes: Sequence[str | Scheme], lengths: Sequence[int], protocol: str, targets: int, stacks: Sequence[Stack]
) -> list[Pass]:
    if not schemes:
        raise EvaluationError("no schemes were given; give at least one, such as 'plain'")
    lines = [str(spec) for spec in schemes]
    if twice := {line for line in lines if lines.count(line) > 1}:
        raise EvaluationError(f"scheme {sorted(twice)[0]!r} is there twice")
    shapes: list[tuple[int, tuple[Bin, ...]]]
    if protocol == "by_position":
        shapes = [(lengths[-1], tuple(Bin(start, stop) for start, stop in pairwise([0, *lengths])))]
    else:
        shapes = [(length, (Bin(length - targets, length),)) for length in lengths]
    passes, stack = [], stacks[0]
    for line, spec in zip(lines, schemes, strict=True):
        for length, bins in shapes:
            scheme = spec if isinstance(spec, Scheme) else scheme_at(spec, length, stack.training_length)
            if scheme is not None and len(stacks) == 1:
                scheme = scheme.resolve(stack.checkpoint)  # else the defaults of each part are its own
            if protocol == "by_position" and _follows_length(scheme, stack):
                raise EvaluationError(
                    f"{line} depends on the length of the text, so one pass at {length} tokens says nothing of shorter "
                    "ones; use protocol 'last'"
                )
            table = stack.absolute
            if scheme is None and table is not None and length > table.capacity:
                raise EvaluationError(
                    f"{line} at {length} tokens: {type(stack.module).__name__} has {table.capacity} positions; "
                    "measure longer texts under a scheme alone, without references (--no-references)"
                )
            mounts = [plan_mounts(scheme, part).mounts() for part in stacks] if scheme else ["none"]
            passes.append(Pass(line, scheme, mounts[0], length, bins))
    return passes


def _follows_length(scheme: Scheme | None, stack: Stack) -> bool:
    if scheme is not None and "frequencies" in scheme.slots:
        return scheme.length_dependent
    if not stack.rotary:
        return False
    types = {entry.get("rope_type") for entry in rope_entries(stack.config).values()}
    return bool(types & {"dynamic", "longrope"})


def _known(job: Pass, shared: dict[str, Any], results: ResultFile | None) -> list[Row] | None:
    """The rows of this pass where an earlier run has all of them, under the name that the line has now."""
    if results is None:
        return None
    found = [results.find(identity(**shared, **_place(job, span))) for span in job.bins]
    return [Row(**{**vars(row), "line": job.line}) for row in found if row] if all(found) else None


def _place(job: Pass, span: Bin) -> dict[str, Any]:
    """The fields of a row that are known before it is measured, beside the shared ones."""
    return {
        "line": job.line,
        "scheme": job.scheme.to_dict() if job.scheme else {"name": PLAIN},
        "regime": job.scheme.regime if job.scheme else "training-free",
        "mount": job.mount,
        "length": span.stop,
        "targets": span.stop - span.start,
    }


def _compute(
    model: nn.Module,
    job: Pass,
    learned: Trained | None,
    selection: Selection,
    hidden: HiddenSpans | None,
    shared: dict[str, Any],
    results: ResultFile | None,
    bar: tqdm,
) -> list[Row]:
    bar.set_description(f"{job.line} at {job.length}")
    start = job.bins[0].start
    losses = []
    began = time.perf_counter()
    with patch(model, job.scheme) if job.scheme else nullcontext():
        if learned is not None:
            learned.restore(model)
        for index, window in enumerate(selection.windows):
            tokens = window.context(job.length).to(shared["device"])
            if hidden is None:
                found = chunked_nll(model, tokens[None, :-1], tokens[None, start + 1 :])[0]
            else:
                found = hidden.nll(model, tokens[1:], index)
            losses.append(found.double().cpu())
            bar.update(job.length)
    seconds = time.perf_counter() - began
    nll = torch.stack(losses)
    rows = []
    for span in job.bins:
        scored = nll if hidden else nll[:, span.start - start : span.stop - start]
        mean = scored.mean().item()
        row = Row(
            **shared,
            **_place(job, span),
            scored_tokens=scored.numel(),
            nll=mean,
            perplexity=math.inf if mean > 700 else math.exp(mean),
            seconds=round(seconds, 3),
            tokens_per_second=round(job.length * len(selection.windows) / seconds, 1),
        )
        if results is not None:
            results.append(row)
        rows.append(row)
    return rows


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout meanwhile; afterwards each module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _bar(passes: list[Pass], known: list[list[Row] | None], selection: Selection) -> tqdm:
    missing = sum(job.length for job, found in zip(passes, known, strict=True) if not found)
    total = missing * len(selection.windows)
    return tqdm(total=total, unit="token", unit_scale=True, disable=None, dynamic_ncols=True, leave=False)
