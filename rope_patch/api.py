"""The public names, which `import rope_patch` provides."""

from rope_patch.description import describe
from rope_patch.errors import (
    AlreadyPatched,
    InvalidField,
    NotExpressible,
    NothingToPatch,
    NotPatched,
    RopePatchError,
    RopePatchWarning,
    SlotConflict,
    UnknownScheme,
    UnsupportedModel,
    UnsupportedPositions,
)
from rope_patch.explaining import explain
from rope_patch.models.baichuan import register_baichuan
from rope_patch.models.cached_keys import CachedKeys
from rope_patch.models.rope_parameters import export_rope_parameters, native_scheme
from rope_patch.mounting.plan import plan_mounts
from rope_patch.patching import PatchHandle, current_scheme, patch, unpatch
from rope_patch.ranking import rank_heads
from rope_patch.saving.loading import from_pretrained
from rope_patch.saving.resuming import repatch
from rope_patch.saving.wrapped import save_pretrained
from rope_patch.schemes import *
from rope_patch.version import __version__

__all__ = ["__version__", *sorted(name for name in globals() if not name.startswith("_"))]
