"""A log of the changes to a model, so that they can be undone exactly."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_patch.errors import UnsupportedModel
from rope_patch.models.module_state import EmptyTables, Refilling, remove_hook

_REPLICATE = "_replicate_for_data_parallel"  # the name that `nn.DataParallel` calls on every module
_HOOK, _STATE, _FORWARD = "(hook)", "(state)", "(forward)"  # entries of the log that are not attribute names


class Changes:
    """A log of changes, which are undone in reverse order. The log is plain data, so it is copied and pickled with the
    model.
    """

    def __init__(self) -> None:
        self._log: list[tuple[Any, str, bool, Any]] = []
        self._forks: list[ConfigFork] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute by `setattr(target, name, value)`, and log it."""
        attributes = vars(target)
        if isinstance(target, nn.Module):
            attributes = {**attributes, **target._buffers, **target._parameters}
        self._log.append((target, name, name in attributes, attributes.get(name)))
        setattr(target, name, value)

    def hook(self, module: nn.Module, hook: Any, first: bool = False) -> None:
        """Register a forward pre-hook with keyword arguments, and log it; `first` calls it before all others."""
        module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)
        self._log.append((module, _HOOK, True, hook))

    def hooks_of(self, module: nn.Module) -> list[Any]:
        """The logged hooks of a module's forward, in the order in which they run."""
        ours = {id(value) for target, name, _, value in self._log if target is module and name == _HOOK}
        return [hook for hook in module._forward_pre_hooks.values() if id(hook) in ours]

    def hook_saving(self, module: nn.Module, hook: Any) -> None:
        """Register a state-dict pre-hook, and log it."""
        module.register_state_dict_pre_hook(hook)
        self._log.append((module, _HOOK, True, hook))

    def seen_hook(self, module: nn.Module, hook: Any) -> None:
        """Like `hook`, for a module that may be compiled already: a compiled graph does not look for new hooks, but it
        looks for a `forward` of the module's own.
        """
        self.hook(module, hook)
        if "forward" not in vars(module):
            module.forward = module.forward
            self._log.append((module, _FORWARD, True, module.forward))
            self.set(module, _REPLICATE, functools.partial(_replica_without_forward, module))

    def log(self, target: Any, change: Any) -> None:
        """Log a change of `target` that `change.restore()` undoes."""
        self._log.append((target, _STATE, True, change))

    def fill_tables(self, module: nn.Module, stack: nn.Module) -> None:
        """Let a rotary module of a `stack` on the meta device compute its tables, and log it.

        Raises:
            UnsupportedModel: the module cannot compute its tables.
        """
        if tables := EmptyTables(module, stack):
            self.log(module, tables)
            tables.fill()

    def keep_filled(self, module: nn.Module, stack: nn.Module) -> None:
        """Keep the tables in a rotary module that `fill_tables` filled when its stack gets memory."""
        if any(isinstance(value, EmptyTables) and target is module for target, _, _, value in self._log):
            self.hook(module, Refilling(module))

    def fork_configs(self, modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
        """Give these modules copies of their configs; a shared config stays shared.

        Returns:
            the new configs. Call `settle_configs` once they are complete.
        """
        holders = [module for module in modules if isinstance(vars(module).get("config"), PreTrainedConfig)]
        copies: dict[int, Any] = {}
        for module in holders:
            copy.deepcopy(module.config, copies)  # one memo, so that nested configs stay shared
        for module in holders:
            original = module.config
            fork = copies[id(original)]
            if all(each.fork is not fork for each in self._forks):
                self._forks.append(ConfigFork(original, fork))
            self.set(module, "config", fork)
        return [each.fork for each in self._forks]

    def settle_configs(self) -> None:
        """From now on, treat changes in a forked config as the user's; `undo` keeps them."""
        for each in self._forks:
            each.settled = copy.copy(vars(each.fork))

    def _replaced(self) -> Iterator[tuple[Any, str]]:
        """The owner and name of each tensor that was replaced."""
        for target, name, _, value in self._log:
            names = (name,) if isinstance(value, torch.Tensor) else getattr(value, "names", ())
            yield from ((target, each) for each in names)

    def undo(self) -> None:
        """Restore everything; a tensor moves to the device and dtype of its replacement.

        Raises:
            UnsupportedModel: accelerate has offloaded one of the tensors; nothing is restored then.
        """
        for target, name in self._replaced():
            current = getattr(target, name, None)
            if isinstance(current, torch.Tensor) and current.is_meta and hasattr(target, "_hf_hook"):
                raise UnsupportedModel(
                    f"{type(target).__name__}.{name} was offloaded while it was patched, so the offloaded tensor is "
                    "the patched one; call accelerate.hooks.remove_hook_from_submodules(model) first"
                )
        while self._log:
            target, name, existed, value = self._log.pop()
            if name == _HOOK:
                remove_hook(target, value)
            elif name == _FORWARD:
                if vars(target).get("forward") is value:  # else accelerate wraps it
                    del target.forward
            elif name == _STATE:
                value.restore()
            elif not existed:
                delattr(target, name)
            else:
                replacement = getattr(target, name)
                if isinstance(value, torch.Tensor) and isinstance(replacement, torch.Tensor):
                    value = _like_replacement(value, replacement)
                setattr(target, name, value)
        while self._forks:
            self._forks.pop().join()


def _replica_without_forward(module: nn.Module) -> nn.Module:
    """Make a replica of a module for `nn.DataParallel`. A replica copies attributes, so it needs its own forward and
    not the original module's.
    """
    replica: nn.Module = getattr(type(module), _REPLICATE)(module)
    del replica.forward
    return replica


def _like_replacement(value: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """Move a tensor to the device and dtype of its replacement; a parameter stays the same object."""
    if not isinstance(value, nn.Parameter):
        return value.to(current)
    if current.is_meta:  # moving a parameter to meta needs a new object
        return nn.Parameter(value.to(current), requires_grad=current.requires_grad)
    value.data = value.data.to(current)
    return value.requires_grad_(current.requires_grad)


class ConfigFork:
    """A config and the copy that replaces it while a model is patched."""

    def __init__(self, original: PreTrainedConfig, fork: PreTrainedConfig) -> None:
        self.original = original
        self.fork = fork
        self.settled: dict[str, Any] | None = None

    def join(self) -> None:
        """Copy the user's changes to the original, and make the copy equal to the original."""
        if self.settled is not None:  # else the installation failed before users could see the copy
            for name, value in vars(self.fork).items():
                if name not in self.settled or self.settled[name] is not value:
                    vars(self.original)[name] = value
        vars(self.fork).clear()
        vars(self.fork).update(vars(self.original))
