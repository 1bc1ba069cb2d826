"""The learned parameters of a scheme: modules on the patched model hold them, so they train, move and are saved."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from rope_patch.errors import SlotConflict, counted, warn
from rope_patch.graphs import traced
from rope_patch.models.base import AttentionLayer, Stack
from rope_patch.models.probe import device_of, dtype_of
from rope_patch.models.rounding import is_half
from rope_patch.mounting.undo import Changes
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.reach import spelled
from rope_patch.schemes.slots import ModelShape
from rope_patch.schemes.tools.tables import require_room

NAME = "rope_patch"
"""Name of the holder on each attention module, and on the stack for parameters that all layers share."""


class SchemeParameters(nn.Module):
    """A holder of learned parameters of any shape by name, with initial `values`.

    Parameters are read by a call of this module, so that wrappers can act: adapters of PEFT choose the trained copy,
    and offloaded weights are fetched.
    """

    def __init__(self, values: dict[str, torch.Tensor], precise: Precise) -> None:
        super().__init__()
        self.precise = precise
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """The current parameters of these names, of any shape."""
        values = {name: getattr(self, name) for name in names}
        if self.precise.names:
            self.precise.check(values)
        return values


class Precise:
    """The names of parameters for which half precision has too few digits; all holders of a scheme share them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def check(self, values: dict[str, torch.Tensor]) -> None:
        """Warn if a cast has rounded one of these `values` of any shape, once for all holders."""
        if traced():
            return
        for name in self.names:
            if name in values and is_half(values[name].dtype):
                self.names = ()
                dtype = str(values[name].dtype).removeprefix("torch.")
                warn(
                    f"a cast has rounded {name}, which a scheme learns in float32, to {dtype}: cast the model before "
                    "the patch, or keep it in float32 and train with bf16=True, which casts by torch.autocast",
                    stacklevel=2,
                )
                return


