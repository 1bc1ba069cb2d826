"""What was changed on a model, remembered so that it can be taken back exactly."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rope_patch.errors import UnsupportedModel
from rope_patch.models.meta import EmptyTables, Refilling
from rope_patch.models.state import ModuleState, remove_hook

_HOOK, _STATE = "(hook)", "(state)"
"""What the log has in place of the name of an attribute."""


class Changes:
    """A log of changes, undone last first. Plain data: it can be copied and pickled together with the model."""

    def __init__(self) -> None:
        self._log: list[tuple[Any, str, bool, Any]] = []
        self._forks: list[ConfigFork] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """`setattr(target, name, value)`, remembered."""
        own = vars(target)
        if isinstance(target, nn.Module):
            own = {**own, **target._buffers, **target._parameters}
        self._log.append((target, name, name in own, own.get(name)))
        setattr(target, name, value)

    def hook(self, module: nn.Module, hook: Any) -> None:
        """`register_forward_pre_hook(with_kwargs=True)`, remembered."""
        module.register_forward_pre_hook(hook, with_kwargs=True)
        self._log.append((module, _HOOK, True, hook))

    def keep(self, module: nn.Module) -> None:
        """Remember the state of a module that changes it in its own forward."""
        self._log.append((module, _STATE, True, ModuleState(module)))

    def fill_tables(self, module: nn.Module, stack: nn.Module) -> None:
        """Let a rotary module of a `stack` on the meta device compute its tables, remembered.

        Raises:
            UnsupportedModel: it cannot.
        """
        if tables := EmptyTables(module, stack):
            self._log.append((module, _STATE, True, tables))
            tables.fill()

    def keep_filled(self, module: nn.Module, stack: nn.Module) -> None:
        """Let the tables that were put into such a module outlive the arrival of memory for its stack."""
        if any(isinstance(value, EmptyTables) and target is module for target, _, _, value in self._log):
            self.hook(module, Refilling(module))

    def fork_configs(self, modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
        """Give these modules configs of their own; those that shared one still do.

        Returns:
            the new configs. `settle_configs` is to be called once they say what they should.
        """
        holders = [module for module in modules if isinstance(vars(module).get("config"), PreTrainedConfig)]
        copies: dict[int, Any] = {}
        for module in holders:
            copy.deepcopy(module.config, copies)  # one memo, so that nested configs stay shared
        for module in holders:
            original = module.config
            fork = copies[id(original)]
            if all(known.fork is not fork for known in self._forks):
                self._forks.append(ConfigFork(original, fork))
            self.set(module, "config", fork)
        return [known.fork for known in self._forks]

    def settle_configs(self) -> None:
        """From here on, what changes in a forked config is the user's doing and outlives the undoing."""
        for fork in self._forks:
            fork.settle()

    def undo(self) -> None:
        """Set everything back; a tensor follows the device and dtype of the one it replaces.

        Raises:
            UnsupportedModel: accelerate keeps one of the tensors elsewhere by now; nothing was set back then.
        """
        for target, name, _, value in self._log:
            current = getattr(target, name, None) if isinstance(value, torch.Tensor) else None
            if isinstance(current, torch.Tensor) and current.is_meta and hasattr(target, "_hf_hook"):
                raise UnsupportedModel(
                    f"{type(target).__name__}.{name} was offloaded while it was patched, and what was set aside is the "
                    "patched one; call accelerate.hooks.remove_hook_from_submodules(model) first"
                )
        while self._log:
            target, name, existed, value = self._log.pop()
            if name == _HOOK:
                remove_hook(target, value)
            elif name == _STATE:
                value.restore()
            elif not existed:
                delattr(target, name)
            else:
                stood_in = getattr(target, name)
                if isinstance(value, torch.Tensor) and isinstance(stood_in, torch.Tensor):
                    value = _following(value, stood_in)
                setattr(target, name, value)
        while self._forks:
            self._forks.pop().join()


def _following(value: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """A tensor on the device and in the dtype of the one that stood in for it; a parameter stays the same object."""
    if not isinstance(value, nn.Parameter):
        return value.to(current)
    if current.is_meta:  # a parameter cannot be sent there and stay itself
        return nn.Parameter(value.to(current), requires_grad=current.requires_grad)
    value.data = value.data.to(current)
    return value.requires_grad_(current.requires_grad)


class ConfigFork:
    """A config and the copy that stands in for it while a model is patched."""

    def __init__(self, original: PreTrainedConfig, fork: PreTrainedConfig) -> None:
        self.original = original
        self.fork = fork
        self._settled: dict[str, Any] | None = None

    def settle(self) -> None:
        """Remember what the copy says now."""
        self._settled = copy.copy(vars(self.fork))

    def join(self) -> None:
        """Carry what the user changed meanwhile to the original, and leave the copy saying what the original says."""
        if self._settled is not None:  # else the installation failed before the copy was anybody's but ours
            for name, value in vars(self.fork).items():
                if name not in self._settled or self._settled[name] is not value:
                    vars(self.original)[name] = value
        vars(self.fork).clear()
        vars(self.fork).update(vars(self.original))
