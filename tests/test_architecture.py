"""The house: floors, sizes, and that importing does nothing."""

from __future__ import annotations

import ast
import functools
import graphlib
import sys
from pathlib import Path

import pytest

import rope_patch
from rope_patch import list_schemes
from rope_patch.schemes import scheme_class
from tests.floors import floor_of

PACKAGE = Path(rope_patch.__file__).parent
ROOT = PACKAGE.parent
DOCTOR = PACKAGE / "doctor"
"""Published alone under another name, so its imports of itself are relative."""

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

TRANSFORMERS = {"models", "mounting", "context_parallel", "saving", "patching", "evaluation", "serving", "training"} | {
    "naming"
}
"""Parts that may import Transformers."""

SCHEME_TOOLS = {f"rope_patch.schemes.{name}" for name in ("base", "compose", "registry", "rules", "slots", "target")}
TOOLS = {module for module in MODULES if module.startswith("rope_patch.schemes.tools.")}


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Full names of every module that a file imports from, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or path.is_relative_to(DOCTOR), f"{path}: a relative import"
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *filter(None, [node.module])])
            # `from package import module` imports the module, `from module import name` does not
            inner = {f"{module}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES.keys()) or {module}
    return found


def scheme_files() -> list[str]:
    return [
        module
        for module in MODULES
        if module.startswith("rope_patch.schemes.") and module not in SCHEME_TOOLS and ".tools" not in module
    ]


def is_above(imported: str, module: str) -> bool:
    """Whether one module of the package is on a floor above another; the public names are `rope_patch`."""
    if imported == "rope_patch":
        return floor_of(module) <= floor_of("rope_patch.api")
    return imported.startswith("rope_patch.") and floor_of(imported) > floor_of(module)


def test_no_floor_imports_from_above():
    modules = [module for module in MODULES if module != "rope_patch"]
    assert not [
        f"{module} imports {imported}"
        for module in modules
        for imported in imports_of(MODULES[module])
        if is_above(imported, module)
    ]


def test_only_the_upper_floors_import_transformers():
    using = {
        module
        for module, path in MODULES.items()
        if any(imported.split(".")[0] == "transformers" for imported in imports_of(path))
    }
    assert not {module for module in using if module.split(".")[1] not in TRANSFORMERS}


def test_the_doctor_needs_the_standard_library_alone():
    files = sorted(DOCTOR.rglob("*.py"))
    assert len(files) > 10
    for path in files:
        outside = {name for name in imports_of(path) if not name.startswith("rope_patch.doctor")}
        assert {name.partition(".")[0] for name in outside} <= sys.stdlib_module_names, path
        absolute = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        assert "rope_patch" not in " ".join(ast.unparse(node) for node in absolute), f"{path} imports itself by name"


def test_a_scheme_imports_no_other_scheme():
    files = scheme_files()
    for module in files:
        assert not imports_of(MODULES[module]) & ({*files, "rope_patch.schemes"} - {module}), module


def test_attention_knows_no_concrete_scheme():
    for module in (module for module in MODULES if module.startswith("rope_patch.attention")):
        imported = {name for name in imports_of(MODULES[module]) if name.startswith("rope_patch.schemes")}
        assert imported <= {"rope_patch.schemes.base", "rope_patch.schemes.slots", *TOOLS}, module


def test_the_floors_are_checked_at_all():
    assert imports_of(MODULES["rope_patch.patching"]) >= {"rope_patch.mounting.plan", "rope_patch.errors"}
    assert floor_of("rope_patch.patching") > floor_of("rope_patch.models.base") > floor_of("rope_patch.schemes.base")


def in_order(imports: dict[str, set[str]]) -> list[str]:
    """The modules, each after those that it imports; a `CycleError` names a circle."""
    return list(graphlib.TopologicalSorter(imports).static_order())


def test_no_circles():
    in_order({module: imports_of(path) & MODULES.keys() - {module} for module, path in MODULES.items()})


def test_a_circle_would_be_named():
    with pytest.raises(graphlib.CycleError, match=r"'b', 'c', 'b'|'c', 'b', 'c'"):
        in_order({"a": {"b"}, "b": {"c"}, "c": {"b"}})


OUR_FILES = [
    path
    for folder in ("rope_patch", "recipes", "tools", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def test_no_file_is_long():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in OUR_FILES}
    assert not {path: count for path, count in lines.items() if count > 520}


def test_every_module_says_what_it_is_for():
    sources = {module: path.read_text() for module, path in MODULES.items() if not module.endswith("version")}
    assert not [
        module for module, source in sources.items() if source.strip() and not ast.get_docstring(ast.parse(source))
    ]


def test_every_scheme_has_an_oracle_of_its_own():
    for name in list_schemes():
        file = ROOT / "tests" / "schemes" / f"test_{scheme_class(name).__module__.rpartition('.')[2]}.py"
        assert file.is_file(), f"{name}: {file}"


def test_every_scheme_is_part_of_the_public_face():
    for name in list_schemes():
        assert scheme_class(name).__name__ in rope_patch.__all__
    assert all(hasattr(rope_patch, name) for name in rope_patch.__all__)
    assert rope_patch.__all__ == sorted(set(rope_patch.__all__), key=rope_patch.__all__.index)
