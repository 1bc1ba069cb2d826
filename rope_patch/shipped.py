"""Where the recipes are that come with the library, and with them the small checkpoints."""

from __future__ import annotations

from pathlib import Path


def recipes_folder() -> Path:
    """The folder `recipes`: of an installed wheel inside the package, of a checkout beside it."""
    package = Path(__file__).resolve().parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"
