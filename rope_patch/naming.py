"""The name "rope_patch" as an attention of Transformers: `from_pretrained(folder, attn_implementation="rope_patch")` on
a folder that was saved under a scheme.

`import rope_patch` enters the name in Transformers' two registries, of attention functions and of masks, and changes
nothing else there. The import loads neither torch nor Transformers: if you import these later, the name is entered
then.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

NAME = "rope_patch"
"""The value of `attn_implementation`."""

_MOUNTING = "rope_patch.saving.by_name"  # loaded with the first call
_REGISTRY = "transformers.modeling_utils"  # this module loads `transformers.masking_utils`, too


def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The attention function of a model that asked for the name and is not patched yet; see `saving.by_name.attend`."""
    return _mounting().attend(module, *args, **kwargs)


def mask(**kwargs: Any) -> Any:
    """The mask function of a model that asked for the name; Transformers calls it before the first layer runs; see
    `saving.by_name.mask`.
    """
    return _mounting().mask(**kwargs)


def _mounting() -> ModuleType:
    """Import the module that mounts a scheme during a call, at the first such call."""
    from rope_patch.errors import UnsupportedModel
    from rope_patch.graphs import traced

    if traced():
        raise UnsupportedModel(
            f"a model with attn_implementation={NAME!r} is compiled before its first call: write "
            "rope_patch.repatch(model) first, or load it with rope_patch.from_pretrained(FOLDER)"
        )
    return import_module(_MOUNTING)


def enter_name() -> None:
    """Enter the name in the registries of Transformers: at once if they are loaded, else when they are loaded."""
    if _REGISTRY in sys.modules:
        _enter()
    elif not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenLoaded())


def _enter() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


class _WhenLoaded(MetaPathFinder):
    """An import hook that enters the name after the module with Transformers' registry has run, and then removes
    itself.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module with the registry as Python does, and enter the name after it runs; None for every other
        module.
        """
        if fullname != _REGISTRY:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _enter()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
