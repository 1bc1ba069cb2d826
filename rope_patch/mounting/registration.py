"""The name of the attention function in Transformers, which is registered while a patched model needs it."""

from __future__ import annotations

import threading
import weakref
from typing import Any, cast

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.mounting.scoring import late_attention
from rope_patch.mounting.shared_row import shared_attention

IMPLEMENTATION = "rope_patch"  # the name; no other name changes but `SHARED`
SHARED = "rope_patch_shared"  # the name where several processes share a row

_users: weakref.WeakSet[Registration] = weakref.WeakSet()
_registering = threading.RLock()  # reentrant: a thread that holds it may collect a user as garbage


class Registration:
    """A user of the name: the hooks of a stack. The name is registered with the first user and removed with the last,
    also if a patched model is collected as garbage. A copy of a model is another user.
    """

    def __init__(self) -> None:
        with _registering:
            _users.add(self)
            ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = late_attention
            ALL_ATTENTION_FUNCTIONS[SHARED] = shared_attention
        weakref.finalize(self, _forget_unused).atexit = False

    def restore(self) -> None:
        """Remove this user."""
        with _registering:
            _users.discard(self)
            _forget_unused()

    def __reduce__(self) -> tuple[type[Registration], tuple[()]]:
        return Registration, ()


def _forget_unused() -> None:
    with _registering:
        # `list`, because the length of a weak set may still include dead members
        if not list(_users) and IMPLEMENTATION in ALL_ATTENTION_FUNCTIONS._local_mapping:
            del ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION], ALL_ATTENTION_FUNCTIONS[SHARED]


def scores_here(module: nn.Module) -> bool:
    """Whether an attention module calls a registered function."""
    return cast(Any, module.config)._attn_implementation in (IMPLEMENTATION, SHARED)
