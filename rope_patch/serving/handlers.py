"""Responses, and chats with tools: by the handlers of Transformers, in the batches of `rope-patch serve`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import CBGenerateManager, GenerationState

from rope_patch.serving.batch import Batch, Sampling

UNSAID = 1 << 30  # `max_new_tokens` where a request does not set it

HANDLERS = {"chat": ChatCompletionHandler, "response": ResponseHandler}

Admit = Callable[[list[int], int | None], tuple[Batch, int]]
"""Gives a prompt of ids, and the most tokens of its answer if the request sets it, a batch and a number of tokens."""


def handler_of(kind: str, name: str, model: Any, tokenizer: Any, admit: Admit, sampling: Sampling) -> Any:
    """A handler for one request.

    Args:
        kind: one of `HANDLERS`.
        name: of the model, as requests have it.
        sampling: how the tokens of the answer are drawn, whatever the body sets.
    """
    model.generation_config.max_new_tokens = UNSAID
    state = _State(continuous_batching=True)
    state.manager = _Generation(admit, sampling)
    return HANDLERS[kind](_OneModel(name, model, tokenizer), state)


class _Generation(CBGenerateManager):
    """The generation of one answer, which joins a batch as soon as its prompt is known."""

    def __init__(self, admit: Admit, sampling: Sampling) -> None:
        super().__init__()
        self._admit, self._sampling = admit, sampling

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Nothing: the batches run already."""

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, config: Any, *a: Any, **k: Any) -> Any:
        """Of Transformers, in a batch."""
        self._join(inputs, config)
        return super().generate_streaming(model, processor, inputs, config, *a, **k)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, config: Any, *a: Any, **k: Any
    ) -> Any:
        """Of Transformers, in a batch."""
        self._join(inputs, config)
        return await super().generate_non_streaming(model, processor, inputs, config, *a, **k)

    def _join(self, inputs: Any, config: Any) -> None:
        asked = None if config.max_new_tokens == UNSAID else config.max_new_tokens
        batch, config.max_new_tokens = self._admit(inputs["input_ids"], asked)
        self._cb = _Drawing(batch.manager, self._sampling)


class _Drawing:
    """A batch's manager whose new requests draw their tokens as `sampling` has it."""

    def __init__(self, manager: Any, sampling: Sampling) -> None:
        self._manager, self._sampling = manager, sampling

    def add_request(self, *arguments: Any, **settings: Any) -> Any:
        """Of the manager, with the sampling."""
        return self._manager.add_request(*arguments, sampling=self._sampling, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class _State(GenerationState):
    """The state of a handler with one generation."""

    manager: _Generation

    def get_manager(self, model_id: str, use_cb: bool = True) -> _Generation:
        """The generation."""
        return self.manager


class _OneModel(ModelManager):
    """The model that is loaded already."""

    def __init__(self, name: str, *loaded: Any) -> None:
        self._loaded = loaded
        super().__init__(force_model=name)

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        """It, and its tokenizer."""
        return self._loaded
