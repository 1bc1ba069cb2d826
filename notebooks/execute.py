"""Execute the notebooks of this folder, each in a fresh kernel.

    python notebooks/execute.py              # all of them, in place: their outputs are renewed
    python notebooks/execute.py 02 05        # those whose names begin so; the path of an .ipynb will do as well
    python notebooks/execute.py --fast       # small values where a notebook has them; nothing is written

The values in the cell tagged `parameters` make a notebook slow. Small values are in its metadata, under
`rope_patch.fast`, and `--fast` assigns them in a cell of their own behind that cell. A notebook that fails is left as
it was, the others still run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

FOLDER = Path(__file__).resolve().parent
SECONDS_PER_CELL = 900

QUIET = {  # kernel messages that have nothing to do with the notebook, and the network, which none needs
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm, where there are no widgets
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


class NotebookError(Exception):
    """A notebook that did not run to its end; the message names the cell."""


def main() -> int:
    """Returns the exit code: 1 where a notebook failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the beginning of a name, or a path; default: all")
    parser.add_argument("--fast", action="store_true", help="with fast values, writing nothing")
    arguments = parser.parse_args()
    try:
        paths = find(arguments.names)
    except FileNotFoundError as error:
        parser.error(str(error))
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    failures = [failure for path in paths if (failure := attempt(path, fast=arguments.fast))]
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    return 1 if failures else 0


def find(names: Sequence[str]) -> list[Path]:
    """The notebooks that these words name; all of the folder where there are none.

    Raises:
        FileNotFoundError: a word names none.
    """
    here = sorted(FOLDER.glob("*.ipynb"))
    found: list[Path] = []
    for name in names or [""]:
        path = Path(name)
        matches = [path] if path.suffix == ".ipynb" and path.is_file() else [p for p in here if p.stem.startswith(name)]
        if not matches:
            known = ", ".join(path.stem for path in here)
            raise FileNotFoundError(f"no notebook {name!r}; there are {known or 'none'}")
        found += [match for match in matches if match not in found]
    return found


def attempt(path: Path, *, fast: bool) -> str | None:
    """Execute one notebook and say how long it took; what went wrong, if anything did, as one line."""
    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    try:
        if fast:
            execute(with_fast_values(notebook), path.parent)
        else:
            execute(notebook, path.parent)
            nbformat.write(notebook, path)
    except NotebookError as error:
        return f"{path.stem}: {error}"
    print(f"{path.stem}: {time.perf_counter() - start:.0f} s", flush=True)
    return None


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run every cell with `folder` as the working folder; outputs and execution counts are filled in, nothing else.

    Raises:
        NotebookError: a cell failed, took too long, or ended the kernel.
    """
    metadata = copy.deepcopy(notebook.metadata)  # the client would write down the version of this Python
    reached = ["before the first cell"]
    client = NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
        on_cell_start=lambda cell, cell_index: reached.append(f"cell {cell.id!r}"),
        extra_arguments=["--log-level=ERROR"],  # of the kernel, which prints to the terminal
    )
    try:
        client.execute()
    except CellExecutionError as error:
        print(error.traceback, file=sys.stderr)
        raise NotebookError(f"{reached[-1]}: {error.ename}: {error.evalue}") from error
    except (CellControlSignal, DeadKernelError) as error:
        raise NotebookError(f"{reached[-1]}: {type(error).__name__}: {error}") from error
    finally:
        notebook.metadata = metadata


def with_fast_values(notebook: NotebookNode) -> NotebookNode:
    """The notebook with its fast values assigned behind the cell tagged `parameters`.

    Raises:
        NotebookError: it has fast values and no such cell.
    """
    values = notebook.metadata.get("rope_patch", {}).get("fast", {})
    tagged = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    if values and not tagged:
        raise NotebookError("there are fast values in its metadata, but no cell is tagged `parameters`")
    if values:
        source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
        notebook.cells.insert(tagged[0] + 1, new_code_cell(source, id="fast-values"))
    return notebook


if __name__ == "__main__":
    sys.exit(main())
