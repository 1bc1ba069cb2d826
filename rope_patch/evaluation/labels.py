"""Where the names of lines stand beside a chart, so that none covers another."""

from __future__ import annotations

import math
from collections.abc import Sequence


def spread_apart(
    wanted: Sequence[float], gap: float, lowest: float = -math.inf, highest: float = math.inf
) -> list[float]:
    """Ascending heights as near as can be to those wanted, each at least a gap above the one before.

    Heights that are too close form a block, which is centred on the mean of what its members want and stays within
    the bounds; blocks that then overlap are joined.

    Args:
        wanted: ascending, as shares of the height of the axes.
        gap: the least distance of two.
        lowest, highest: bounds, by default none; where all do not fit, the lowest height is the lower one.
    """
    blocks: list[tuple[float, int]] = []  # the lowest height of each block, and how many there are in it
    for height in wanted:
        start, count = height, 1
        while blocks and start < blocks[-1][0] + blocks[-1][1] * gap:
            before, others = blocks.pop()
            # the start that each of the two would choose, weighted by their members
            start = (before * others + (start - others * gap) * count) / (others + count)
            count += others
            start = max(lowest, min(start, highest - (count - 1) * gap))
        blocks.append((start, count))
    return [start + i * gap for start, count in blocks for i in range(count)]
