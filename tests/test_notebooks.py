"""The notebooks as they are kept, and the script that executes them. That they run is checked by `make notebooks`."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

FOLDER = Path(__file__).parents[1] / "notebooks"
LARGEST_FILE, LARGEST_OUTPUT = 700_000, 300_000  # bytes
OF_A_MACHINE = re.compile(r"(?<![\w.])/(tmp|work|home|root|Users|opt|mnt)\b|site-packages|\\Users\\")


@pytest.fixture(params=sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def notebook(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def names_assigned(source: str) -> set[str]:
    plain = "\n".join(line for line in source.splitlines() if not line.startswith("%"))
    stored = (node for node in ast.walk(ast.parse(plain)) if isinstance(node, ast.Name))
    return {node.id for node in stored if isinstance(node.ctx, ast.Store)}


def texts_of(notebook: NotebookNode) -> list[str]:
    """Everything in it that can be read: sources and outputs, without pictures."""
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    shown = [
        text for output in outputs for kind, text in output.get("data", {}).items() if not kind.startswith("image")
    ]
    printed = [output.text for output in outputs if output.output_type == "stream"]
    return [cell.source for cell in notebook.cells] + list(map(str, shown)) + printed


def test_it_is_a_notebook_with_nothing_in_it_that_a_machine_chose(notebook):
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.keys() <= {"kernelspec", "language_info", "rope_patch"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info == {"name": "python"}
    assert all(cell.metadata.keys() <= {"tags"} for cell in notebook.cells)
    assert all(re.fullmatch("[a-z][a-z0-9-]*", cell.id) for cell in notebook.cells)
    assert not [found.group() for text in texts_of(notebook) for found in OF_A_MACHINE.finditer(text)]


def test_it_was_executed_from_top_to_bottom_without_an_error_or_a_warning(notebook):
    cells = code_of(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


def test_what_the_text_says_with_an_error_was_printed_or_is_on_a_page(notebook):
    said = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    outputs = json.dumps([cell.outputs for cell in code_of(notebook)], ensure_ascii=False)
    known = outputs + "".join(page.read_text() for page in (FOLDER.parent / "docs").rglob("*.md"))
    figures = re.findall(r"(\d\.\d+) ± (\d\.\d+)", said)
    assert not [pair for pair in figures if not re.search("{} ?± ?{}".format(*map(re.escape, pair)), known)]


def test_it_is_small(path, notebook):
    assert path.stat().st_size < LARGEST_FILE
    assert all(len(json.dumps(output)) < LARGEST_OUTPUT for cell in code_of(notebook) for output in cell.outputs)


def test_its_fast_values_are_those_of_names_in_the_cell_of_parameters(notebook):
    tagged = [cell for cell in code_of(notebook) if "parameters" in cell.metadata.get("tags", [])]
    fast = notebook.metadata.get("rope_patch", {}).get("fast", {})
    assert len(tagged) <= 1
    assert fast.keys() <= {name for cell in tagged for name in names_assigned(cell.source)}


def test_the_readme_of_the_folder_lists_all_of_them():
    listed = re.findall(r"^\| \[.*\]\((.*\.ipynb)\)", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == sorted(path.name for path in FOLDER.glob("*.ipynb"))


def test_a_notebook_that_fails_is_named_with_its_cell_and_left_as_it_was(tmp_path):
    cells = [
        new_code_cell("STEPS = 1000", id="settings", metadata={"tags": ["parameters"]}),
        new_code_cell("print('before')", id="fine"),
        new_code_cell("raise ValueError(f'after {STEPS} steps')", id="broken"),
    ]
    failing = tmp_path / "failing.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata={"rope_patch": {"fast": {"STEPS": 2}}}), failing)
    before = failing.read_bytes()
    done = subprocess.run(
        [sys.executable, FOLDER / "execute.py", "--fast", failing], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "failing: cell 'broken': ValueError: after 2 steps"
    assert failing.read_bytes() == before
