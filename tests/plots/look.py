"""What every picture has to look like, whatever it shows."""

from __future__ import annotations

import io
import itertools
import warnings
from unittest import mock

from matplotlib import _pylab_helpers
from matplotlib.figure import Figure
from matplotlib.text import Text


def check_look(figure: Figure) -> bytes:
    """Draw a figure, without warnings, with every word inside of it and no word over another; the PNG."""
    assert isinstance(figure, Figure)
    assert not _pylab_helpers.Gcf.figs, "pyplot knows of a figure"
    out = io.BytesIO()
    drawn, draw = [], Text.draw

    def remember(text, renderer):
        if text.get_visible() and text not in drawn:  # the layout draws, too
            drawn.append(text)
        return draw(text, renderer)

    with warnings.catch_warnings(), mock.patch.object(Text, "draw", remember):
        warnings.simplefilter("error")
        figure.savefig(out, format="png", dpi=100)
    # of the words alone: an annotation counts its arrow too
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in drawn if text.get_text().strip()]
    assert len(boxes) > 5
    whole = figure.bbox
    for text, box in boxes:
        inside = box.x0 >= whole.x0 and box.x1 <= whole.x1 and box.y0 >= whole.y0 and box.y1 <= whole.y1
        assert inside, f"{text!r} leaves the picture"
    for (one, box), (other, another) in itertools.combinations(boxes, 2):
        shared = box.padded(-1).overlaps(another.padded(-1))
        assert not shared, f"{one!r} and {other!r} overlap"
    return out.getvalue()


def words_of(figure: Figure) -> list[str]:
    """Every text in a figure."""
    return [text.get_text() for text in figure.findobj(Text)]
