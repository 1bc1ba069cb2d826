"""Stacks that were read once: a test patches a copy of a prototype, and a reading does not depend on weights.

Reading a stack is four fifths of `patch`. The usual run reads each kind of stack once. The long run, and the tests that
look at the reading itself, read every stack anew.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from rope_patch.models import probe_copy
from rope_patch.models.base import Stack

_ANEW = (
    *("hardening", "zoo", "test_foreign", "test_refusals", "test_press", "test_serving", "test_meta"),
    *("test_fixed_tables", "test_hybrids", "test_probe_cost", "test_rebuilding", "test_tables_only"),
)
"""Folders and files of tests whose stacks are read anew."""

_readings: dict[Hashable, tuple[Stack, list[nn.Module]]] = {}


class _Unclear(Exception):
    """A stack has something that its kind cannot name, such as a hook."""


def is_anew(path: Any) -> bool:
    """Whether the tests of a file look at the reading itself."""
    return any(part.removesuffix(".py") in _ANEW for part in path.parts)


def remembering(read: Callable[[PreTrainedModel], Stack]) -> Callable[[PreTrainedModel], Stack]:
    """`read`, once for all stacks of a kind."""

    def remembered(stack: PreTrainedModel) -> Stack:
        try:
            kind = type(stack), _kind(stack)
        except _Unclear:
            return read(stack)
        modules = list(stack.modules())
        if kind not in _readings:
            prototype = copy.deepcopy(stack)  # the reading of a model that no test changes
            _readings[kind] = read(prototype), list(prototype.modules())
        reading, known = _readings[kind]
        places = {id(old): new for old, new in zip(known, modules, strict=True)}
        with_config = [pair for pair in zip(known, modules, strict=True) if hasattr(pair[0], "config")]
        places |= {id(old.config): new.config for old, new in with_config}
        return copy.deepcopy(reading, places)

    return remembered


def _kind(stack: nn.Module) -> Hashable:
    """`probe_copy.kind_of`, with configs by value, each once: modules share them."""
    kinds: list[Hashable] = []
    configs: dict[int, int] = {}

    def frozen(value: Any) -> Hashable:
        if id(value) in configs:
            return configs[id(value)]
        if isinstance(value, PreTrainedConfig):
            configs[id(value)] = len(configs)
        return _frozen(value)

    for name, module in stack.named_modules(remove_duplicate=False):
        if not probe_copy._runs_its_class(module):
            raise _Unclear
        own = {**probe_copy._settings(module), **module._parameters, **module._buffers}
        kinds.append((name, type(module), module.training, tuple((each, frozen(own[each])) for each in sorted(own))))
    return tuple(kinds)


def _frozen(value: Any) -> Hashable:
    if isinstance(value, GenerationConfig):
        return None  # no forward reads it
    if isinstance(value, PreTrainedConfig):
        return type(value), _frozen(vars(value))
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, dict):
        return type(value), tuple((_frozen(key), _frozen(item)) for key, item in value.items())
    if isinstance(value, functools.partial):
        return value.func, _frozen(value.args), _frozen(value.keywords)
    frozen = probe_copy._frozen(value)
    if frozen == (type(value), id(value)) and not hasattr(value, "__qualname__"):  # functions stay
        raise _Unclear
    return frozen
