"""Every scheme, one file per source. To register and publish a new one, import it here."""

from rope_patch.schemes.alibi import ALiBi
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.clip import ClippedRoPE
from rope_patch.schemes.complex_order import ComplexOrder
from rope_patch.schemes.compose import Compose
from rope_patch.schemes.cope import CoPE
from rope_patch.schemes.dca import DualChunkAttention
from rope_patch.schemes.deberta import Disentangled
from rope_patch.schemes.dpe import DimensionWise
from rope_patch.schemes.fire import FIRE
from rope_patch.schemes.floater import FLOATER
from rope_patch.schemes.fope import FoPECut
from rope_patch.schemes.fox import FoX
from rope_patch.schemes.giraffe import PowerScaling, TruncatedBasis
from rope_patch.schemes.hierarchical import Hierarchical
from rope_patch.schemes.info_scale import InfoScale
from rope_patch.schemes.inkling import Inkling
from rope_patch.schemes.kerple import KERPLE
from rope_patch.schemes.lampe import LaMPE
from rope_patch.schemes.learned import Learned
from rope_patch.schemes.llama3 import Llama3Scaling
from rope_patch.schemes.lm_infinite import LMInfinite
from rope_patch.schemes.logn import LogN
from rope_patch.schemes.longrope import LongRoPE
from rope_patch.schemes.mrrope import MrRoPE
from rope_patch.schemes.ms_poe import MsPoE
from rope_patch.schemes.multiplicative import Multiplicative
from rope_patch.schemes.ntk import AdjustedBase, DynamicNTK, NTKScaling
from rope_patch.schemes.ntk_mixed import NTKMixed
from rope_patch.schemes.per_layer import PerLayer
from rope_patch.schemes.pi import PositionInterpolation
from rope_patch.schemes.proportional import Proportional
from rope_patch.schemes.recurrent import Recurrent
from rope_patch.schemes.registry import (
    as_scheme,
    get_scheme,
    list_schemes,
    register_scheme,
    scheme_class,
    scheme_from_dict,
)
from rope_patch.schemes.rerope import LeakyReRoPE, ReRoPE
from rope_patch.schemes.resonance import Resonance
from rope_patch.schemes.rope import LearnedRoPE, NoPE, RoPE
from rope_patch.schemes.sandwich import Sandwich
from rope_patch.schemes.self_extend import SelfExtend
from rope_patch.schemes.shaw import ShawRelative
from rope_patch.schemes.sinusoidal import Sinusoidal
from rope_patch.schemes.slots import Checkpoint, Region
from rope_patch.schemes.ssmax import SSMax
from rope_patch.schemes.string import STRING
from rope_patch.schemes.t5 import T5Bias
from rope_patch.schemes.transformer_xl import TransformerXL
from rope_patch.schemes.urpe import URPE
from rope_patch.schemes.window import SlidingWindow
from rope_patch.schemes.xpos import XPos
from rope_patch.schemes.yarn import DynamicYaRN, NTKByParts, YaRN

__all__ = [name for name, value in vars().items() if isinstance(value, type) and issubclass(value, Scheme)]
for _name in __all__:
    if vars()[_name] not in (Scheme, Compose, PerLayer):
        register_scheme(vars()[_name])
__all__ += ["get_scheme", "list_schemes", "register_scheme"]
