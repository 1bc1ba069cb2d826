"""Baichuan and Baichuan 2 as native models of Transformers 5, for the published checkpoint folders.

Importing this package registers nothing and imports no class; call `register_baichuan()` for that.
"""

from rope_patch.models.baichuan.published import is_baichuan_folder, published_remote_code
from rope_patch.models.baichuan.registration import register_baichuan

__all__ = ["is_baichuan_folder", "published_remote_code", "register_baichuan"]
