"""Baichuan and Baichuan 2 as native models of Transformers 5, for the published checkpoint folders.

Importing this package registers nothing: `register_baichuan()` does, and the classes are imported when they are asked
for.
"""

from __future__ import annotations

import importlib
from typing import Any

from rope_patch.models.baichuan.published import is_baichuan_folder, published_remote_code
from rope_patch.models.baichuan.registration import register_baichuan

_CLASSES = {
    "BaiChuanForCausalLM": "modeling",
    "BaiChuanTokenizer": "tokenization",
    "BaichuanConfig": "configuration",
    "BaichuanForCausalLM": "modeling",
    "BaichuanModel": "modeling",
    "BaichuanTokenizer": "tokenization",
}

__all__ = [*_CLASSES, "is_baichuan_folder", "published_remote_code", "register_baichuan"]


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_CLASSES[name]}"), name)
