"""A model that plain Transformers loaded with `attn_implementation="rope_patch"`: its first call mounts the scheme that
its config records.

Transformers does not announce that it has loaded a model. It asks for a mask before the first layer of a stack runs,
and this request is the first sign of the model. Hooks that are mounted then still act on the layers of the same
forward, but the pre-hooks of the stack are too late. So they are called here, with the arguments with which the forward
began. A mask that they make is returned, and positions reach the rotary module and the layers by hooks that last for
this forward. If a scheme needs more than that, the call is refused, and the model stays as it was loaded.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from typing import Any, NoReturn, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.attention.masks import holds_groups
from rope_patch.errors import UnsupportedModel
from rope_patch.models import llama
from rope_patch.models.arguments import Arguments, by_name
from rope_patch.models.base import Stack
from rope_patch.models.find_stacks import find_stacks
from rope_patch.models.module_state import remove_hook
from rope_patch.models.record import Record
from rope_patch.mounting.handle import PatchHandle, find_handle
from rope_patch.mounting.hooks import LayerHook
from rope_patch.mounting.registration import IMPLEMENTATION, own_attention
from rope_patch.mounting.stack_positions import PASSED, set_aside
from rope_patch.patching import unpatch
from rope_patch.saving.resuming import repatch

Running = dict[nn.Module, Arguments]
"""The modules whose forward is running, with its arguments."""

_CALL = nn.Module._call_impl.__code__
_COMPUTES = re.compile(r"(?<![\w.])(?!create_)\w+\(position_ids\b")  # a function of positions that is no module
_mounting = threading.RLock()


def mask(**given: Any) -> Any:
    """Build the mask of a stack, as its own attention reads it, after mounting the scheme that the config records.

    Args:
        **given: the arguments that Transformers passes to a function of `AttentionMaskInterface`; `config` is the
            config of the stack.

    Raises:
        UnsupportedModel: the scheme cannot be mounted during this call; the message has the line to write instead.
    """
    config = given["config"]
    model, running = _called()
    with _mounting, own_attention(model) as named:
        handle, begun = _mounted(model, running, config)
        groups = None if begun is None else _caught_up(model, handle, begun, running[begun.module], named)
    return ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](**given) if groups is None else groups


def attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run the attention of a module outside the stack, such as in an image tower, by its own implementation.

    Shape:
        query `(batch, heads, q_len, head_dim)`, key and value `(batch, kv_heads, kv_len, head_dim)`.

    Raises:
        UnsupportedModel: the module is in the stack, whose forward began without a scheme and asked for no mask.
    """
    config = cast(Any, module).config
    model, running = _called()
    with _mounting, own_attention(model):
        handle, begun = _mounted(model, running, config)
        if begun is not None:
            unpatch(handle)
            _refuse(model, "this call passes its own mask, so Transformers asked for none")
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
    return function(module, query, key, value, *args, **kwargs)


def _called() -> tuple[PreTrainedModel, Running]:
    """Find the model that is being called, and its modules whose forward runs, on the call stack."""
    running: Running = {}
    models: list[PreTrainedModel] = []
    begun = set()
    frame = sys._getframe(1)
    while frame is not None:
        owner: Any = frame.f_locals.get("self")
        if frame.f_code is _CALL:
            running.setdefault(owner, (frame.f_locals["args"], frame.f_locals["kwargs"]))
        elif isinstance(owner, PreTrainedModel):
            models.append(owner)
            if "forward" in frame.f_code.co_name:
                begun.add(owner)
        frame = frame.f_back  # type: ignore[assignment]
    if not models:
        raise UnsupportedModel(f"attn_implementation={IMPLEMENTATION!r} is for models, and no model is running")
    model = [each for each in models if models[0] in set(each.modules())][-1]
    if begun - running.keys():
        _refuse(model, "`forward` was called without the hooks of the model: call the model itself")
    return model, running


def _mounted(model: PreTrainedModel, running: Running, config: Any) -> tuple[PatchHandle, Stack | None]:
    """Patch the model if it is not patched yet; return its handle, and the stack whose forward began earlier."""
    handle = find_handle(model)
    if handle is None:
        _check(model)
        handle = repatch(model)
    # a patch gives a stack a config of its own, so another one is from before
    stacks = (stack for stack, _ in handle.mounted if stack.module in running and stack.module.config is not config)
    return handle, next(stacks, None)


def _check(model: PreTrainedModel) -> None:
    """Refuse a model whose scheme a first call cannot mount."""
    record = Record.find(model)
    if record is None:
        raise UnsupportedModel(
            f"{type(model).__name__} was loaded with attn_implementation={IMPLEMENTATION!r}, but its config records no "
            "scheme: load it without that argument and write rope_patch.patch(model, SCHEME); for adapters, load them "
            "with rope_patch.from_pretrained(FOLDER)"
        )
    if any(vars(each).get("_hf_peft_config_loaded") for each in model.modules()):
        _refuse(model, "adapters were loaded into it, which may have been trained under another scheme")
    styles = [style for style, _ in find_stacks(model)]
    if record.positions is not None or styles != [llama]:
        _refuse(model, f"{record.scheme} replaces no rotation here, and only a rotation can be replaced during a call")
    if record.scheme.learns:
        _refuse(model, f"plain Transformers did not load the parameters that {record.scheme} learned")
    if _runs_elsewhere(model):
        _refuse(model, "another thread calls it while this call mounts its scheme")