@dataclass(frozen=True)
class LearnedWeights:
    """Names of one layer's learned parameters. Their values are read from the modules that run: an attention module and
    its stack, or replicas of both.

    Attributes:
        own: names in the holder of the attention module.
        shared: names in the holder of the stack.
        table: path in the stack of the checkpoint's own biases by bucket of distance; empty without such biases.
    """

    own: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    table: str = ""

    def read_from(self, module: nn.Module, stack: nn.Module) -> dict[str, torch.Tensor]:
        """The learned parameters by name, of any shape, for an attention `module` in a `stack`."""
        values: dict[str, torch.Tensor] = {}
        if self.table:
            table = cast(nn.Embedding, stack.get_submodule(self.table))
            is_here = not table.weight.is_meta  # if accelerate offloaded the weights, a call fetches them
            values["relative_attention_bias"] = table.weight if is_here else table(torch.arange(table.num_embeddings))
        return values | self.of_stack(stack) | self._in(module, self.own)

    def of_stack(self, stack: nn.Module) -> dict[str, torch.Tensor]:
        """The parameters that layers share, by name, of any shape."""
        return self._in(stack, self.shared)

    def _in(self, module: nn.Module, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        return getattr(module, NAME)(names) if names else {}

    def at_rest(self, module: nn.Module, stack: nn.Module) -> dict[str, torch.Tensor]:
        """The learned parameters by name, of any shape, detached and on the CPU, without a call of a module: offloaded
        ones stay on the meta device.
        """
        values = {"relative_attention_bias": cast(Any, stack.get_submodule(self.table)).weight} if self.table else {}
        for holder, names in ((stack, self.shared), (module, self.own)):
            if names:  # copies that adapters train come last, and win
                values |= {path.rpartition(".")[2]: value for path, value in getattr(holder, NAME).named_parameters()}
        return {name: value if value.is_meta else value.detach().cpu() for name, value in values.items()}


def install_parameters(
    scheme: Scheme, stack: Stack, layers: Iterable[AttentionLayer], changes: Changes
) -> dict[str, LearnedWeights]:
    """Put the learned parameters of a scheme on the attention modules and, if layers share them, on the stack.

    They have the scheme's initial values, on the device and in the dtype of their module; `precise` parameters are in
    float32 or wider.

    Returns:
        the names of the parameters by the name of each layer; an index would not do, because modules that run in turn
        may share one.

    Raises:
        SlotConflict: two parts of a composition learn parameters of the same name.
        InvalidField: a field does not fit the model.
    """
    layers = list(layers)

    def every_table() -> Iterator[torch.Tensor]:
        for name, value in scheme.parameters(shape_of(scheme, stack, layers[0]), torch.Generator()).items():
            yield from itertools.repeat(value, 1 if name in scheme.shared else len(layers))

    if scheme.learns:
        require_room("+".join(str(part) for part in scheme.parts() if part.learns), every_table)
    names = _initial_values(scheme, stack, layers[0], seed=0) if scheme.learns else {}
    shared = tuple(name for name in names if name in scheme.shared)
    own = tuple(name for name in names if name not in scheme.shared)
    if shared and hasattr(stack.module, NAME):
        raise SlotConflict(
            f"{spelled(scheme)} learns {', '.join(shared)} for all its layers, but other layers already share "
            "parameters; use one scheme for all of them, or schemes with separate parameters per layer"
        )
    precise = Precise(scheme.precise)
    if shared:
        _hold(stack.module, {name: names[name] for name in shared}, precise, changes)
    for layer in layers if own else ():
        values = _initial_values(scheme, stack, layer, seed=layer.index + 1)
        _hold(layer.module, {name: values[name] for name in own}, precise, changes)
    return {layer.name: LearnedWeights(own, shared, path_of_table(stack, layer)) for layer in layers}


def path_of_table(stack: Stack, layer: AttentionLayer) -> str:
    """The path in a stack to the checkpoint's own table of biases of a layer; empty without one."""
    modules = stack.module.named_modules() if layer.bias_table is not None else ()
    return next((path for path, module in modules if module is layer.bias_table), "")


def _initial_values(scheme: Scheme, stack: Stack, layer: AttentionLayer, seed: int) -> dict[str, torch.Tensor]:
    """Initial values of the scheme's parameters, without those that the checkpoint already has."""
    values = scheme.parameters(shape_of(scheme, stack, layer), torch.Generator().manual_seed(seed))
    if layer.bias_table is not None:
        values.pop("relative_attention_bias", None)
    return values


def shape_of(scheme: Scheme, stack: Stack, layer: AttentionLayer) -> ModelShape:
    """The sizes from which a scheme shapes its learned parameters in a layer."""
    sizes = (
        stack.config.hidden_size,
        len(stack.layers) + len(stack.others),
        stack.config.vocab_size,
        stack.checkpoint.under(scheme).training_length,
    )
    return ModelShape(layer.heads.num, layer.heads.dim, *sizes, layer.heads.value_dim, layer.spec.dim)


def _hold(module: nn.Module, values: dict[str, torch.Tensor], precise: Precise, changes: Changes) -> None:
    device, dtype = device_of(module), dtype_of(module)
    wide = torch.promote_types(dtype, torch.float32)
    placed = {name: value.to(device, wide if name in precise.names else dtype) for name, value in values.items()}
    changes.set(module, NAME, SchemeParameters(placed, precise))


def learned_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The learned parameters of schemes on a model, by their names in its `state_dict`."""
    return {name: value for name, value in model.named_parameters() if NAME in name.split(".")}


def inventory(scheme: Scheme, stack: Stack, layers: Iterable[AttentionLayer]) -> Iterator[str]:
    """Describe the current state of the learned parameters, one line per name."""
    layers = list(layers)
    if not scheme.learns:
        return
    first = _initial_values(scheme, stack, layers[0], seed=0)
    started = {stack.module: first}
    if any(name not in scheme.shared for name in first):
        started |= {layer.module: _initial_values(scheme, stack, layer, layer.index + 1) for layer in layers}
    for name, value in first.items():
        shared = name in scheme.shared
        holders = [stack.module] if shared else [layer.module for layer in layers]
        values = ((getattr(module, NAME)((name,))[name].detach(), started[module][name]) for module in holders)
        where = "shared by all layers" if shared else f"in each of {counted(len(holders), 'layer')}"
        state = "new and untrained" if all(torch.equal(now, start.to(now)) for now, start in values) else "trained"
        yield f"{name} {tuple(value.shape)} {where}: {len(holders) * value.numel():,} numbers, {state}"
