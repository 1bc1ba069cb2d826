"""The stack that runs a layer: the patched one, its copy, or a replica on another GPU; and a check that it still has
the layers that were patched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from rope_patch.errors import UnsupportedModel
from rope_patch.graphs import traced
from rope_patch.models.base import Stack
from rope_patch.mounting.undo import Changes
from rope_patch.schemes.base import Scheme

_LINK = "_rope_patch_stack"

_COPIED = "this layer was copied from {} while that was patched; unpatch the model, copy its layers, and patch it again"


class StackLink:
    """A link from a module inside a stack to the stack that runs it.

    In a copy of the whole stack the link leads to the copy. In a copy of a layer alone it leads nowhere.
    """

    def __init__(self, stack: nn.Module | None) -> None:
        self.stack = stack

    def __deepcopy__(self, memo: dict[int, Any]) -> StackLink:
        return StackLink(memo.get(id(self.stack)))


def is_linked(module: nn.Module) -> bool:
    """Whether a module belongs to a patched stack, or to a copy or a replica of one."""
    return _LINK in vars(module)


def stack_of(module: nn.Module, name: str) -> nn.Module:
    """The stack that runs a linked module called `name`.

    Raises:
        UnsupportedModel: the module was copied without its stack, while the stack was patched.
    """
    stack = getattr(module, _LINK).stack
    if stack is None:
        raise UnsupportedModel(_COPIED.format(name))
    return stack


@dataclass(eq=False)
class LayersHook:
    """Pre-hook of a stack: it checks that the layers are the ones that were patched, and links the layers of a replica
    to the replica.

    If you remove a layer, the others stay unchanged.

    Attributes:
        lists: the lists of blocks, as paths in the stack.
        blocks: the blocks in these lists when the stack was patched.
        seen: the blocks in these lists at the last forward.
        numbered: whether the scheme tells layers apart by their number, so that none may be removed or moved.
    """

    scheme: Scheme
    lists: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    seen: tuple[nn.Module, ...]
    numbered: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the layers; the arguments stay unchanged.

        Raises:
            UnsupportedModel: there is a new layer, or the number of a layer matters and has changed.
        """
        if traced():
            return
        if getattr(module, "_is_replica", False):  # a replica of `nn.DataParallel`, made for one forward
            for inner in module.modules():
                if _LINK in vars(inner):
                    setattr(inner, _LINK, StackLink(module))
            return
        blocks = blocks_of(module, self.lists)
        if blocks != self.seen:
            self._check(module, blocks)
            self.seen = blocks

    def _check(self, module: nn.Module, blocks: tuple[nn.Module, ...]) -> None:
        known, family = set(self.blocks), type(module).__name__
        # a block may be in a wrapper
        ours = [next((inner for inner in block.modules() if inner in known), None) for block in blocks]
        if None in ours:
            place = ours.index(None)
            raise UnsupportedModel(
                f"{family}: layer {place} ({type(blocks[place]).__name__}) came after the patch and is not under "
                f"{self.scheme}; unpatch the model, change its layers, and patch it again"
            )
        if self.numbered and tuple(ours) != self.blocks:
            moved = [i for i, (now, then) in enumerate(zip(ours, self.blocks, strict=False)) if now is not then]
            place = moved[0] if moved else len(ours)
            raise UnsupportedModel(
                f"{family}: layer {place} is not the one that was patched ({len(ours)} layers of "
                f"{len(self.blocks)} are left), but {self.scheme} tells layers apart by their number; unpatch the "
                "model, change its layers, and patch it again"
            )


def blocks_of(stack: nn.Module, lists: Iterable[str]) -> tuple[nn.Module, ...]:
    """The blocks in the lists of a stack at these paths."""
    return tuple(block for path in lists for block in stack.get_submodule(path)._modules.values() if block is not None)


def link_modules(modules: Iterable[nn.Module], stack: Stack, changes: Changes) -> None:
    """Link modules inside a stack to it.

    Raises:
        UnsupportedModel: a module was copied while its original was patched.
    """
    for module in dict.fromkeys(modules):
        if _LINK in vars(module):
            names = (name for name, inner in stack.module.named_modules() if inner is module)
            raise UnsupportedModel(f"{next(names)}: " + _COPIED.format("a layer"))
        changes.set(module, _LINK, StackLink(stack.module))


def watch_layers(scheme: Scheme, stack: Stack, changes: Changes) -> None:
    """Check the layers of a stack in each forward."""
    lists = tuple(dict.fromkeys(filter(None, (_list_around(stack.module, layer.name) for layer in stack.layers))))
    blocks = blocks_of(stack.module, lists)
    numbered = bool(scheme.by_layer) or scheme.every_block
    changes.hook(stack.module, LayersHook(scheme, lists, blocks, blocks, numbered))


def _list_around(stack: nn.Module, name: str) -> str:
    """The path of the outermost list of blocks around a layer; empty without one."""
    parts = name.split(".")
    paths = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return next((path for path in paths if isinstance(stack.get_submodule(path), nn.ModuleList)), "")
