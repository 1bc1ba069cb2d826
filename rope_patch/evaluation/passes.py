"""What has to be run for a table: every scheme at every length, checked against the model before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.errors import AlreadyPatched, EvaluationError
from rope_patch.evaluation.protocols import Cell, Protocol
from rope_patch.evaluation.specs import scheme_at
from rope_patch.models.base import Stack
from rope_patch.models.config import rope_entries
from rope_patch.mounts import plan_mounts
from rope_patch.patch import PatchHandle
from rope_patch.schemes import Scheme


@dataclass(frozen=True)
class Pass:
    """One scheme at one context length: what one forward pass per window measures.

    Attributes:
        line: the scheme as the table names it.
        scheme: with all defaults filled in; None for the plain checkpoint.
        mount: where it will be mounted, or is.
        length: tokens of context.
        cells: what the pass fills.
    """

    line: str
    scheme: Scheme | None
    mount: str
    length: int
    cells: tuple[Cell, ...]


def plan_passes(
    schemes: Sequence[str | Scheme],
    protocol: Protocol[Any],
    stacks: Sequence[Stack],
    carried: PatchHandle | None = None,
) -> list[Pass]:
    """Every scheme at every length of a protocol.

    Args:
        schemes: objects or strings, see `scheme_at`.
        protocol: says the lengths and the cells.
        stacks: of the model, as they are without a scheme.
        carried: what the model carries already, which is then all that may be asked for.

    Raises:
        EvaluationError: there are no schemes, or one twice, or one that cannot be measured at these lengths.
        AlreadyPatched: the model carries another scheme.
        UnknownScheme, InvalidField, SlotConflict, UnsupportedModel, NothingToPatch: a scheme is not right for it.
    """
    if not schemes:
        raise EvaluationError("no schemes were given; give at least one, such as 'plain'")
    lines = [str(spec) for spec in schemes]
    if twice := {line for line in lines if lines.count(line) > 1}:
        raise EvaluationError(f"scheme {sorted(twice)[0]!r} is there twice")
    passes = []
    for line, spec in zip(lines, schemes, strict=True):
        for length, cells in protocol.cells():
            scheme = spec if isinstance(spec, Scheme) else scheme_at(spec, length, stacks[0].training_length)
            if carried is not None:
                check_carried(scheme, line, carried)
            if scheme is not None and len(stacks) == 1:
                scheme = scheme.resolve(stacks[0].checkpoint)  # else the defaults of each part are its own
            check_length(line, scheme, length, protocol, stacks[0])
            passes.append(Pass(line, scheme, _mount(scheme, stacks, carried), length, cells))
    return passes


def check_carried(scheme: Scheme | None, line: str, carried: PatchHandle) -> None:
    """A patched model is measured as it is, so it must carry what is asked for, defaults filled in or not.

    Raises:
        AlreadyPatched: it carries something else.
    """
    checkpoints = [stack.checkpoint for stack, _ in carried.mounted]
    if scheme is None or any(scheme.resolve(of) != carried.scheme.resolve(of) for of in checkpoints):
        raise AlreadyPatched(
            f"{type(carried.model).__name__} carries {carried.scheme}; unpatch it before measuring {line}"
        )


def check_length(line: str, scheme: Scheme | None, length: int, protocol: Protocol[Any], stack: Stack) -> None:
    """Whether a scheme means something at a length.

    Raises:
        EvaluationError: one pass cannot stand for shorter texts, or the model's table of positions ends before.
    """
    if protocol.one_pass and _follows_length(scheme, stack):
        raise EvaluationError(
            f"{line} depends on the length of the text, so one pass at {length} tokens says nothing of shorter ones; "
            "use protocol 'last'"
        )
    table = stack.absolute
    if scheme is None and table is not None and length > table.capacity:
        raise EvaluationError(
            f"{line} at {length} tokens: {type(stack.module).__name__} has {table.capacity} positions; measure longer "
            "texts under a scheme alone, without references (--no-references)"
        )


def _mount(scheme: Scheme | None, stacks: Sequence[Stack], carried: PatchHandle | None) -> str:
    if carried is not None:
        return carried.plan.mounts()
    if scheme is None:
        return "none"
    first, *_ = [plan_mounts(scheme, stack).mounts() for stack in stacks]  # planned for all, so that all are checked
    return first


def _follows_length(scheme: Scheme | None, stack: Stack) -> bool:
    if scheme is not None and "frequencies" in scheme.slots:
        return scheme.length_dependent
    if not stack.rotary:
        return False
    types = {entry.get("rope_type") for entry in rope_entries(stack.config).values()}
    return bool(types & {"dynamic", "longrope"})
