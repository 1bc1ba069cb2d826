"""Figures of a checkout that its source shows: each is a list of places, so that you can see what was counted."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KITCHEN = ("attention", "mounting")
"""Folders between the projections of a layer and its output."""

FunctionNode = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Place:
    """A definition in a file, whose name is that of the classes and functions around it and its own."""

    file: str
    name: str
    node: ast.AST

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"


class Source:
    """The package of a checkout."""

    def __init__(self, root: Path) -> None:
        package = root / "rope_patch"
        self.files = {str(path.relative_to(package)): path.read_text() for path in sorted(package.rglob("*.py"))}
        self.trees = {file: ast.parse(text) for file, text in self.files.items()}

    def definitions(self, *folders: str) -> Iterator[Place]:
        """Every class and function of some folders or files; of all files without any."""
        for file, tree in self.trees.items():
            if not folders or file.startswith(folders):
                yield from _definitions(file, tree)

    def functions(self, *folders: str) -> Iterator[Place]:
        """Every function and method of some folders or files."""
        return (place for place in self.definitions(*folders) if isinstance(place.node, FunctionNode))

    def classes(self, *folders: str) -> Iterator[Place]:
        """Every class of some folders or files."""
        return (place for place in self.definitions(*folders) if isinstance(place.node, ast.ClassDef))


def _definitions(file: str, node: ast.AST, around: str = "") -> Iterator[Place]:
    for child in ast.iter_child_nodes(node):
        name = around
        if isinstance(child, (*FunctionNode, ast.ClassDef)):
            name = f"{around}.{child.name}".lstrip(".")
            yield Place(file, name, child)
        yield from _definitions(file, child, name)


def own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a definition, without those of definitions inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FunctionNode, ast.ClassDef)):
            yield child
            yield from own(child)


def last(node: ast.AST) -> str:
    """The last name of a dotted one; empty for another expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def called(node: ast.AST) -> Iterator[str]:
    """The last names of what a definition calls itself."""
    return (last(each.func) for each in own(node) if isinstance(each, ast.Call))


# functions that choose

ASKS = re.compile(r"_*(supports|applies|takes|suits|kernel_for|choose|rows_for)")
ATTENDS = re.compile(r"_*(attend|score|segments|attend_\w+|by_(one|kernel|blocks|rows|request)\w*)")
CONDITIONS = (ast.If, ast.IfExp, ast.BoolOp)


