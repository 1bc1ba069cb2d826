"""The errors of this package."""


class Unreadable(ValueError):
    """Raised for a config from which no positions can be read; the message names the file, the field, its value and
    what is allowed.
    """


class NoPositions(Unreadable):
    """Raised for a config of a model that has no rotary positions."""
