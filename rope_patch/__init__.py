"""One line that lets a loaded Transformers model use another position scheme, and one that takes it back."""

from rope_patch.describe import describe
from rope_patch.errors import (
    AlreadyPatched,
    InvalidField,
    NotExpressible,
    NothingToPatch,
    NotPatched,
    RopePatchError,
    SlotConflict,
    UnknownScheme,
    UnsupportedModel,
    UnsupportedPositions,
)
from rope_patch.export import export_rope_parameters, native_scheme
from rope_patch.mounts import plan_mounts
from rope_patch.patch import PatchHandle, patch, unpatch
from rope_patch.persistence import from_pretrained, repatch
from rope_patch.schemes import (
    AdjustedBase,
    ALiBi,
    Compose,
    DynamicNTK,
    LeakyReRoPE,
    LogN,
    NoPE,
    NTKScaling,
    PositionInterpolation,
    ReRoPE,
    RoPE,
    Scheme,
    SelfExtend,
    SlidingWindow,
    YaRN,
    get_scheme,
    list_schemes,
    register_scheme,
)

from rope_patch.version import __version__

__all__ = [
    "ALiBi",
    "AdjustedBase",
    "AlreadyPatched",
    "Compose",
    "DynamicNTK",
    "InvalidField",
    "LeakyReRoPE",
    "LogN",
    "NTKScaling",
    "NoPE",
    "NotExpressible",
    "NotPatched",
    "NothingToPatch",
    "PatchHandle",
    "PositionInterpolation",
    "ReRoPE",
    "RoPE",
    "RopePatchError",
    "Scheme",
    "SelfExtend",
    "SlidingWindow",
    "SlotConflict",
    "UnknownScheme",
    "UnsupportedModel",
    "UnsupportedPositions",
    "YaRN",
    "describe",
    "export_rope_parameters",
    "from_pretrained",
    "get_scheme",
    "list_schemes",
    "native_scheme",
    "patch",
    "plan_mounts",
    "register_scheme",
    "repatch",
    "unpatch",
]