def _runs_elsewhere(model: PreTrainedModel) -> bool:
    """Whether a forward of the model runs in another thread, which would not know the hooks of its stack."""
    modules = set(model.modules())
    for thread, frame in sys._current_frames().items():
        while thread != threading.get_ident() and frame is not None:
            if frame.f_code is _CALL and frame.f_locals["self"] in modules:
                return True
            frame = frame.f_back  # type: ignore[assignment]
    return False


def _caught_up(
    model: PreTrainedModel, handle: PatchHandle, stack: Stack, arguments: Arguments, named: list[Any]
) -> torch.Tensor | None:
    """Segment ids of pads and documents, if the pre-hooks of a stack that has begun would have passed them; the
    positions that they would have passed go on to its modules.
    """
    given = after = by_name(stack.module, *arguments)
    for hook in handle.changes.hooks_of(stack.module):
        if hook is set_aside:  # what it renames goes on to the modules here
            continue
        result = hook(stack.module, (), after)
        after = after if result is None else result[1]
    changed = {name: value for name, value in after.items() if given.get(name) is not value}
    groups, positions = changed.pop("attention_mask", None), changed.pop("position_ids", None)
    text = positions
    if positions is not None and positions.ndim == 3:  # the text's in front of those on several axes
        text, positions = positions[0], positions[1:]
    passed = changed.pop(PASSED, text)
    if changed or not (groups is None or holds_groups(groups)):
        unpatch(handle)
        _refuse(model, f"{handle.scheme} changes what enters the model")
    if positions is not None and _COMPUTES.search(inspect.getsource(type(stack.module).forward)):
        unpatch(handle)
        _refuse(model, "this call passes no positions, so the model counts pads as positions")
    _Begun(model, handle, positions, passed, named).hook(stack)
    return groups


class _Begun:
    """Hooks for the rest of a forward that began before its scheme was mounted; the next forward removes them.

    Args:
        positions: the positions that the pre-hooks of the stack would have passed, `(batch, length)` or `(axes, batch,
            length)`; None if the forward already has the right ones.
        passed: the positions for layers that are scored late, `(batch, length)`; None in the same case.
        named: the configs that had the name.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        handle: PatchHandle,
        positions: torch.Tensor | None,
        passed: torch.Tensor | None,
        named: list[Any],
    ) -> None:
        self.model, self.handle, self.named = model, handle, named
        self.positions, self.passed = positions, passed
        self.rotary: set[nn.Module] = set()
        self.missing: set[nn.Module] = set()
        self.hooks: list[tuple[nn.Module, Any]] = []

    def hook(self, stack: Stack) -> None:
        """Hook the modules of the stack that come after its mask."""
        self.rotary = {tables.module for tables in stack.rotary}
        self.missing = set(self.rotary)
        attention, turn, count, end = self.attention, self.turn, self.count, self.end
        self.hooks = [(layer.module, attention) for layer in stack.layers] + [(module, turn) for module in self.rotary]
        if self.positions is not None:
            others = {stack.module, *(module for tables in stack.rotary for module in tables.modules)}
            inner = (module for module in stack.module.modules() if module not in others)
            self.hooks += [(module, count) for module in inner]
        self.hooks.append((stack.module, end))
        for module, hook in self.hooks:
            self.handle.changes.hook(module, hook, first=True)

    def end(self, *_: Any) -> None:
        """Remove these hooks at the next forward of the stack, which then has its own hooks."""
        for module, hook in self.hooks:
            remove_hook(module, hook)

    def turn(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Give a rotary module the positions of tokens in the stack's call; calls by layers keep the layers' own
        positions.
        """
        if not self.rotary:
            return None
        self.missing.discard(module)
        return self.count(module, (), by_name(module, args, kwargs))

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Replace the positions that a module receives by positions that count tokens; a module that receives none
        stays unchanged.
        """
        if self.positions is None or (given := kwargs.get("position_ids")) is None:
            return None
        positions = self.passed if given.ndim == 2 else self.positions.expand(len(given), -1, -1)
        return args, {**kwargs, "position_ids": positions}

    def attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Give an attention module the positions for its late scores, and check that its tables are not older than the
        patch.

        Raises:
            UnsupportedModel: the module's tables were computed before the scheme was mounted.
        """
        if self.missing:
            unpatch(self.handle)
            for config in self.named:
                config._attn_implementation_internal = IMPLEMENTATION
            _refuse(self.model, f"its tables of positions were computed before {self.handle.scheme} was mounted")
        self.rotary = set()  # the stack has all its tables
        if self.passed is None or not any(isinstance(hook, LayerHook) for hook in module._forward_pre_hooks.values()):
            return None
        return args, {**kwargs, PASSED: self.passed}


def _refuse(model: PreTrainedModel, reason: str) -> NoReturn:
    raise UnsupportedModel(
        f"{type(model).__name__} was loaded with attn_implementation={IMPLEMENTATION!r}, and {reason}: write "
        f"rope_patch.from_pretrained({str(model.name_or_path)!r}), which mounts the scheme before the first call"
    )
