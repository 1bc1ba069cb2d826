"""The old place of `PoSECollator`, which is now in `rope_patch.data`."""

from rope_patch.data.pose import PoSECollator as PoSECollator
