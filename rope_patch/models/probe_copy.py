"""Copies on which parts of a model are measured, and a test whether two parts are of one kind.

A copy runs the same code with small random weights: projections read a few of their input features, and norms keep
their width. The original module neither runs nor changes.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import nn

_FEATURES = 8  # number of input features that a projection of a copy reads

_LARGEST = 2**20
"""Maximum size of a weight that gets random values; larger weights, except in projections, are used unchanged."""

_INTERNAL = frozenset(vars(nn.Module()))
_PLACED = {"_hf_hook", "_old_forward", "forward"}  # attributes that accelerate sets on a module whose weights it moves


class NoProbeCopy(Exception):
    """Raised for a module that runs code which a copy would not run."""


class _Projection(nn.Linear):
    """A linear map whose weights are zero except for the first input features."""

    def __init__(self, original: nn.Linear, device: torch.device, random: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        shape = (self.out_features, min(self.in_features, _FEATURES))
        self.weight = nn.Parameter(torch.randn(shape, generator=random).to(device, original.weight.dtype), False)
        bias = original.bias
        self.bias = None if bias is None else nn.Parameter(_random_like(bias, device, random), False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Project `(..., in_features)` to `(..., out_features)`."""
        return nn.functional.linear(input[..., : self.weight.shape[1]], self.weight, self.bias)


class ProbeCopies:
    """A maker of copies for the probe on a device; a shared module stays shared."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.index_was_read = False
        self._random = torch.Generator().manual_seed(0)
        self._made: dict[int, nn.Module] = {}

    def of(self, module: nn.Module) -> nn.Module:
        """Copy a module, in evaluation mode; attributes that a forward sets stay on the copy.

        Raises:
            NoProbeCopy: the module has a hook or a replaced forward, which a copy would not run.
        """
        if id(module) not in self._made:
            self._made[id(module)] = self._make(module)
        return self._made[id(module)]

    def _make(self, module: nn.Module) -> nn.Module:
        if not _runs_its_class(module):
            raise NoProbeCopy(f"{type(module).__name__} has hooks, or a forward that is not its class's")
        weights = [weight for weight in module._parameters.values() if weight is not None]
        plain = (type(weight) in (nn.Parameter, torch.Tensor) and weight.is_floating_point() for weight in weights)
        if not all(plain):
            return module  # packed weights, which only their owner can read
        if type(module) is nn.Linear:
            return _Projection(module, self.device, self._random)
        copied = cast(nn.Module, object.__new__(self._class_of(module)))
        nn.Module.__init__(copied)
        vars(copied).update(_settings(module))
        copied._buffers.update(module._buffers)
        for name, weight in module._parameters.items():
            # one number is a switch, not a weight
            if weight is None or weight.numel() > _LARGEST or (weight.numel() == 1 and not weight.is_meta):
                copied._parameters[name] = weight
            else:
                copied._parameters[name] = nn.Parameter(_random_like(weight, self.device, self._random), False)
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else self.of(child)
        copied.training = False
        return copied

    def _class_of(self, module: nn.Module) -> type:
        """The class of a module; for a layer with an index, a subclass that records reads of the index."""
        if "layer_idx" not in vars(module):
            return type(module)

        def read(_: Any) -> Any:
            self.index_was_read = True
            return vars(module)["layer_idx"]

        return type(
            type(module).__name__, (type(module),), {"layer_idx": property(read), "__module__": type(module).__module__}
        )


def kind_of(module: nn.Module) -> Hashable:
    """A key of everything that a module's measurement depends on: equal for two modules of one kind, unique if in
    doubt.

    It contains all settings of the module and its submodules except `layer_idx`; weights count by their shapes.
    """
    return tuple((name, *part_of(part)) for name, part in module.named_modules(remove_duplicate=False))


def part_of(module: nn.Module) -> tuple[Any, ...]:
    """The key of a module alone, without its submodules; see `kind_of`."""
    if not _runs_its_class(module):
        return (id(module),)
    attributes = {**_settings(module), **module._parameters, **module._buffers}
    return type(module), frozenset((name, _frozen(value)) for name, value in attributes.items() if name != "layer_idx")


def _settings(module: nn.Module) -> dict[str, Any]:
    """The attributes that a module's class sets on it."""
    dropped = _PLACED if "_hf_hook" in vars(module) else {"_compiled_call_impl"}
    return {name: value for name, value in vars(module).items() if name not in _INTERNAL and name not in dropped}


def _runs_its_class(module: nn.Module) -> bool:
    """Whether a call of a module runs only the forward of its class, apart from fetching weights."""
    own = vars(module)
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return False
    if "_hf_hook" in own:
        hooks = getattr(own["_hf_hook"], "hooks", (own["_hf_hook"],))
        former = getattr(own.get("_old_forward"), "__func__", None)
        return former is type(module).forward and all(type(hook).__module__ == "accelerate.hooks" for hook in hooks)
    return "forward" not in own


def _frozen(value: Any) -> Hashable:
    """Freeze a setting: by value if it is plain data, otherwise by identity."""
    if isinstance(value, (str, int, float, bool, type(None), torch.dtype, torch.device, type)):
        return type(value), value
    if isinstance(value, torch.Tensor):
        described = (type(value), value.shape, value.dtype, value.device.type)
        # a weight of one number is a switch; other vectors are weights, or tables that may depend on the layer
        by_value = not value.is_meta and (
            value.numel() == 1 or (value.ndim < 2 and not isinstance(value, nn.Parameter))
        )
        return (*described, tuple(value.detach().flatten().tolist())) if by_value else described
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, dict):
        return type(value), tuple((_frozen(key), _frozen(item)) for key, item in value.items())
    return type(value), id(value)


def _random_like(weight: torch.Tensor, device: torch.device, random: torch.Generator) -> torch.Tensor:
    """Random numbers around one, so that norms weight each dimension differently."""
    return (1 + 0.5 * torch.randn(weight.shape, generator=random)).to(device, weight.dtype)
