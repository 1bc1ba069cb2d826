"""The location of the recipes and small checkpoints that are shipped with the library."""

from __future__ import annotations

from pathlib import Path


def recipes_folder() -> Path:
    """The folder `recipes`: inside the package in an installed wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"
