"""Verdicts: the conclusion from a measurement in one or two sentences, and the command to run next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean

from rope_patch.data.windows import FEW
from rope_patch.errors import counted
from rope_patch.evaluation.effective_length import EffectiveLength, effective_length, variance_of
from rope_patch.evaluation.protocols.last import Last
from rope_patch.evaluation.row import Row, by_line
from rope_patch.evaluation.scheme_specs import (
    COMPARED,
    CONTROLS,
    NEAR,
    PLAIN,
    REFERENCES,
    TRUNCATED,
    WINDOW,
    display_name,
    in_a_sentence,
)
from rope_patch.evaluation.standard_errors import (
    TAIL,
    contrast,
    is_below,
    noise_of,
    paired_difference,
    pairs_of,
    tells_nothing,
)
from rope_patch.evaluation.tasks.perplexity import PROTOCOLS

CHEAPER = "It is cheaper to truncate the text to L."
COPIES = 0.1  # nats that a passage inside L must be worth to a checkpoint that can copy
FEW_COPIES = 4  # windows from which on the large differences of protocol `repeat` stand out from noise


@dataclass(frozen=True)
class Verdict:
    """A conclusion from measured rows, with the next command.

    Attributes:
        kind: `better` or `worse` than the reference by more than noise, `noise`, `too few` windows to tell, or
            `nothing` to compare; after a training, `length` or `language` instead of `better`.
        sentence: the evidence and the conclusion.
        command: a `rope-patch` command to run next on the same model and text.
    """

    kind: str
    sentence: str
    command: str


def with_text_cut(rows: Sequence[Row]) -> list[Row]:
    """Add rows of truncated text, derived from the plain checkpoint's rows, to the rows of an old file that lacks them.

    Truncated text is the plain checkpoint at L, or at a length below L, on the same targets.
    """
    protocol, trained = PROTOCOLS.get(rows[0].protocol or "", Last), rows[0].training_length
    plain = {row.length: row for row in rows if row.line == PLAIN and not row.step}
    if any(row.line == TRUNCATED for row in rows) or not {PLAIN, TRUNCATED} <= {*protocol.references}:
        return list(rows)
    sources = {length: plain.get(min(length, trained)) for length in sorted({row.length for row in rows})}
    scheme = {"name": PLAIN, TRUNCATED: trained}
    cut = [replace(row, line=TRUNCATED, scheme=scheme, length=length) for length, row in sources.items() if row]
    behind = max((place for place, row in enumerate(rows, start=1) if row.line == PLAIN), default=0)
    return [*rows[:behind], *cut, *rows[behind:]] if trained in plain and max(sources) > trained else list(rows)


def reference_of(rows: Sequence[Row], length: int) -> Row | None:
    """The reference to beat at a length, which needs no method: the sliding window or truncated text, whichever has the
    lower loss.

    The sliding window has the higher loss if the model needs the first tokens of a text
    (https://arxiv.org/abs/2309.17453).

    Args:
        rows: rows of references and of other lines.

    Returns:
        the row of the reference; None if neither was measured.
    """
    at_length = {row.line: row for row in with_text_cut(rows) if row.length == length and not row.step}
    free = [row for line in (WINDOW, TRUNCATED) if (row := at_length.get(line)) and not math.isnan(row.loss)]
    return min(free, key=lambda row: row.loss, default=None)


def of_losses(rows: Sequence[Row]) -> Verdict:
    """Judge from losses whether some scheme gains from reading farther than L.

    The best scheme at each length beyond L is compared with `reference_of`, with a correction for the number of tries.
    """
    first = rows[0]
    schemes = [row for row in rows if row.line not in COMPARED and not math.isnan(row.loss)]
    tried = [row for row in schemes if row.length > first.training_length]
    beyond = sorted({row.length for row in tried}, reverse=True)
    free = {length: row for length in beyond if (row := reference_of(rows, length))}
    if not free:
        return Verdict(
            "nothing",
            f"No scheme was measured beyond L = {first.training_length} with a reference, so nothing can be said "
            "about reading farther.",
            f"perplexity --lengths 1x,2x,4x --scheme rerope:target=auto+logn --protocol {first.protocol or 'last'}",
        )
    controls = {row.line: row for row in rows if row.length == max(free) and row.line in CONTROLS}
    if controls.keys() >= set(CONTROLS) and not copies(controls[NEAR], controls[TRUNCATED], tried):
        return Verdict(
            "nothing",
            "The checkpoint does not copy the passage, not even inside L, so no other row means anything.",
            f"perplexity --protocol last --lengths 1x,{max(free)} --scheme {tried[0].line}",
        )
    verdicts = []  # one per length, the longest first
    for length, reference in free.items():
        at_length = [row for row in tried if row.length == length]
        verdicts.append(compare(min(at_length, key=lambda row: row.loss), reference, len(tried)))
    return next((verdict for verdict in verdicts if verdict.kind == "better"), verdicts[0])


def copies(near: Row, cut: Row, tried: Sequence[Row]) -> bool:
    """Whether the checkpoint gains from a repeated passage inside L, or from the far passage under a scheme; without a
    gain `repeat` means nothing. Without a scheme, a checkpoint may miss a passage that begins almost L tokens back.
    """
    gain, error = paired_difference(near, cut)
    farther = [row for row in tried if row.length == cut.length]
    return gain < -max(COPIES, 2 * (error or 0)) or any(
        compare(row, cut, len(farther)).kind == "better" for row in farther
    )


def compare(best: Row, free: Row, tries: int = 1) -> Verdict:
    """Compare the best of some rows with the reference on the same text.

    Args:
        tries: the number of rows that it is the best of; 1 if it was chosen on other text.
    """
    difference, error = paired_difference(best, free)
    reference, name = f"{in_a_sentence(free.line)} ({free.loss:.3f})", f"{display_name(best.line)} (`{best.line}`)"
    apart = f"{abs(difference):.3f} {'below' if difference < 0 else 'above'}"
    few, too_few = FEW_COPIES if best.protocol == "repeat" else FEW, ""
    if tells_nothing(best):
        too_few = f"{best.scored_tokens} tokens"
    elif error is None or len(best.nll_by_document) < few:
        too_few = counted(best.windows or 0, "window")
    if error is None or too_few:
        protocol = "longppl --evaluator DIR" if best.protocol == "longppl" else best.protocol or "last"
        return Verdict(
            "too few",
            f"At {best.length} tokens {name} is {apart} {reference}, within noise ({too_few}). A longer text or "
            "more documents (--text FOLDER) would tell more; fewer --targets also give more windows.",
            f"perplexity --protocol {protocol} --lengths 1x,{best.length} --scheme {best.line}",
        )
    evidence = f"(error {error:.3f} over {pairs_of(best)})"
    if best.regime == "fine-tune" and not best.step:
        evidence += ", without the fine-tuning that it is made for"
    options = f"--lengths 1x,{best.length} --scheme {best.line}"
    command = f"perplexity --protocol {'last' if best.protocol == 'repeat' else 'repeat'} {options}"
    if is_below(best, free, tries):
        return Verdict(
            "better",
            f"Reading farther pays: at {best.length} tokens {name} is {apart} {reference} {evidence}.",
            f"passkey --task spans {options}",
        )
    if is_below(free, best):
        return Verdict(
            "worse",
            f"Nothing beats {reference}: the best of the others at {best.length} tokens, {name}, is {apart} it "
            f"{evidence}. {CHEAPER}",
            command,
        )
    return Verdict(
        "noise",
        f"Nothing beats {reference} by more than noise: the best at {best.length} tokens, {name}, is {apart} it "
        f"{evidence}. {CHEAPER}",
        command,
    )


def of_training(rows: Sequence[Row], folder_of: Callable[[str], Path]) -> Verdict:
    """Judge whether a fine-tuning taught length, or language, which helps at L as much as beyond.

        gain(l) = NLL of the reference at l before the training - NLL after it

    Length is the part of gain(l) beyond gain(L).

    Args:
        rows: rows with their `step`, with the references before the training.
        folder_of: gives the folder of a scheme's checkpoint, for the next command.
    """
    steps = {row.line: row.step for row in sorted(rows, key=lambda row: row.step or 0) if row.step}
    trained = [row for row in rows if row.step and row.step == steps[row.line]]
    at_l = rows[0].training_length
    beyond = sorted({row.length for row in trained if row.length > at_l}, reverse=True)
    free = {length: row for length in beyond if (row := reference_of(rows, length))}
    if not free:
        told = f"Nothing was trained and measured beyond L = {at_l} with a reference."
        return Verdict("nothing", told, "finetune --scheme yarn:target=auto --length 2x")
    verdicts = []  # one per length, the longest first
    for length, reference in free.items():
        after = min((row for row in trained if row.length == length), key=lambda row: row.loss)
        after_at_l = next((row for row in trained if (row.line, row.length) == (after.line, at_l)), None)
        verdict = _of_gain(after, reference, after_at_l, reference_of(rows, at_l), len(steps) * len(free))
        folder = folder_of(after.line) / "checkpoint"
        command = f"perplexity --protocol repeat --model {folder} --scheme {after.line} --lengths 1x,{length}"
        verdicts.append(replace(verdict, command=command))
    return next((verdict for verdict in verdicts if verdict.kind in ("length", "language")), verdicts[0])


def _of_gain(after: Row, free: Row, after_at_l: Row | None, before: Row | None, tries: int) -> Verdict:
    """Judge the gain of a training at a length beyond L, beside its gain at L."""
    verdict, steps = compare(after, free, tries), counted(after.step or 0, "step")
    if verdict.kind != "better" or not before or not after_at_l:
        return replace(verdict, sentence=f"After {steps}: {verdict.sentence}")
    (gain, _), (gain_at_l, _) = (contrast((1, one), (-1, two)) for one, two in ((free, after), (before, after_at_l)))
    more, error = contrast((1, free), (-1, after), (-1, before), (1, after_at_l))
    told = (
        f"After {steps} {display_name(after.line)} gains {gain:.3f} at {after.length} tokens and {gain_at_l:.3f} at "
        f"L = {after.training_length}"
    )
    if error is not None and more > noise_of(after) * error:
        return replace(
            verdict, kind="length", sentence=f"{told}: {more:.3f} (error {error:.3f}) of the gain comes from length."
        )
    return replace(verdict, kind="language", sentence=f"{told}: it learned language, not length. {CHEAPER}")


def of_answers(rows: Sequence[Row]) -> Verdict:
    """Judge whether a scheme answers more than the references beyond L, and up to which effective length."""
    of_line, trained = by_line(rows), rows[0].training_length
    reach = {line: effective_length(of_line[line]) for line in of_line}
    schemes, free = ([line for line in of_line if (line in REFERENCES) == known] for known in (False, True))
    beyond = sorted({row.length for row in rows if row.length > trained}, reverse=True)
    missing = "" if schemes and free and beyond else "a scheme, a reference and a length beyond L are needed"
    if not any(reach.values()):
        missing = "no scheme answers at the shortest lengths"
    if missing:
        command = "passkey --task spans --lengths 1x,2x,4x --scheme rerope:target=auto+logn"
        return Verdict("nothing", f"Nothing can be said about reading farther: {missing}.", command)
    verdicts = []  # one per length, the longest first
    for length in beyond:
        cells = {line: [row for row in of_line[line] if row.length == length] for line in of_line}
        shares = {line: fmean(row.share for row in cells[line]) for line in cells}
        best, known = (max(some, key=shares.__getitem__) for some in (schemes, free))
        error = math.sqrt(variance_of(cells[best]) + variance_of(cells[known]))
        told = (
            f"at {length} tokens {display_name(best)} (`{best}`) is {shares[best]:.0%} correct, the "
            f"best reference {shares[known]:.0%} (error {error:.0%}); {_lengths(reach[best], reach[known])}."
        )
        command = f"perplexity --protocol repeat --lengths 1x,{length} --scheme {best}"
        limit = -NormalDist().inv_cdf(TAIL / len(schemes) / len(beyond))
        if shares[best] - shares[known] > limit * error:
            verdicts.append(Verdict("better", f"Reading farther pays: {told}", command))
        else:
            verdicts.append(Verdict("noise", f"No gain beyond noise: {told} {CHEAPER}", command))
    return next((verdict for verdict in verdicts if verdict.kind == "better"), verdicts[0])


def _lengths(best: EffectiveLength | None, known: EffectiveLength | None) -> str:
    """Compare the effective length of a scheme with that of a reference, in words."""
    if str(best) != str(known):
        return f"effective lengths: {best or 'none'} against {known or 'none'}"
    return f"no difference in effective length: {f'both keep their score up to {best}' if best else 'neither has one'}"
