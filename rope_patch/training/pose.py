"""Where `PoSECollator` was before `rope_patch.data`."""

from rope_patch.data.pose import PoSECollator as PoSECollator
