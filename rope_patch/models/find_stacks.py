"""Find the stacks of a model, in any style."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rope_patch.errors import UnsupportedModel
from rope_patch.models import absolute, baichuan, llama, t5
from rope_patch.models.base import Stack
from rope_patch.models.config import wrong_field
from rope_patch.schemes.registry import list_schemes

STYLES: tuple[ModuleType, ...] = (llama, t5, baichuan)
"""The styles of stacks. Each has `recognises(module)` and `read(module)`, which returns a `Stack`."""

_FEW_CLASSES = 32


def read_stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Read every stack of a model that schemes can be mounted on: one, or an encoder and a decoder.

    Raises:
        UnsupportedModel: there is no such stack, or a part of a stack is not supported; the message names the reason.
    """
    stacks = find_stacks(model)
    for _, module in stacks:
        if wrong := wrong_field(vars(module.config)):
            raise UnsupportedModel(f"{type(module.config).__name__}: {wrong}")
    return tuple(_read(style, module, model) for style, module in stacks)


def _read(style: ModuleType, module: PreTrainedModel, model: nn.Module) -> Stack:
    try:
        return cast(Stack, style.read(module))
    except UnsupportedModel as error:
        if module is model or hasattr(module.config, "vocab_size"):
            raise
        raise UnsupportedModel(
            f"{type(model).__name__}: positions were found in its {type(module).__name__} alone, which reads no text: "
            f"{error}"
        ) from error


def find_stacks(model: nn.Module) -> list[tuple[ModuleType, PreTrainedModel]]:
    """Find the modules that `read_stacks` reads, each with the style that reads it.

    Raises:
        UnsupportedModel: there is no stack, or an unsupported number of them.
    """
    check_loaded(model)
    stacks = _recognised(model, STYLES) or _recognised(model, (absolute,))  # a model may have a rotation and a table
    if (advice := baichuan.published_remote_code(model)) is not None:
        raise UnsupportedModel(advice)
    if not stacks:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be patched: found no module of rotary frequencies (Llama), no relative "
            "bias (T5) and no position table (BERT). A model that keeps its positions otherwise, such as GPT-J, BLOOM "
            "or MPT, is not supported"
        )
    if len(stacks) > 1:  # an image tower may have a rotary module, too
        stacks = [(style, module) for style, module in stacks if hasattr(module.config, "vocab_size")] or stacks
    if len(stacks) > 1 and any(style is not t5 for style, _ in stacks):
        paths = {module: name for name, module in model.named_modules()}
        names = ", ".join(f"model.{paths[module]}: {type(module).__name__}" for _, module in stacks)
        raise UnsupportedModel(
            f"{type(model).__name__} has several stacks ({names}); patch one of them, as in "
            f"patch(model.{paths[stacks[0][1]]}, SCHEME)"
        )
    return stacks


def check_loaded(model: Any) -> None:
    """Check that an argument is a model.

    Raises:
        UnsupportedModel: the argument is no model; the message names its class, and what to pass instead.
    """
    if isinstance(model, nn.Module):
        return
    if isinstance(model, str) and model.partition(":")[0] in list_schemes():
        raise UnsupportedModel(f"{model!r} is a scheme, and this takes a loaded model: write patch(model, {model!r})")
    if isinstance(model, (str, os.PathLike)):
        raise UnsupportedModel(f"{str(model)!r} is not a loaded model: load it with rope_patch.from_pretrained")
    name = repr(model) if model is None else model.__name__ if isinstance(model, type) else type(model).__name__
    what = ""
    if isinstance(getattr(model, "model", None), nn.Module):
        what = ": pass the one that it holds, as in pipe.model"
    elif isinstance(model, PreTrainedConfig):
        what = ": pass the model; a config alone takes export_rope_parameters(SCHEME, config)"
    elif isinstance(model, (list, tuple)):
        what = ": pass one model after the other"
    elif isinstance(model, type):
        what = f": load one, {name}.from_pretrained(FOLDER)"
    raise UnsupportedModel(f"{name} is not a loaded model{what}")


def find_enclosing(model: nn.Module) -> list[PreTrainedModel]:
    """Find the Transformers models that contain a backbone and have no other stacks; see `find_around`."""
    return [outer for outer in find_around(model) if _stack_modules(outer) == _stack_modules(model)]


def find_around(model: nn.Module) -> list[PreTrainedModel]:
    """Find the Transformers models that contain a backbone.

    A search takes a twentieth of a second, so it is done for a backbone only: a model with its own head has no parents.
    """
    if getattr(model, "base_model", None) is not model:
        return []
    return [outer for outer in _transformers_models() if outer is not model and model in set(outer.modules())]


def _transformers_models() -> list[PreTrainedModel]:
    """All models of Transformers in this process, except frozen ones (`gc.freeze`).

    A module does not know its parents, but Python's garbage collector knows all objects.
    """
    classes = {PreTrainedModel, *_subclasses(PreTrainedModel)}
    # an object refers to its class; a search for referrers is faster, unless there are many classes to compare
    objects = gc.get_referrers(*classes) if len(classes) <= _FEW_CLASSES else gc.get_objects()
    return list(itertools.compress(objects, map(classes.__contains__, map(type, objects))))


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _stack_modules(model: nn.Module) -> list[PreTrainedModel]:
    try:
        return [module for _, module in find_stacks(model)]
    except UnsupportedModel:
        return []


def _recognised(model: nn.Module, styles: tuple[ModuleType, ...]) -> list[tuple[ModuleType, PreTrainedModel]]:
    return [(style, module) for style in styles for module in model.modules() if style.recognises(module)]


def read_stack(model: nn.Module) -> Stack:
    """Read the only stack of a model.

    Raises:
        UnsupportedModel: see `read_stacks`, or the model has an encoder and a decoder.
    """
    stacks = read_stacks(model)
    if len(stacks) > 1:
        raise UnsupportedModel(f"{type(model).__name__} has {len(stacks)} stacks; pass one of them")
    return stacks[0]
