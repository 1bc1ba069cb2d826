"""The names of attention functions in Transformers, each registered while a model needs it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IMPLEMENTATION = "rope_patch"  # under a scheme
SHARED = "rope_patch_shared"  # where several processes share a row
NAMES = (IMPLEMENTATION, SHARED)  # no other name changes

_users: weakref.WeakSet[Registration] = weakref.WeakSet()
_registering = threading.RLock()  # reentrant: a thread that holds it may collect a user as garbage


class Registration:
    """A user of a name: the hooks of a stack. The name is registered with its first user and removed with its last,
    also if a patched model is collected as garbage. A copy of a model is another user.

    Args:
        name: one of `NAMES`.
        function: the attention function that it names.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        with _registering:
            _users.add(self)
            ALL_ATTENTION_FUNCTIONS[name] = function
        weakref.finalize(self, _forget_unused).atexit = False

    def restore(self) -> None:
        """Remove this user."""
        with _registering:
            _users.discard(self)
            _forget_unused()

    def __reduce__(self) -> tuple[type[Registration], tuple[str, Callable[..., Any]]]:
        return Registration, (self.name, self.function)


def _forget_unused() -> None:
    with _registering:
        used = {user.name for user in list(_users)}  # a list, because the set may lose members meanwhile
        for name in NAMES:
            if name not in used and name in ALL_ATTENTION_FUNCTIONS._local_mapping:
                del ALL_ATTENTION_FUNCTIONS[name]


def scores_here(module: nn.Module) -> bool:
    """Whether an attention module calls a registered function."""
    return cast(Any, module.config)._attn_implementation in NAMES
