"""The errors of this package."""


class Unreadable(ValueError):
    """A config from which no positions can be read; the message names the file, the field, its value and what is
    allowed.
    """


class NoPositions(Unreadable):
    """A config of a model that has no rotary positions."""
