"""Lets vLLM load models of images and text for their texts, where torchvision is missing.

Their modules import it, but only what reads images calls it. Wheels of torchvision fit one build of torch, and one that
does not fit keeps Transformers from being imported, so `make vllm-check` leaves it out.
"""

import importlib.machinery
import importlib.util
import sys
import types

from vllm.model_executor.models import registry


class _Anything(types.ModuleType):
    """A module in which every name is a class that does nothing."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__getattr__": lambda _, name: name})


if importlib.util.find_spec("torchvision") is None:
    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional", ".io"):
        module = _Anything(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    registry._run_in_subprocess = lambda inspect: inspect()  # another process would not have them
