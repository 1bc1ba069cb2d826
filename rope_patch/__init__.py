"""Let a loaded Transformers model use another position scheme with one line, and undo it with another.

The public names are those of `rope_patch.api`, which is loaded when you first use one of them, so `rope-patch --help`
needs no torch. The import itself only enters the name "rope_patch" in Transformers' registries of attention
(`rope_patch.naming`). You can also find a scheme's class by its registered name.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rope_patch.naming import enter_name as _enter_name
from rope_patch.version import __version__ as __version__

if TYPE_CHECKING:
    from rope_patch.api import *  # noqa: F403


_enter_name()


def __getattr__(name: str) -> Any:
    if name == "__all__" or not name.startswith("_"):
        api = import_module("rope_patch.api")
        if name in ("__all__", *api.__all__):
            return getattr(api, name)
        registry = import_module("rope_patch.schemes.registry")
        for scheme in map(registry.scheme_class, registry.list_schemes()):
            # rope_patch.rerope and rope_patch.Rerope are rope_patch.ReRoPE
            if name == scheme.name or name.lower() == scheme.__name__.lower():
                return scheme
        meant = import_module("rope_patch.errors").nearest(name, api.__all__, cutoff=0.75)
        raise AttributeError(
            f"module 'rope_patch' has no attribute {name!r}" + "".join(f"; did you mean {each!r}?" for each in meant)
        )
    raise AttributeError(f"module 'rope_patch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__getattr__("__all__"))
