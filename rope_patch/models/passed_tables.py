"""The rotary tables that a stack passes to each of its blocks, found by running its code, because configs have no field
for them.

A copy of the stack, whose blocks only record their arguments, runs on four tokens; the model stays unchanged.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_patch.models.arguments import by_name, parameters_of
from rope_patch.models.base import RotaryTables

_TOKENS = 4


@dataclass
class Call:
    """A call of a module, with its arguments by name."""

    module: nn.Module
    named: dict[str, Any]
    result: Any = None


class _Recorder(nn.Module):
    """A stand-in for a module: `answer` gives the result of a call, and the call is kept."""

    def __init__(self, original: nn.Module, answer: Callable[..., Any], calls: list[Call]) -> None:
        super().__init__()
        vars(self).update(original=original, answer=answer, calls=calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call, and return its answer."""
        self.calls.append(call := Call(self.original, by_name(self.original, args, kwargs)))
        call.result = self.answer(*args, **kwargs)
        return call.result


def passed_tables(stack: PreTrainedModel, rotary: Sequence[RotaryTables]) -> dict[nn.Module, RotaryTables | None]:
    """The tables that each block receives, or None for a block that receives none; blocks without a clear answer are
    missing.
    """
    owners = {(tables.module, tables.layer_type): tables for tables in rotary}
    blocks = _blocks(stack)
    passed: dict[nn.Module, RotaryTables | None] = {}
    # a block may return states alone, or a tuple
    for answer in (_states, lambda *args, **kwargs: (_states(*args, **kwargs), None)):
        calls = _calls(stack, {**dict.fromkeys(blocks, answer), **{module: module for module, _ in owners}})
        results = [((call.module, call.named.get("layer_type")), call.result) for call in calls]
        answers = [(owners[place], result) for place, result in results if place in owners]
        for call in calls:
            received = call.named.get("position_embeddings", ...)
            if call.module in blocks and received is None:
                passed[call.module] = None
            passed.update((call.module, tables) for tables, result in answers if result is received)
        if len(passed) == len(blocks):
            break
    return passed


def takes_text_axis(stack: PreTrainedModel, rotary: RotaryTables) -> bool:
    """Whether a stack reads the text's positions in front of the positions on all axes, `(1 + axes, batch, length)`."""
    positions = torch.arange(_TOKENS).expand(1 + rotary.axes, 1, -1)
    calls = _calls(stack, {**dict.fromkeys(_blocks(stack), _states), rotary.module: rotary.module}, positions)
    return all(len(call.named["position_ids"]) == rotary.axes for call in calls if call.module is rotary.module)


def _blocks(stack: nn.Module) -> set[nn.Module]:
    lists = (child for child in stack.modules() if isinstance(child, nn.ModuleList))
    return {block for blocks in lists for block in blocks if "position_embeddings" in parameters_of(block)}


def _calls(
    stack: PreTrainedModel, answers: Mapping[nn.Module, Callable[..., Any]], positions: torch.Tensor | None = None
) -> list[Call]:
    """Record the calls of some modules in a forward of the stack; calls before an error are valid."""
    calls: list[Call] = []
    device = next((weight.device for weight in stack.parameters()), torch.device("cpu"))
    states = torch.zeros(1, _TOKENS, cast(Any, stack.config).hidden_size, dtype=stack.dtype, device=device)
    inputs = {"inputs_embeds": states, "use_cache": False}
    if "inputs_embeds" not in parameters_of(stack):
        inputs["input_ids"] = torch.zeros(1, _TOKENS, dtype=torch.long, device=device)
    if positions is not None:
        inputs["position_ids"] = positions.to(device)
    with contextlib.suppress(Exception), torch.no_grad():
        arguments = {name: value for name, value in inputs.items() if name in parameters_of(stack)}
        type(stack).forward(cast(Any, _recording(stack, answers, calls)), **arguments)
    return calls


def _states(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _recording(module: nn.Module, answers: Mapping[nn.Module, Callable[..., Any]], calls: list[Call]) -> nn.Module:
    """Copy a module in evaluation mode, sharing all weights, with recorders for some of its modules."""
    if module in answers:
        return _Recorder(module, answers[module], calls)
    copied = copy.copy(module)
    copied._modules = {name: child and _recording(child, answers, calls) for name, child in module._modules.items()}
    copied.training = False
    return copied
