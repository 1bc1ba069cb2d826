"""Limits of one request, which bound the bytes that the server reads, the data that it holds and the work that it does
for a client.

Every limit is checked before a prompt is tokenised. A refusal names the field, its size and the limit.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

LARGEST_BODY = 8 * 2**20  # bytes
BYTES_PER_TOKEN = 16
"""Bytes of a body, or characters of a prompt, for each token that a request may have: four times the need of usual
texts.
"""

BODY_SLACK = 2**16
"""Bytes of a body besides its prompts."""

CONTAINERS = 2**16
"""The most lists, objects and members of them in a body. Python takes seconds for millions of them."""

ANSWERS = 128
TOKENS = 2**18
"""The most tokens of all answers to a request. A token counts once more for each log-probability reported with it."""

STOPS = 16
STOP_LENGTH = 256
LONGEST_LISTS = {"messages": 4096, "input": 4096, "tools": 128, "functions": 128, "stop": STOPS, "logit_bias": 300}
"""The most entries of lists and objects in a body, by field."""

FIELDS = 64
"""Fields of a body, and of the objects in it whose fields are known."""


class Refusal(Exception):
    """The refusal of a request, with its HTTP status and the reason."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


_STRING = re.compile(rb'"[^"]*"?')

_short = reprlib.Repr()
_short.maxstring = _short.maxlong = _short.maxother = 80


def shown(value: Any) -> str:
    """Show a value of a request in an error message, cut if it is long."""
    return f"{_short.repr(value):.80}"


def largest_body(tokens: int, prompts: int = 1) -> int:
    """The largest body in bytes whose prompts have up to this many tokens each."""
    return min(LARGEST_BODY, BODY_SLACK + BYTES_PER_TOKEN * tokens * prompts)


def read_json(body: bytes) -> dict[str, Any]:
    """Read the JSON object of a request.

    Raises:
        Refusal: the text is no JSON object, or has too many values, too deep a nesting, or half of a surrogate pair.
    """
    if body.count(b"[") + body.count(b"{") + body.count(b":") > CONTAINERS:
        outside = _STRING.sub(b"", body.replace(rb"\\", b"").replace(rb"\"", b""))
        if (found := outside.count(b"[") + outside.count(b"{") + outside.count(b":")) > CONTAINERS:
            raise Refusal(f"the body has {found} lists, objects and members; at most {CONTAINERS} are allowed")
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as wrong:
        advice = "; half of a surrogate pair is no text" if re.search("hex escape|code point", str(wrong)) else ""
        raise Refusal(f"the body is not JSON: {wrong}{advice}") from wrong
    if not isinstance(content, dict):
        raise Refusal("the body is not a JSON object")
    if len(content) > FIELDS:
        raise Refusal(f"the body has {len(content)} fields; at most {FIELDS} are allowed")
    for name, most in LONGEST_LISTS.items():
        if isinstance(content.get(name), list | dict) and len(content[name]) > most:
            raise Refusal(f"{name} has {len(content[name])} entries; at most {most} are allowed")
    return content


def check_prompts(prompts: Sequence[str | list[int]], n: int, tokens: int) -> None:
    """Check the number of requested answers and the length of the prompts.

    Args:
        n: number of answers to each prompt.
        tokens: length of the longest request in tokens.

    Raises:
        Refusal: the request exceeds a limit.
    """
    if len(prompts) * n > ANSWERS:
        wanted = f"{len(prompts)} {'prompts' if len(prompts) > 1 else 'prompt'} and n={n}"
        raise Refusal(f"{wanted} ask for {len(prompts) * n} answers; at most {ANSWERS} are allowed in a request")
    for place, prompt in enumerate(prompts):
        if isinstance(prompt, str) and len(prompt) > BYTES_PER_TOKEN * tokens:
            most = f"at most {BYTES_PER_TOKEN * tokens} are allowed, {BYTES_PER_TOKEN} for each of {tokens} tokens"
            raise Refusal(f"prompt {place} has {len(prompt)} characters; {most}")


def check_answers(new_tokens: Sequence[int], alternatives: int | None) -> None:
    """Check the size of the answers to a request.

    Args:
        new_tokens: the maximum number of tokens of each answer.
        alternatives: number of log-probabilities beside each token's own; None for no log-probabilities.

    Raises:
        Refusal: the request exceeds a limit.
    """
    each = 1 if alternatives is None else 2 + alternatives
    if (wanted := sum(new_tokens) * each) > TOKENS:
        answers = f"{len(new_tokens)} answers of up to {max(new_tokens)} tokens"
        with_them = "" if alternatives is None else f", with {each - 1} log-probabilities each,"
        advice = "lower n, max_tokens or logprobs"
        raise Refusal(f"{answers}{with_them} make {wanted} values; at most {TOKENS} are allowed; {advice}")


def check_ids(prompt: Sequence[int], known: int, name: str, tokenizer: Any) -> None:
    """Check that the model has an embedding for each id of a prompt.

    Args:
        known: number of embeddings. Tokens that were added only to the tokenizer have none.
        name: name of the prompt in the message.

    Raises:
        Refusal: an id has no embedding.
    """
    for place, token in enumerate(prompt):
        if not 0 <= token < known:
            text = f", {shown(tokenizer.convert_ids_to_tokens(token))}" if 0 <= token < len(tokenizer) else ""
            limit = f"ids from 0 to {known - 1} are allowed, as many as the model's input embedding has"
            raise Refusal(f"{name} has ids beyond the vocabulary: {shown(token)}{text}, at place {place}; {limit}")
