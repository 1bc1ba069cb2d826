"""Positions that programs read from a checkpoint's config, without torch and Transformers.

This package needs only the standard library, so it is also published alone, as `rope-doctor`.
"""

from .diagnosis import Difference, Reading, Report, as_numbers, diagnose, difference_of
from .entries import TRANSFORMERS_5, Spelling, Stated, rotations_of
from .errors import NoPositions, Unreadable
from .reader import Deviation, Reader
from .readers import READERS
from .rotation import Rotation
from .sources import Source, read_source
from .survey import Found, survey

__all__ = [
    "READERS",
    "TRANSFORMERS_5",
    "Deviation",
    "Difference",
    "Found",
    "NoPositions",
    "Reader",
    "Reading",
    "Report",
    "Rotation",
    "Source",
    "Spelling",
    "Stated",
    "Unreadable",
    "as_numbers",
    "diagnose",
    "difference_of",
    "read_source",
    "rotations_of",
    "survey",
]
