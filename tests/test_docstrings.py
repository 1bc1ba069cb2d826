"""Every public name documents what it does, what it takes, which shapes, and what it raises.

Public is what does not begin with an underscore: the functions and classes of every module of the library, and the
methods and properties of those classes. What each of them owes, checked in the source alone:

- a docstring, its own or that of the method or attribute of a base class that it overrides: the slots of a scheme
  are documented once, in `Scheme`;
- on the public face, which is all that an `__all__` names: every parameter and every field of a dataclass in `Args:` or
  `Attributes:`, or by its name in backquotes. A method may leave that to its class, a class to its base, and a method
  to the class that it refers to. Elsewhere an argument that its name explains needs no entry that repeats the name;
- a shape in backquotes, such as `(batch, heads, q_len, head_dim)`, or the words scalar or shape, where a tensor is
  taken, returned or held;
- in `Raises:`, every error of the library that its own body raises, or a base of that error.

Not looked at: constants, magic methods, and the `Options` of commands.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.test_architecture import MODULES

SECTION = re.compile(r"(Args|Attributes|Class attributes|Returns|Yields|Raises):", re.MULTILINE)
ENTRY = re.compile(r"^ {4}((?:\*{0,2}\w+(?:, )?)+)(?: \(.*?\))?:", re.MULTILINE)
SHAPE = re.compile(r"`\([^`]*,[^`]*\)`|\bscalars?\b|\bshapes?\b")
"""Annotations that leave open what an argument means, its unit or its shape."""


@dataclass
class Text:
    """A docstring in its sections."""

    whole: str
    sections: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        _, *rest = re.split(rf"^{SECTION.pattern}$", self.whole, flags=re.MULTILINE)
        self.sections = {}
        for title, content in zip(rest[::2], rest[1::2], strict=True):  # a title comes again with every base
            self.sections[title] = self.sections.get(title, "") + content

    def names(self) -> set[str]:
        """What is listed, or quoted in backquotes."""
        listed = "".join(self.sections.get(name, "") for name in ("Args", "Attributes", "Class attributes"))
        entries = {name.lstrip("*") for found in ENTRY.findall(listed) for name in found.split(", ")}
        quoted = " ".join(re.findall(r"`([^`]*)`", self.whole))
        return entries | set(re.findall(r"\w+", quoted))


@dataclass
class Name:
    """A public class, function or method."""

    module: str
    node: ast.ClassDef | ast.FunctionDef
    owner: str = ""

    @property
    def qualified(self) -> str:
        """As in a traceback."""
        return ".".join(filter(None, [self.owner, self.node.name]))

    @property
    def on_the_face(self) -> bool:
        """Whether an `__all__` names it, or the class that it is a method of."""
        return (self.module, self.qualified.partition(".")[0]) in FACE

    def text(self) -> Text:
        """Its docstring, and after it those that it may lean on."""
        classes = self.classes()
        if isinstance(self.node, ast.FunctionDef):
            said = re.findall(r"[Ss]ee `(\w+)", doc(self.node))
            classes += [node for (_, name), node in CLASSES.items() if name in said]
        same = [method for node in classes for method in methods(node) if method.name == self.node.name]
        return Text("\n\n".join(map(doc, (self.node, *same, *classes))))

    def classes(self) -> list[ast.ClassDef]:
        """The class that it is, or is of, and the bases of that."""
        name = self.qualified.partition(".")[0]
        return [CLASSES[key] for key in lineage(self.module, name)]

    def has_docstring(self) -> bool:
        """Its own, or that of what it overrides."""
        return bool(doc(self.node)) or any(self.node.name in members_of(base) for base in self.classes()[1:])

    def parameters(self) -> dict[str, str]:
        """Annotations by name, of a class those of its fields or of its constructor."""
        if isinstance(self.node, ast.FunctionDef):
            return arguments(self.node, skip=bool(self.owner) and "staticmethod" not in decorators(self.node))
        found = {
            line.target.id: ast.unparse(line.annotation)
            for line in self.node.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
        found = {name: hint for name, hint in found.items() if "ClassVar" not in hint and hint != "KW_ONLY"}
        for method in methods(self.node):
            if method.name == "__init__":
                found |= arguments(method, skip=True)
        return {name: hint for name, hint in found.items() if not name.startswith("_")}

    def holds_tensors(self) -> bool:
        """Whether an annotation names one."""
        returned = self.node.returns if isinstance(self.node, ast.FunctionDef) else None
        hints = [*self.parameters().values(), ast.unparse(returned) if returned else ""]
        return any(re.search(r"\bTensor\b", hint) for hint in hints)

    def raised(self) -> set[str]:
        """The library's own errors that its body raises."""
        if isinstance(self.node, ast.ClassDef):
            return set()
        found = (node.exc for node in own_statements(self.node) if isinstance(node, ast.Raise) and node.exc)
        names = (ast.unparse(exc.func if isinstance(exc, ast.Call) else exc).rpartition(".")[2] for exc in found)
        return {name for name in names if ("rope_patch.errors", "RopePatchError") in lineage(self.module, name)}


