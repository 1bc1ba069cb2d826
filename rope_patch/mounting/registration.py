"""The names of attention functions in Transformers, each registered while a model needs it, and the models that were
loaded by such a name.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.naming import NAME

IMPLEMENTATION = NAME  # under a scheme
SHARED = "rope_patch_shared"  # where several processes share a row
NAMES = (IMPLEMENTATION, SHARED)  # no other name changes

_users: weakref.WeakSet[Registration] = weakref.WeakSet()
_registering = threading.RLock()  # reentrant: a thread that holds it may collect a user as garbage


class Registration:
    """A registered name of an attention function, used by the hooks of one stack. The name is removed with its last
    user, also if the user is garbage-collected. A copy of a patched model is another user.

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
    """Whether an attention module calls a function that this library registered."""
    return cast(Any, module.config)._attn_implementation in NAMES


def asks_by_name(model: nn.Module) -> bool:
    """Whether a model was loaded with the name as its `attn_implementation`, so that its first call mounts the scheme
    in its config.
    """
    return any(_asks(module) for module in model.modules() if isinstance(module, PreTrainedModel))


def _asks(model: PreTrainedModel) -> bool:
    return cast(Any, model.config)._attn_implementation == IMPLEMENTATION


@contextmanager
def own_attention(model: nn.Module) -> Iterator[list[Any]]:
    """Let the Transformers models in a model that ask for a scheme by name run the attention that Transformers would
    have chosen, as they do after `patch`. After an error they ask for the name again, so that no model runs without its
    scheme.

    Yields:
        the configs that asked for the name.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    asking = {id(each.config): each for each in models if _asks(each)}
    configs: list[Any] = [each.config for each in asking.values()]
    for each, config in zip(asking.values(), configs, strict=True):
        config._attn_implementation_internal = each.get_correct_attn_implementation(None, is_init_check=True)
    try:
        yield configs
    except BaseException:
        for config in configs:
            config._attn_implementation_internal = IMPLEMENTATION
        raise
