"""Bodies of requests to an OpenAI endpoint: their fields, types and allowed values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rope_patch.serving.limits import ANSWERS, FIELDS, STOP_LENGTH, STOPS, Refusal, shown

Count = Annotated[int, Field(ge=1, lt=2**31)]
HARMLESS = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "truncation"}
NEUTRAL: dict[str, tuple[Any, ...]] = {  # values with which a field that is not served asks for nothing
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "echo", "suffix"), (0, "")),
    **dict.fromkeys(("logit_bias", "include", "tools", "functions"), ({}, [])),
    **dict.fromkeys(("tool_choice", "function_call"), ("auto", "none")),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
}


def in_list(value: Any) -> Any:
    """Wrap a single text, or a single list of ids, into a list."""
    return [value] if isinstance(value, str) or (isinstance(value, list) and value and is_id(value[0])) else value


def is_id(value: Any) -> bool:
    """Whether a value is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


class Known(BaseModel):
    """An object that allows its declared fields only."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def few(cls, given: Any) -> Any:
        """Refuse an object with more fields than any known object, before each field becomes an error."""
        if isinstance(given, dict) and len(given) > FIELDS:
            raise ValueError(f"{len(given)} fields; at most {FIELDS} are allowed")
        return given


class StreamOptions(Known):
    """Options of a stream."""

    include_usage: bool | None = None


class Arguments(Known):
    """Extra arguments, which vLLM's server passes on to plugins."""

    rope_factor: float | None = None


class DrawnRequest(Known):
    """The fields that all endpoints share: the sampling settings, and the factor of the scheme."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    rope_factor: float | None = None
    vllm_xargs: Arguments | None = None

    @property
    def factor(self) -> float | None:
        """The factor that the request names; None if it names none.

        Raises:
            ValueError: the request names two factors.
        """
        other = None if self.vllm_xargs is None else self.vllm_xargs.rope_factor
        if other is not None and self.rope_factor not in (None, other):
            raise ValueError(f"rope_factor={self.rope_factor:g} and vllm_xargs.rope_factor={other:g}: one is allowed")
        return self.rope_factor if other is None else other

    @property
    def alternatives(self) -> int | None:
        """The requested number of alternatives for each token; None for no log-probabilities."""
        return None


class GenerationRequest(DrawnRequest):
    """The fields that completions and chats share."""

    n: Annotated[int, Field(ge=1, le=ANSWERS)] | None = None
    max_tokens: Count | None = None
    stop: Annotated[
        list[Annotated[str, Field(max_length=STOP_LENGTH)]], Field(max_length=STOPS), BeforeValidator(in_list)
    ] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Annotated[
        list[str | Annotated[list[int], Field(fail_fast=True)]],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(in_list),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class TextPart(Known):
    """A part of a message's content; images and sounds are not served."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat, with all other fields that its template reads."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def as_template_has_it(self) -> dict[str, Any]:
        """Convert the message to a dict for a chat template, with the content as one text."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {**self.model_dump(exclude_none=True), "content": text}


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class PromptRequest(DrawnRequest):
    """A request of the page of `rope-patch demo-chat`: a document, and a question at its end. `chat` says whether both
    are one message of a chat; by default they are if the checkpoint has a chat template.
    """

    document: str
    question: str = ""
    chat: bool | None = None
    max_tokens: Count | None = None


Body = TypeVar("Body", bound=DrawnRequest)


def ignored(body: dict[str, Any], unread: Iterable[str]) -> str | None:
    """The reason to refuse a request that sets a field which the server ignores; None if it sets none."""
    for name in sorted(body.keys() & set(unread) - HARMLESS):
        if body[name] is not None and body[name] is not False and body[name] not in NEUTRAL.get(name, ()):
            return f"{name}={shown(body[name])} is not served; leave it out"
    return None


def parse(kind: type[Body], body: dict[str, Any]) -> Body:
    """Parse the body of a request.

    Raises:
        Refusal: a field is unknown, wrong or not served; the message names it, its value and the reason.
    """
    if problem := ignored(body, NEUTRAL.keys()):
        raise Refusal(problem)
    if "best_of" in body and body["best_of"] not in (None, body.get("n", 1)):
        raise Refusal(f"best_of={shown(body['best_of'])} is not served: answers are not ranked; use n")
    try:
        unread = HARMLESS | NEUTRAL.keys() | {"best_of"}
        return kind.model_validate({name: body[name] for name in body if name not in unread and body[name] is not None})
    except ValidationError as error:
        first = error.errors()[0]
        # a field of several types ends in the name of the type that was tried
        path = [
            str(part)
            for part in first["loc"]
            if part != "str" and not str(part).startswith(("list[", "constrained-", "function-"))
        ]
        value = "" if first["type"] == "missing" else f"={shown(first['input'])}"
        raise Refusal(f"{'.'.join(path)}{value}: {first['msg']}") from error
