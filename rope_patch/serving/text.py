"""The text of an answer, decoded token by token, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Text:
    """The text of an answer up to a stop string, as far as it is certain while tokens arrive."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, [string for string in stop if string]
        self._settled, self._read = 0, 0  # tokens whose text stands; tokens that were decoded with them
        self._text, self._given = "", 0
        self.stopped = False

    def add(self, ids: Sequence[int], *, last: bool) -> str:
        """Return the new part of the text of `ids`, which are all tokens so far."""
        # decoded with the tokens before, since many tokenizers write a space between tokens and not at the start
        before = self._decode(ids[self._settled : self._read])
        both = self._decode(ids[self._settled :])
        if last or not both.endswith("�"):  # half of a character
            self._text += both[len(before) :]
            self._settled, self._read = self._read, len(ids)
        end = len(self._text)
        searched = max(0, self._given - max(map(len, self._stop), default=0))
        places = [place for string in self._stop if (place := self._text.find(string, searched)) >= 0]
        if places:
            end, self.stopped = min(places), True
        elif not last:
            end -= max((self._open(string) for string in self._stop), default=0)
        new = self._text[self._given : end]
        self._given = max(end, self._given)
        return new

    def _open(self, string: str) -> int:
        """The number of last characters of the text that may begin a stop string."""
        longest = min(len(string) - 1, len(self._text))
        return next((size for size in range(longest, 0, -1) if self._text.endswith(string[:size])), 0)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