def choosing(source: Source) -> list[Place]:
    """Functions that choose how a call is computed. They say whether or why not: `supports`, what `Needs` is given as
    `further`, and what a `Row` is given as `unless`. They return what computes it: `kernel_for`. They attend, or return
    None where another has to. Or they name two functions that attend, one of them under a condition.
    """
    calls = [node for tree in source.trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    words = [word for node in calls for word in node.keywords if word.arg in ("unless", "further")]
    rows = [node.args[1] for node in calls if last(node.func) == "Row" and len(node.args) > 1]
    preferring = {last(argument) for argument in (*rows, *(word.value for word in words))}

    def ways(node: ast.AST) -> set[str]:
        return {ast.unparse(each) for each in [node, *own(node)] if ATTENDS.fullmatch(last(each))}

    def chooses(place: Place) -> bool:
        name = place.name.rpartition(".")[2]
        if ASKS.fullmatch(name) or name in preferring:
            return True
        if ATTENDS.fullmatch(name) and _returns(place).endswith("| None"):
            return any(isinstance(node, ast.IfExp | ast.Return) and _is_none(node) for node in own(place.node))
        under_conditions = [node for node in own(place.node) if isinstance(node, CONDITIONS) and ways(node)]
        return len(ways(place.node)) > 1 and bool(under_conditions)

    found = [place for place in source.functions(*KITCHEN) if chooses(place)]
    names = {(place.file, place.name) for place in found}
    return [place for place in found if (place.file, place.name.rpartition(".")[0]) not in names]  # not those inside


def _returns(place: Place) -> str:
    annotation = place.node.returns  # type: ignore[attr-defined]
    return "" if annotation is None else ast.unparse(annotation)


def _is_none(node: ast.IfExp | ast.Return) -> bool:
    ends = (node.body, node.orelse) if isinstance(node, ast.IfExp) else (node.value,)
    return any(end is None or (isinstance(end, ast.Constant) and end.value is None) for end in ends)


def compiling(source: Source) -> list[str]:
    """Files that ask whether a compiler traces the call."""
    return [file for file, tree in source.trees.items() if any(last(node) == "is_compiling" for node in ast.walk(tree))]


# what is remembered by a key

REMEMBERS = {"once", "derived", "same", "known", "_shared", "_ahead"}


def memos(source: Source) -> list[str]:
    """Places that remember something by a key that is a string or has one in it: `cache.once("identity", ...)`. A key
    with a name is looked up where the function assigns it; one that the function is given counts where it comes from.
    """
    found = []
    for place in source.functions(*KITCHEN, "models"):
        nodes = list(own(place.node))
        values = dict(pair for node in nodes if isinstance(node, ast.Assign) for pair in _assigned(node))
        for node in nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in REMEMBERS and node.args and _has_string(node.args[0], values):
                found.append(f"{place}: {ast.unparse(node.func)}({ast.unparse(node.args[0])})")
    return found


def _assigned(node: ast.Assign) -> list[tuple[str, ast.AST]]:
    """The names that a statement assigns, with their values: `a = 1` and `a, b = 1, 2`."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return [(last(name), part) for name, part in zip(target.elts, value.elts, strict=False)]
    return [(last(target), value)]


def _has_string(key: ast.AST, values: dict[str, ast.AST]) -> bool:
    names = [node for node in ast.walk(key) if isinstance(node, ast.Name)]
    keys = [key, *(values[node.id] for node in names if node.id in values)]
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) for each in keys for node in ast.walk(each)
    )


# ways to rotate

TURNS = {"rotate", "rotate_wide", "turn", "turned", "_product", "rotations", "_apply", "query_rotation"}
TABLES = re.compile(r"cos|sin|cosine|sine|matrix|matrices|cos_\w+|sin_\w+")


def rotations(source: Source) -> list[Place]:
    """Functions that rotate states: they multiply by a cosine, a sine or a matrix of rotations. One that only hands
    states and tables to such a function is not counted.
    """

    def multiplies(node: ast.AST) -> bool:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult | ast.MatMult):
            return False
        return any(TABLES.fullmatch(last(side)) for side in (node.left, node.right))

    def turns(place: Place) -> bool:
        nodes = list(own(place.node))
        return any(map(multiplies, nodes))

    folders = (*KITCHEN, "schemes/tools/rotary.py", "models/baichuan", "serving")
    return [place for place in source.functions(*folders) if turns(place)]


def turning(source: Source) -> list[Place]:
    """Functions that have states rotated: they call `rotate`, or a rotation that they were given."""
    return [place for place in source.functions(*KITCHEN) if TURNS & {*called(place.node)}]


# softmax(Q K^T) V

KERNELS = re.compile(r"softmax|logsumexp|exp2|scaled_dot_product_attention|_?(scaled_dot_product|flash_attention)_\w+")


def softmaxes(source: Source) -> list[Place]:
    """Functions that compute softmax(Q K^T) V, or its weights: they call a kernel for it, or a softmax."""

    def attends(place: Place) -> bool:
        if place.name.rpartition(".")[2].lstrip("_").startswith("backward"):
            return False
        return any(KERNELS.fullmatch(name) and "backward" not in name for name in called(place.node))

    return [place for place in source.functions(*KITCHEN, "models/baichuan", "models/paged") if attends(place)]


# records of a call

QUERY, KEY, VALUE = {"q", "query", "queries"}, {"k", "key", "keys"}, {"v", "value", "values"}
POSITIONS = {"positions", "position_ids", "query_positions", "query_at", "places"}
MASK = {"mask", "tokens", "seen", "groups", "visibility", "segments", "segment_ids"}


def records(source: Source) -> list[Place]:
    """Classes whose fields describe a call: two of its queries, keys and values, or its positions and who sees whom.
    Classes count with the fields that they inherit.
    """
    found = list(source.classes(*KITCHEN))
    by_name = {place.name: place for place in found}

    def fields(place: Place) -> set[str]:
        node = place.node
        names = {last(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}  # type: ignore[attr-defined]
        for base in node.bases:  # type: ignore[attr-defined]
            if last(base) in by_name:
                names |= fields(by_name[last(base)])
        return names

    def describes(place: Place) -> bool:
        names = fields(place)
        states = sum(bool(names & each) for each in (QUERY, KEY, VALUE))
        return states > 1 or bool(names & POSITIONS and names & MASK)

    return [place for place in found if describes(place)]


# who sees whom

SEEING_CLASS = re.compile(r"_?\w*(Masks?|Groups|Span|Tile|Visib\w+|Interval|SegmentIds)")
SEEING_FUNCTION = re.compile(
    r"_*(mask|masks|visible|visibility|hide|hides|hidden|contains|bounds|intervals|sees|added)"
)


def forms_of_seeing(source: Source) -> list[Place]:
    """Ways to say who sees whom: classes that are named after it, and functions that answer it for pairs or slots."""

    def says(place: Place) -> bool:
        name = place.name.rpartition(".")[2]
        return bool((SEEING_CLASS if isinstance(place.node, ast.ClassDef) else SEEING_FUNCTION).fullmatch(name))

    folders = (*KITCHEN, "models/paged.py", "schemes/slots.py")
    return [place for place in source.definitions(*folders) if says(place)]


def lines(source: Source) -> dict[str, int]:
    """Lines of each folder, and of the files beside them."""
    found: dict[str, int] = {}
    for file, text in source.files.items():
        folder = file.split("/")[0] if "/" in file else "(beside)"
        found[folder] = found.get(folder, 0) + len(text.splitlines())
    return found


FIGURES: dict[str, Callable[[Source], list[Any]]] = {
    "functions that choose how to compute": choosing,
    "files that ask is_compiling()": compiling,
    "places that remember by a string": memos,
    "functions that multiply by cos, sin or a matrix": rotations,
    "functions that have states rotated": turning,
    "implementations of softmax(QK^T)V": softmaxes,
    "records of a call": records,
    "ways to say who sees whom": forms_of_seeing,
    "classes": lambda source: list(source.classes(*KITCHEN)),
}
"""Figure to the places that it counts."""