def doc(node: ast.ClassDef | ast.FunctionDef) -> str:
    return ast.get_docstring(node) or ""


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef)]


def decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(item) for item in node.decorator_list}


def arguments(node: ast.FunctionDef, skip: bool) -> dict[str, str]:
    """Annotations by name, without the first argument where it is to be skipped."""
    every = node.args
    found = [*every.posonlyargs, *every.args][1 if skip else 0 :]
    found += [*every.kwonlyargs, *filter(None, (every.vararg, every.kwarg))]
    return {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in found if not a.arg.startswith("_")}


def own_statements(node: ast.FunctionDef) -> Iterator[ast.AST]:
    """Without those of functions inside."""
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        item = waiting.pop()
        if not isinstance(item, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield item
            waiting += ast.iter_child_nodes(item)


TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}
CLASSES = {
    (module, node.name): node for module, tree in TREES.items() for node in tree.body if isinstance(node, ast.ClassDef)
}
IMPORTS = {
    module: {alias.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    for module, tree in TREES.items()
}


def lineage(module: str, name: str) -> list[tuple[str, str]]:
    """A class as a module knows it, and the classes of the library that it derives from, nearest first."""
    while (module, name) not in CLASSES:
        module = IMPORTS[module].get(name, "")
        if module not in TREES:
            return []
    bases = (ast.unparse(base).partition("[")[0] for base in CLASSES[module, name].bases)
    return [(module, name), *(key for base in bases for key in lineage(module, base))]


def members_of(node: ast.ClassDef) -> set[str]:
    """What a class documents: methods with a docstring, and the attributes it lists."""
    return {method.name for method in methods(node) if doc(method)} | Text(doc(node)).names()


def face() -> set[tuple[str, str]]:
    """Module and name of everything that an `__all__` names."""
    found = set()
    for module, tree in TREES.items():
        if any(isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__all__" for line in tree.body):
            package = importlib.import_module(module)
            things = [getattr(package, name) for name in package.__all__]
            found |= {(thing.__module__, thing.__name__) for thing in things if hasattr(thing, "__name__")}
    return found


FACE = face()


def public(module: str) -> Iterator[Name]:
    for node in TREES[module].body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield Name(module, node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in methods(node):
                if not method.name.startswith("_") and not any(d.endswith(".setter") for d in decorators(method)):
                    yield Name(module, method, node.name)


def owed(name: Name) -> Iterator[str]:
    """What the docstring of a name does not say and should."""
    if not name.has_docstring():
        yield "a docstring"
        return
    text, parameters = name.text(), name.parameters()
    if name.on_the_face and (missing := sorted(parameters.keys() - text.names())):
        yield f"the arguments {', '.join(missing)}"
    if name.holds_tensors() and not SHAPE.search(text.whole):
        yield "a shape"
    said = text.sections.get("Raises", "")
    for error in sorted(name.raised()):
        if not any(re.search(rf"\b{word}\b", said) for _, word in lineage(name.module, error)):
            yield f"that it raises {error}"


def is_options(name: Name) -> bool:
    """Whether it holds the options of a command, each of which has a comment that `--help` shows."""
    return name.module.startswith("rope_patch.cli.") and name.node.name in ("Options", "Measured")


@pytest.mark.parametrize("module", MODULES)
def test_public_names_say_what_they_owe(module):
    for name in public(module):
        missing = [] if is_options(name) else list(owed(name))
        assert not missing, f"{module}.{name.qualified} (line {name.node.lineno}) does not say {'; '.join(missing)}"


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("def f(): pass", ["a docstring"]),
        ('def f(a, b):\n    """Of `a` and `b`."""', []),
        ('def f(a, b, c):\n    """Of `a` and\n\n    Args:\n        b: x.\n    """', ["the arguments c"]),
        ('def f(a: Tensor):\n    """Of `a`."""', ["a shape"]),
        ('def f(a: Tensor):\n    """Of `a`, `(batch, length)`."""', []),
        ('def f():\n    """It."""\n    raise InvalidField("no")', ["that it raises InvalidField"]),
        ('def f():\n    """It.\n\n    Raises:\n        RopePatchError: so.\n    """\n    raise InvalidField("no")', []),
    ],
)
def test_what_is_missing_is_seen(source, missing, monkeypatch):
    monkeypatch.setattr(Name, "on_the_face", True)
    (node,) = ast.parse(source).body
    assert list(owed(Name("rope_patch.errors", node))) == missing
