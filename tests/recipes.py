"""Recipes as modules, and as commands of this process."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from rope_patch.cli.options import run


def load_recipe(name: str) -> ModuleType:
    """The module of `recipes/NAME.py`, the same that the command line loads."""
    return import_module(f"recipes.{name}")


def run_recipe(name: str, words: Sequence[str]) -> int:
    """The exit status of `python recipes/NAME.py WORDS`, run in this process."""
    return run_script(load_recipe(name), words)


def run_script(script: ModuleType, words: Sequence[str]) -> int:
    """The exit status of a recipe or a tool, run in this process."""
    return run(script.Options, script.main, [str(word) for word in words], Path(script.__file__).name)


def refuse(name: str, words: Sequence[str], message: str, capsys: Any) -> None:
    """The recipe ends with status 2; its last line is an error that contains `message`, and stdout stays empty."""
    assert run_recipe(name, words) == 2
    captured = capsys.readouterr()
    complaint = captured.err.strip().splitlines()[-1]
    assert message in complaint
    assert complaint.startswith("rope-patch: ")
    assert captured.out == ""
