"""Recipes as modules, and as commands of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rope_patch.cli.options import load_recipe, run

__all__ = ["load_recipe", "refuse", "run_recipe"]


def run_recipe(name: str, words: Sequence[str]) -> int:
    """The exit status of `python recipes/NAME.py WORDS`, run in this process."""
    recipe = load_recipe(name)
    return run(recipe.Options, recipe.main, [str(word) for word in words], f"recipes/{name}.py")


def refuse(name: str, words: Sequence[str], message: str, capsys: Any) -> None:
    """The recipe ends with status 2; its last line is an error that contains `message`, and stdout stays empty."""
    assert run_recipe(name, words) == 2
    captured = capsys.readouterr()
    complaint = captured.err.strip().splitlines()[-1]
    assert message in complaint
    assert complaint.startswith("rope-patch: ")
    assert captured.out == ""
