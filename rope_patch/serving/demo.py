"""The page of `rope-patch demo-chat`: one prompt for the patched model, the plain model and truncated text.

The page asks `/prompt` for the ids of a document with its question, whole and truncated, and sends them to the OpenAI
endpoints of two servers, `/patched/v1` and `/plain/v1`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Mount, Route

from rope_patch.data.corpora import load_text
from rope_patch.data.special_tokens import ids_to_continue
from rope_patch.evaluation.tasks.passkey import FILLER, KEY, QUESTION, TASK
from rope_patch.serving import limits, requests
from rope_patch.serving.limits import Refusal
from rope_patch.serving.server import Endpoint, Server, json_response

PAGE = Path(__file__).with_name("demo.html")

SLACK = 8
"""Number of tokens by which an example may miss its length, because tokens may merge where its parts meet."""

PASSAGE = '''\
def read_secret_word(path, encoding="utf-8"):
    """Return the secret word of the garden."""
    with open(path, encoding=encoding) as file:
        return file.read().strip() + "marigold"


'''
"""The far passage of the example without a chat template; the end of the example begins to repeat it."""


class Demo:
    """Two servers of the same weights behind one page.

    Args:
        plain: the server of the model without a scheme.
        patched: the server of the model under the scheme.
        trained: L, the training length in tokens.
        scheme: the spelling of the scheme.
    """

    def __init__(self, plain: Server, patched: Server, trained: int, scheme: str) -> None:
        self.plain, self.patched, self.trained, self.scheme = plain, patched, trained, scheme
        self.checkpoint, self.limit, self.tokenizer = patched.names[1], patched.reaches.limit, patched.tokenizer
        self.chat = self.tokenizer.chat_template is not None

    def application(self) -> Any:
        """Build the page and both servers as an ASGI application."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            async with self.plain.running(), self.patched.running():
                yield

        routes = [
            Route("/", self.page),
            Route("/about", self.about),
            Route("/prompt", Endpoint(self.patched, self.prompts, self.reply), methods=["POST"]),
            Route("/example", Endpoint(self.patched, self.example, self.reply), methods=["POST"]),
            Route("/health", self.patched.health),
            Mount("/plain", routes=self.plain.routes()),
            Mount("/patched", routes=self.patched.routes()),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def page(self, _: Request) -> Any:
        """Send the page."""
        return FileResponse(PAGE, headers={"cache-control": "no-cache"})

    async def about(self, _: Request) -> Any:
        """Send the facts about the model that the page shows; lengths are in tokens."""
        return json_response(
            {
                "model": self.patched.names[0],
                "scheme": self.scheme,
                "trained": self.trained,
                "limit": self.limit,
                "readable": self.plain.reaches.limit,
                "max_tokens": self.patched.max_tokens,
                "characters": limits.BYTES_PER_TOKEN * self.limit,
                "chat": self.chat,
            }
        )

    async def reply(self, _: Request, found: dict[str, Any]) -> Any:
        """Send the result of `work`, which runs in a thread of the server, as JSON."""
        return json_response(found)

    def ids(self, document: str, question: str, chat: bool) -> list[int]:
        """Convert a prompt to ids: one message of a `chat`, or else a text to continue."""
        text = "\n\n".join(filter(None, (document, question)))
        if chat:
            return self.patched.in_template([{"role": "user", "content": text}])
        return ids_to_continue(self.tokenizer, text)

    def prompts(self, body: bytes) -> dict[str, Any]:
        """Read a document and a question. Return the ids of the prompt, and the ids of the truncated prompt or the
        reason why there is none.
        """
        asked = requests.parse(requests.PromptRequest, limits.read_json(body))
        document, question = asked.document.strip("\r\n"), asked.question.strip()
        if not document.strip():
            raise Refusal("the text is empty: paste one, or fill in the example")
        if asked.chat and not self.chat:
            raise Refusal("chat=true: this checkpoint has no chat template; leave chat out")
        chat = self.chat if asked.chat is None else asked.chat
        limits.check_prompts([document], 1, self.limit)
        prompt = self.ids(document, question, chat)
        _, new = self.patched.admit(asked, prompt, asked.max_tokens)
        truncated, note = None, "Prompt and answer fit into L, so nothing is cut: see the plain model."
        if len(prompt) + new > self.trained:
            truncated = self.truncated(document, question, chat, self.trained - new)
            note = f"The question and an answer of {new} tokens leave no room for text within L = {self.trained}."
        return {"prompt": prompt, "truncated": truncated, "note": None if truncated else note}

    def truncated(self, document: str, question: str, chat: bool, room: int) -> list[int] | None:
        """Put the question after as many last tokens of the document as fit into `room`; None if no token fits."""
        tokens = self.tokenizer(document, add_special_tokens=False).input_ids
        kept = min(len(tokens), room - len(self.ids("", question, chat)) if question else room)
        while kept > 0:
            ids = self.ids(self.tokenizer.decode(tokens[-kept:]), question, chat)
            if len(ids) <= room:
                return ids
            kept -= len(ids) - room
        return None

    def example(self, _: bytes) -> dict[str, Any]:
        """Make a document of two training lengths, with its answer at the far end, and a question. Both are a text to
        continue, which small chat models do better than they answer messages of this length.
        """
        if self.chat:
            opening, question = f"{TASK} {KEY.format(key=71432)} ", QUESTION
            filler = f"{' '.join(FILLER)} "
        else:
            opening, question = PASSAGE, PASSAGE.partition("\n")[0]
            filler = "\n".join(load_text()["text"][::-1])
        room = min(2 * self.trained, self.limit) - self.patched.max_tokens - SLACK
        room = max(0, room - len(self.ids(opening, question, False)))
        filler = (filler * (1 + limits.BYTES_PER_TOKEN * room // len(filler)))[: limits.BYTES_PER_TOKEN * room]
        tokens = self.tokenizer(filler, add_special_tokens=False).input_ids[:room]
        return {"document": opening + self.tokenizer.decode(tokens), "question": question, "chat": False}
