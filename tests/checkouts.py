"""Runs a module of these tests on the package of another checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

_START = """
import runpy, sys
package, tests, module, *arguments = sys.argv[1:]
sys.path.insert(0, package)
import rope_patch
assert rope_patch.__file__.startswith(package + "/"), rope_patch.__file__
sys.path[0] = tests
sys.argv[1:] = arguments
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def run(module: str, root: Path, *arguments: str) -> str:
    """What `python -m module` of these tests prints, with the `rope_patch` of the checkout `root`."""
    paths = [str(root.resolve()), str(ROOT)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", _START, *paths, module, *arguments]
    return subprocess.run(command, env=one_thread, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
