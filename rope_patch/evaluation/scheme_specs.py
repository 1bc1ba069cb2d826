"""The lines of a table: names of schemes, their meaning at a length, and whether a model supports them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rope_patch.errors import AlreadyPatched, EvaluationError, RopePatchWarning
from rope_patch.evaluation.measured_model import MeasuredModel
from rope_patch.models.base import Stack
from rope_patch.mounting.plan import Plan, plan_mounts
from rope_patch.mounting.scheme_warnings import changes_nothing
from rope_patch.schemes import Checkpoint, Scheme, get_scheme, list_schemes, scheme_class
from rope_patch.schemes.reach import shortened
from rope_patch.schemes.target import is_multiple, reached, resolved

PLAIN, WINDOW = "plain", "window"  # the plain checkpoint, and its attention cut at the training length
TRUNCATED, NEAR = "cut", "near"  # the plain checkpoint on truncated text, and with what `repeat` repeats inside L
CONTROLS = (TRUNCATED, NEAR)  # lines that the plain checkpoint fills once, because they do not depend on the length
REFERENCES = (PLAIN, WINDOW)  # a useful scheme must beat both
COMPARED = (*REFERENCES, *CONTROLS)  # lines that are no schemes
LONG = 60  # characters of a spec that tables and charts show whole

_NAMES = {PLAIN: "plain checkpoint", WINDOW: "sliding window", TRUNCATED: "truncated text", NEAR: "passage inside L"}


def in_a_sentence(line: str) -> str:
    """The display name of a line in a sentence: references have an article, except truncated text."""
    name = display_name(line)
    return f"the {name}" if line in _NAMES and line != TRUNCATED else name


def display_name(line: str | Scheme) -> str:
    """The display name of a line: "ReRoPE, w = 128, log-n" for `rerope:window=128+logn`.

    Every scheme is shown by its `title`, or by the name of its class. Fields with default values and `target=auto` are
    omitted. A spec with brackets stays unchanged, but the middle of a long one is left out.
    """
    line = str(line)
    if line in _NAMES or "[" in line:
        return _NAMES.get(line, line if len(line) <= LONG else f"{line[: LONG // 2]}...{line[-LONG // 3 :]}")
    words = []
    for part in line.split("+"):
        name, _, fields = part.partition(":")
        kind = scheme_class(name) if name in list_schemes() else None
        words.append(vars(kind).get("title", kind.__name__) if kind else name)
        defaults = {field.name: str(field.default) for field in dataclasses.fields(kind)} if kind else {}  # type: ignore[arg-type]
        for key, value in (field.split("=", 1) for field in fields.split(",") if field):
            if (key, value) != ("target", "auto") and value != defaults.get(key):
                words.append(f"{'w' if key == 'window' else key} = {value.removesuffix('.0')}")
    return ", ".join(words)


def scheme_at(spec: str, length: int, checkpoints: Iterable[Checkpoint] = ()) -> Scheme | None:
    """Build the scheme of a line at one length, with the length in the place of `target=auto`.

    Args:
        spec: `plain` or a control, which return None, or a spec for `get_scheme`, such as `yarn:target=auto`.
        length: l, the context length in tokens.
        checkpoints: checkpoints of the parts of a model, to fill fields that follow from a target.

    Raises:
        UnknownScheme, InvalidField, SlotConflict: the spec is not a scheme, or the scheme cannot reach its target.

    Example:
        >>> str(scheme_at("pi:target=auto", 1024, [Checkpoint(training_length=256, num_heads=8, max_length=256)]))
        'pi:factor=4.0'
    """
    if spec in (PLAIN, *CONTROLS):
        return None
    return reached(get_scheme(spec.replace("target=auto", f"target={length}")), checkpoints)


def with_references(schemes: Sequence[str], references: Sequence[str] = REFERENCES) -> tuple[str, ...]:
    """Complete the lines of a table: missing references come first, and truncated text behind the plain checkpoint.

    Raises:
        RopePatchError: a scheme is misspelled; this is checked before a model is loaded.
    """
    missing = [line for line in references if line not in schemes]
    lines = [*missing, *schemes]
    if TRUNCATED in missing and PLAIN in schemes:
        lines.remove(TRUNCATED)
        lines.insert(lines.index(PLAIN) + 1, TRUNCATED)  # so that it takes the row of the plain checkpoint at L
    for line in lines:
        scheme_at(line, 1)
    return tuple(lines)


def check_lengths(lengths: Sequence[int]) -> None:
    """Check that context lengths are ascending whole numbers of tokens.

    Raises:
        EvaluationError: the lengths are not ascending whole numbers.
    """
    shown = f"lengths {', '.join(map(str, lengths))}"
    if not lengths:
        raise EvaluationError("no lengths were given; give at least one, in tokens")
    if not all(isinstance(length, int) and length >= 1 for length in lengths):
        raise EvaluationError(f"{shown}: every length must be a whole number of at least 1 token")
    for shorter, longer in pairwise(lengths):
        if shorter >= longer:
            raise EvaluationError(f"{shown}: they must ascend, but {longer} follows {shorter}")


def check_beyond(target: int, trained: int) -> None:
    """Check that a target in tokens is beyond the training length.

    Raises:
        EvaluationError: it is not.
    """
    if target <= trained:
        multiple = f"; for {target} times L, write {target}x" if is_multiple(target, trained) else ""
        raise EvaluationError(f"target={target} is not allowed; it has to be beyond L = {trained} tokens{multiple}")


@dataclass(frozen=True)
class SchemeAtLength:
    """A scheme at one length, measured under one patch."""

    line: str
    scheme: Scheme | None  # None is the plain checkpoint
    mount: str
    length: int
    idle: bool  # whether it changes nothing at this length
    warning: str = ""  # why it reaches less far than the checkpoint does today

    @property
    def facts(self) -> dict[str, Any]:
        """The fields for result rows."""
        scheme = self.scheme.to_dict() if self.scheme else {"name": PLAIN}
        regime = self.scheme.regime if self.scheme else "training-free"
        return {"line": self.line, "scheme": scheme, "regime": regime, "mount": self.mount, "length": self.length}


def schemes_at_lengths(
    schemes: Sequence[str | Scheme], lengths: Sequence[int], model: MeasuredModel
) -> list[SchemeAtLength]:
    """Pair every scheme with every length, with all defaults filled in, and check each against the model before
    anything runs.

    Raises:
        EvaluationError: there are no schemes, or duplicates, or a length exceeds the model's position table.
        AlreadyPatched: the model has another scheme.
        UnknownScheme, InvalidField, SlotConflict, UnsupportedModel, NothingToPatch: a scheme does not fit the model.

    Warns:
        RopePatchWarning: a scheme changes nothing at a length beyond L or at every length, or reaches less far than the
            checkpoint does today.
    """
    lines = [str(spec) for spec in schemes]
    if not lines:
        raise EvaluationError("no schemes were given; give at least one, such as 'plain'")
    if twice := {line for line in lines if lines.count(line) > 1}:
        raise EvaluationError(f"scheme {min(twice)!r} is listed twice")
    once = [min(model.training_length, lengths[-1])]
    jobs = [_checked(one, n, model) for one in schemes for n in (once if str(one) in CONTROLS else lengths)]
    for line, words in {job.line: job.warning for job in jobs if job.warning}.items():
        warnings.warn(f"{line}: {words}", RopePatchWarning, stacklevel=3)
    idle = {job.line: job.length for job in jobs if job.idle and job.line not in REFERENCES}
    for line, longest in idle.items():
        if longest > model.training_length or longest == lengths[-1]:
            plain = "its rows up to there equal those of the plain checkpoint"
            warnings.warn(
                f"{line} changes nothing in texts of up to {longest} tokens: {plain}", RopePatchWarning, stacklevel=3
            )
    return jobs


def _checked(spec: str | Scheme, length: int, model: MeasuredModel) -> SchemeAtLength:
    stack, table = model.stacks[0], model.stacks[0].absolute
    checkpoints = [stack.checkpoint for stack in model.stacks]
    scheme = reached(spec, checkpoints) if isinstance(spec, Scheme) else scheme_at(spec, length, checkpoints)
    if model.carried is not None and not model.carries(scheme):
        kind = type(model.carried.model).__name__
        raise AlreadyPatched(f"{kind} carries {model.carried.scheme}; unpatch it before measuring {spec}")
    if scheme is None and table is not None and length > table.capacity:
        raise EvaluationError(
            f"{spec} at {length} tokens: {type(stack.module).__name__} has {table.capacity} positions; measure longer "
            "texts under a scheme alone, without references (--no-references)"
        )
    if scheme is not None and len(model.stacks) == 1:  # else the defaults of the parts differ
        scheme = resolved(scheme, stack.checkpoint)
    mounted: Sequence[tuple[Stack, Plan]] = ()
    if model.carried is not None:
        mounted = model.carried.mounted
    elif scheme is not None:
        mounted = [(stack, plan_mounts(scheme, stack)) for stack in model.stacks]
    mount = mounted[0][1].mounts() if mounted else "none"
    idle, warning = bool(mounted) and changes_nothing(mounted, length), ""
    if scheme is not None and model.carried is None and "target=auto" not in str(spec):
        warning = shortened(scheme, stack.checkpoint)
    return SchemeAtLength(str(spec), scheme, mount, length, idle, warning)
