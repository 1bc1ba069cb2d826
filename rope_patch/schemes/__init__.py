"""Every scheme, one file per source."""

from rope_patch.schemes.alibi import ALiBi
from rope_patch.schemes.base import Checkpoint, Region, Scheme, Source
from rope_patch.schemes.compose import Compose
from rope_patch.schemes.logn import LogN
from rope_patch.schemes.ntk import AdjustedBase, DynamicNTK, NTKScaling
from rope_patch.schemes.pi import PositionInterpolation
from rope_patch.schemes.registry import (
    as_scheme,
    get_scheme,
    list_schemes,
    register_scheme,
    scheme_class,
    scheme_from_dict,
)
from rope_patch.schemes.rerope import LeakyReRoPE, ReRoPE
from rope_patch.schemes.rope import NoPE, RoPE
from rope_patch.schemes.self_extend import SelfExtend
from rope_patch.schemes.window import SlidingWindow
from rope_patch.schemes.yarn import YaRN

for _scheme in (
    RoPE,
    NoPE,
    PositionInterpolation,
    NTKScaling,
    AdjustedBase,
    DynamicNTK,
    YaRN,
    ReRoPE,
    LeakyReRoPE,
    SelfExtend,
    SlidingWindow,
    LogN,
    ALiBi,
):
    register_scheme(_scheme)

__all__ = [
    "ALiBi",
    "AdjustedBase",
    "Checkpoint",
    "Compose",
    "DynamicNTK",
    "LeakyReRoPE",
    "LogN",
    "NTKScaling",
    "NoPE",
    "PositionInterpolation",
    "ReRoPE",
    "Region",
    "RoPE",
    "Scheme",
    "SelfExtend",
    "SlidingWindow",
    "Source",
    "YaRN",
    "as_scheme",
    "get_scheme",
    "list_schemes",
    "register_scheme",
    "scheme_class",
    "scheme_from_dict",
]
