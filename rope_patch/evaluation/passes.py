"""What has to be run for a table: every scheme at every length, checked against the model before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.errors import AlreadyPatched, EvaluationError
from rope_patch.evaluation.protocols import Cell, Protocol
from rope_patch.evaluation.specs import PLAIN, scheme_at
from rope_patch.evaluation.subject import Subject
from rope_patch.models.base import Stack
from rope_patch.models.config import rope_entries
from rope_patch.mounting.plan import plan_mounts
from rope_patch.patching import PatchHandle
from rope_patch.schemes import Scheme


@dataclass(frozen=True)
class Column:
    """One scheme at one context length: what is measured under one patch.

    Attributes:
        line: the scheme as the table names it.
        scheme: with all defaults filled in; None for the plain checkpoint.
        mount: where it will be mounted, or is.
        length: tokens of context.
    """

    line: str
    scheme: Scheme | None
    mount: str
    length: int

    @property
    def fields(self) -> dict[str, Any]:
        """What its rows say of it."""
        return {
            "line": self.line,
            "scheme": self.scheme.to_dict() if self.scheme else {"name": PLAIN},
            "regime": self.scheme.regime if self.scheme else "training-free",
            "mount": self.mount,
            "length": self.length,
        }


@dataclass(frozen=True)
class Pass(Column):
    """What one forward pass per window measures.

    Attributes:
        cells: what the pass fills.
    """

    cells: tuple[Cell, ...]


def plan_columns(schemes: Sequence[str | Scheme], lengths: Sequence[int], subject: Subject) -> list[Column]:
    """Every scheme at every length.

    Args:
        schemes: objects or strings, see `scheme_at`; what the model carries already is all that may be asked of it.
        lengths: in tokens.
        subject: the model.

    Raises:
        EvaluationError: there are no schemes, or one twice, or the model's table of positions ends before a length.
        AlreadyPatched: the model carries another scheme.
        UnknownScheme, InvalidField, SlotConflict, UnsupportedModel, NothingToPatch: a scheme is not right for it.
    """
    if not schemes:
        raise EvaluationError("no schemes were given; give at least one, such as 'plain'")
    lines = [str(spec) for spec in schemes]
    if twice := {line for line in lines if lines.count(line) > 1}:
        raise EvaluationError(f"scheme {sorted(twice)[0]!r} is there twice")
    columns = []
    for line, spec in zip(lines, schemes, strict=True):
        for length in lengths:
            scheme = spec if isinstance(spec, Scheme) else scheme_at(spec, length, subject.training_length)
            if subject.carried is not None:
                _check_carried(scheme, line, subject.carried)
            if scheme is None:
                _check_table(line, length, subject.stacks[0])
            elif len(subject.stacks) == 1:  # else the defaults of each part are its own
                scheme = scheme.resolve(subject.stacks[0].checkpoint)
            columns.append(Column(line, scheme, _mount(scheme, subject), length))
    return columns


def plan_passes(schemes: Sequence[str | Scheme], protocol: Protocol[Any], subject: Subject) -> list[Pass]:
    """Every scheme at every length of a protocol.

    Args:
        schemes: names, strings such as `rerope:window=128+logn`, or schemes.
        protocol: says which lengths, and whether one pass serves them all.
        subject: the model.

    Raises:
        EvaluationError: one pass cannot stand for shorter texts; and see `plan_columns`.
        RopePatchError: see `plan_columns`.
    """
    cells = dict(protocol.cells())
    columns = plan_columns(schemes, list(cells), subject)
    for column in columns:
        if protocol.one_pass and _follows_length(column.scheme, subject.stacks[0]):
            raise EvaluationError(
                f"{column.line} depends on the length of the text, so one pass at {column.length} tokens says nothing "
                "of shorter ones; use protocol 'last'"
            )
    return [Pass(**vars(column), cells=cells[column.length]) for column in columns]


def _check_carried(scheme: Scheme | None, line: str, carried: PatchHandle) -> None:
    """A patched model is measured as it is, so it must carry what is asked for, defaults filled in or not."""
    checkpoints = [stack.checkpoint for stack, _ in carried.mounted]
    if scheme is None or any(scheme.resolve(of) != carried.scheme.resolve(of) for of in checkpoints):
        raise AlreadyPatched(
            f"{type(carried.model).__name__} carries {carried.scheme}; unpatch it before measuring {line}"
        )


def _check_table(line: str, length: int, stack: Stack) -> None:
    """Without a scheme a table of positions is read as far as it goes."""
    table = stack.absolute
    if table is not None and length > table.capacity:
        raise EvaluationError(
            f"{line} at {length} tokens: {type(stack.module).__name__} has {table.capacity} positions; measure longer "
            "texts under a scheme alone, without references (--no-references)"
        )


def _mount(scheme: Scheme | None, subject: Subject) -> str:
    if subject.carried is not None:
        return subject.carried.plan.mounts()
    if scheme is None:
        return "none"
    first, *_ = [plan_mounts(scheme, stack).mounts() for stack in subject.stacks]  # all, so that all are checked
    return first


def _follows_length(scheme: Scheme | None, stack: Stack) -> bool:
    if scheme is not None and "frequencies" in scheme.slots:
        return scheme.length_dependent
    if not stack.rotary:
        return False
    types = {entry.get("rope_type") for entry in rope_entries(stack.config).values()}
    return bool(types & {"dynamic", "longrope"})
