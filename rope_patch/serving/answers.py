"""Answers in the form that OpenAI clients expect: whole, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

from rope_patch.serving.batch import Piece
from rope_patch.serving.sampling import Token

FAILED: dict[str, Any] = {
    "message": "the server failed on this request",
    "type": "server_error",
    "param": None,
    "code": None,
}
"""A server error in OpenAI's form."""


@dataclass
class Answer:
    """An answer to a request: its number, the ids of its prompt, and the stream of its pieces."""

    index: int
    prompt: Sequence[int]
    pieces: AsyncIterator[Piece]


async def collect(answer: Answer) -> Piece:
    """Collect the whole answer into one piece."""
    text: list[str] = []
    tokens: list[Token] = []
    reason = None
    async with aclosing(answer.pieces) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            text.append(piece.text)
            tokens += piece.tokens
            reason = piece.finish_reason
    return Piece("".join(text), tokens, reason)


class Format:
    """The JSON objects of one endpoint.

    Attributes:
        whole, chunk: `object` of an answer and of a part of a stream.
    """

    whole: ClassVar[str]
    chunk: ClassVar[str]

    def __init__(self, model: str, tokenizer: Any, logprobs: bool) -> None:
        self.tokenizer, self.logprobs = tokenizer, logprobs
        self._words: dict[int, str] = {}
        self.head = {"id": f"answer-{uuid.uuid4()}", "created": int(time.time()), "model": model}

    def choice(self, index: int, piece: Piece, *, streamed: bool, offset: int) -> dict[str, Any]:
        """Build one choice: an answer, or its next part, which begins at a character `offset` of the text."""
        raise NotImplementedError

    async def all_of(self, answers: Sequence[Answer]) -> bytes:
        """Wait for all answers, and build the body of a response that is not streamed."""
        tasks = [asyncio.ensure_future(collect(answer)) for answer in answers]
        try:
            pieces = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        # in a thread, because its work grows with the answers
        return await asyncio.to_thread(self.body, answers, pieces)

    def body(self, answers: Sequence[Answer], pieces: Sequence[Piece]) -> bytes:
        """Write the whole answers as JSON."""
        choices = [
            self.choice(answer.index, piece, streamed=False, offset=0)
            for answer, piece in zip(answers, pieces, strict=True)
        ]
        usage = usage_of(answers, sum(len(piece.tokens) for piece in pieces))
        return json_of({**self.head, "object": self.whole, "choices": choices, "usage": usage})

    async def stream(self, answers: Sequence[Answer], usage: bool) -> AsyncIterator[str]:
        """Stream the answers as server-sent events. With `usage`, the last event but one reports it. A failure is the
        last event.
        """
        parts: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

        async def follow(answer: Answer) -> None:
            try:
                async with aclosing(answer.pieces) as pieces:  # type: ignore[type-var]
                    async for piece in pieces:
                        parts.put_nowait((answer.index, piece))
                parts.put_nowait((answer.index, None))
            except Exception as failure:
                parts.put_nowait((answer.index, failure))

        tasks = [asyncio.ensure_future(follow(answer)) for answer in answers]
        running, tokens, offsets = len(answers), 0, [0] * len(answers)
        try:
            for opening in self.openings(len(answers)):
                yield self.event(choices=[opening])
            while running:
                index, piece = await parts.get()
                if isinstance(piece, Exception):
                    raise piece
                if piece is None:
                    running -= 1
                    continue
                tokens += len(piece.tokens)
                yield self.event(choices=[self.choice(index, piece, streamed=True, offset=offsets[index])])
                offsets[index] += len(piece.text)
            if usage:
                yield self.event(choices=[], usage=usage_of(answers, tokens))
            yield "data: [DONE]\n\n"
        except Exception:
            logging.getLogger("uvicorn.error").exception("a request failed")
            yield event_of({"error": FAILED})
        finally:
            for task in tasks:
                task.cancel()

    def openings(self, answers: int) -> Sequence[dict[str, Any]]:
        """The choices that come before the first tokens of a stream."""
        return ()

    def event(self, **fields: Any) -> str:
        """Write the next event of a stream."""
        return event_of({**self.head, "object": self.chunk, **fields})

    def word(self, token: int) -> str:
        """The text of one token."""
        if token not in self._words:
            self._words[token] = str(self.tokenizer.decode([token]))
        return self._words[token]


class Completions(Format):
    """The objects of /v1/completions."""

    whole = chunk = "text_completion"

    def choice(self, index: int, piece: Piece, *, streamed: bool, offset: int) -> dict[str, Any]:
        logprobs = None
        if self.logprobs:
            words = [self.word(token.id) for token in piece.tokens]
            logprobs = {
                "tokens": words,
                "token_logprobs": [token.logprob for token in piece.tokens],
                "top_logprobs": [self.alternatives(token) for token in piece.tokens],
                "text_offset": list(itertools.accumulate(map(len, words), initial=offset))[:-1],
            }
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def alternatives(self, token: Token) -> dict[str, float]:
        """Log-probabilities of the likeliest tokens and of the token itself, by their text."""
        ids = dict(token.alternatives) | {token.id: token.logprob}
        return {self.word(one): logprob for one, logprob in ids.items() if logprob is not None}


class Chats(Format):
    """The objects of /v1/chat/completions."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def openings(self, answers: int) -> Sequence[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "finish_reason": None} for index in range(answers)]

    def choice(self, index: int, piece: Piece, *, streamed: bool, offset: int) -> dict[str, Any]:
        logprobs = None
        if self.logprobs:
            content = [
                {
                    **self.entry(token.id, token.logprob),
                    "top_logprobs": [self.entry(*one) for one in token.alternatives],
                }
                for token in piece.tokens
            ]
            logprobs = {"content": content, "refusal": None}
        message = {"delta": {"content": piece.text}}
        if not streamed:
            message = {"message": {"role": "assistant", "content": piece.text}}
        return {"index": index, **message, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        """A token with its log-probability."""
        word = self.word(token)
        return {"token": word, "logprob": logprob, "bytes": list(word.encode(errors="replace"))}


def usage_of(answers: Sequence[Answer], tokens: int) -> dict[str, int]:
    """Count the tokens of prompts and answers; a prompt with n answers counts once."""
    prompt = sum({id(answer.prompt): len(answer.prompt) for answer in answers}.values())
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def json_of(body: Any) -> bytes:
    """Write an object as JSON. The JSON is pure ASCII, so that every text of a tokenizer or a template can be sent."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def event_of(body: dict[str, Any]) -> str:
    """Write an object as a server-sent event."""
    return f"data: {json_of(body).decode()}\n\n"
