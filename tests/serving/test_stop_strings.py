"""The text of an answer while its tokens come: all that is certain, and nothing of a stop string."""

from __future__ import annotations

import itertools

import pytest

from rope_patch.serving.batch import Text


class Bytes:
    """A tokenizer whose tokens are the bytes of a text."""

    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode(errors="replace")


def pieces(text, stop, size):
    """What is given out after every `size` bytes, until the text stops."""
    ids, given = list(text.encode()), []
    answer = Text(Bytes(), stop)
    for end in [*range(size, len(ids), size), len(ids)]:
        given.append(answer.add(ids[:end], last=end == len(ids)))
        if answer.stopped:
            break
    return given, answer.stopped


def before_stop(text, stop):
    return text[: min((text.index(string) for string in stop if string in text), default=len(text))]


STOPS = [["ab"], ["aab"], ["abab", "bb"], ["b", "ab"], ["aba", "ba"], ["never", "bab", ""], []]


@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_text_ends_before_the_first_stop_string_in_it(stop, size):
    wanted = [string for string in stop if string]
    for letters in itertools.product("ab", repeat=7):
        text = "".join(letters)
        given, stopped = pieces(text, stop, size)
        assert "".join(given) == before_stop(text, wanted), text
        assert stopped == any(string in text for string in wanted), text


def test_only_what_may_begin_a_stop_string_is_held_back():
    given, _ = pieces("xaaabxaay", ["aab"], 1)
    assert given == ["x", "", "", "a", ""]
    assert pieces("xaxaay", ["aab"], 1)[0] == ["x", "", "ax", "", "", "aay"]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_of_several_tokens_come_whole(size):
    text = "für 5 € und 日本語 😀, e\u0301"
    given, _ = pieces(text, ["日語"], size)
    assert "".join(given) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in given)
    given, stopped = pieces(text, ["€ u"], size)
    assert ("".join(given), stopped) == ("für 5 ", True)
