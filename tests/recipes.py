"""Recipes as modules, and as commands of this process."""

from __future__ import annotations

from collections.abc import Sequence

from rope_patch.cli.options import load_recipe, run

__all__ = ["load_recipe", "run_recipe"]


def run_recipe(name: str, words: Sequence[str]) -> int:
    """The exit status of `python recipes/NAME.py WORDS`, run in this process."""
    recipe = load_recipe(name)
    return run(recipe.Options, recipe.main, [str(word) for word in words], f"recipes/{name}.py")
