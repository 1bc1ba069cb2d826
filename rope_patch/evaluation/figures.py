"""Where every figure begins and ends as a file, and the one place that knows that matplotlib may be missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_patch.errors import MissingPackage, require
from rope_patch.files import written_aside

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """Check that there is something to draw with.

    Raises:
        MissingPackage: there is not, and the message says what to install.
    """
    require("matplotlib", "the picture", "plots")


def can_draw(say: Callable[[str], None]) -> bool:
    """Whether there is something to draw with; where there is not, `say` is told what to install."""
    try:
        require_matplotlib()
    except MissingPackage as error:
        say(str(error))
        return False
    return True


def blank(width: float, height: float, **settings: Any) -> Figure:
    """An empty white figure, of which pyplot knows nothing.

    Args:
        width, height: in inches.
        **settings: for `Figure`.

    Raises:
        MissingPackage: see `require_matplotlib`.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white", **settings)


def save(figure: Figure, path: str | Path, *, dpi: int = 160, **settings: Any) -> Path:
    """Write a figure as PNG, aside and then in place of what was there; the same picture is the same bytes.

    Args:
        figure: to be written.
        path: of the file.
        dpi: dots per inch, 160 by default.
        **settings: for `Figure.savefig`.

    Returns:
        the path.

    Raises:
        OSError: it cannot be written; a file that was there before still is.
    """
    with written_aside(path) as aside:
        figure.savefig(aside, dpi=dpi, format="png", **settings)
    return Path(path)
