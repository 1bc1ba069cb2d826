"""Which rotary tables a stack passes to each of its blocks.

A stack with several rotary modules chooses one for each block, and a block without positions may receive none. Configs
have no common field for this choice. So the code of the stack runs here, on four tokens and on a copy whose blocks only
record what they receive. No block runs, and the model stays unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch.models.arguments import by_name
from rope_patch.models.base import RotaryTables

_TOKENS = 4


Call = tuple[nn.Module, dict[str, Any], Any]
"""A module, its arguments by name, and its result."""


class _Recorder(nn.Module):
    """In place of a module: `answer` gives the result of a call, and the call is kept."""

    def __init__(self, original: nn.Module, answer: Callable[..., Any], calls: list[Call]) -> None:
        super().__init__()
        vars(self).update(original=original, answer=answer, calls=calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The answer."""
        result = self.answer(*args, **kwargs)
        self.calls.append((self.original, by_name(self.original, args, kwargs), result))
        return result


def passed_tables(stack: PreTrainedModel, rotary: Sequence[RotaryTables]) -> dict[nn.Module, RotaryTables | None]:
    """The tables that each block receives, or None if it receives none; blocks without a clear answer are missing."""
    modules = {tables.module: tables.module for tables in rotary}
    lists = (child for child in stack.modules() if isinstance(child, nn.ModuleList))
    blocks = [block for found in lists for block in found if "position_embeddings" in _parameters(block)]
    found: dict[nn.Module, RotaryTables | None] = {}
    for answer in (_states, lambda *args, **kwargs: (_states(*args, **kwargs), None)):  # as a block may return
        calls: list[Call] = []
        with contextlib.suppress(Exception), torch.no_grad():  # what was recorded before an error is valid
            copied = _recording(stack, {**dict.fromkeys(blocks, answer), **modules}, calls)
            type(stack).forward(copied, **_arguments(stack))
        made = [(module, named.get("layer_type"), result) for module, named, result in calls if module in modules]
        for block, named, _ in calls:
            given = named.get("position_embeddings", ...)
            if given is None:
                found[block] = None
            for module, kind, result in made:
                if given is result:
                    found[block] = next(t for t in rotary if (t.module, t.layer_type) == (module, kind))
        if len(found) == len(blocks):
            break
    return found


def _states(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _arguments(stack: PreTrainedModel) -> dict[str, Any]:
    first = next(stack.parameters(), torch.zeros(()))
    states = torch.zeros(1, _TOKENS, cast(Any, stack.config).hidden_size, dtype=first.dtype, device=first.device)
    given = {"inputs_embeds": states, "use_cache": False}
    if "inputs_embeds" not in _parameters(stack):
        given["input_ids"] = torch.zeros(1, _TOKENS, dtype=torch.long, device=first.device)
    return {name: value for name, value in given.items() if name in _parameters(stack)}


def _recording(module: nn.Module, answers: Mapping[nn.Module, Callable[..., Any]], calls: list[Call]) -> nn.Module:
    """A copy in evaluation mode that shares all weights, with recorders for some of its modules."""
    if module in answers:
        return _Recorder(module, answers[module], calls)
    copied = copy.copy(module)
    copied._modules = {name: child and _recording(child, answers, calls) for name, child in module._modules.items()}
    copied.training = False
    return copied


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters
