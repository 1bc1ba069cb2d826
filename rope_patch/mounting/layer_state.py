"""The data of one layer under a scheme, which its hook, its calls, servers and `describe` read. It knows no hook."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from rope_patch.attention.forward_cache import StackForwardCache
from rope_patch.attention.inputs import AttentionMode
from rope_patch.attention.problem import Problem
from rope_patch.models.base import AttentionLayer, RotaryTables
from rope_patch.models.cached_keys import OWN_ROTATION, cache_tag
from rope_patch.mounting.parameters import LearnedWeights
from rope_patch.mounting.running_stack import is_linked, stack_of
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Region
from rope_patch.schemes.tools.positions import Constant, pairs_of
from rope_patch.typing import Frequencies, Lengths, PositionMap, Weights

UNROTATED = Constant(0)  # the position of states without rotation

Rotation = Literal["module", "own", "late", "anchored"]
"""Where queries and keys are rotated: in the attention module, by the model's tables or by the scheme's own; in the
attention function; or in both. In the last case the module uses the positions of the farthest region, which the cache
keeps, and the function adds the difference."""


Watch = Callable[[str, "Problem | None"], None]
"""Is told the name of an executor, or of the attention that was there before, and the problem if there was one."""


@dataclass(eq=False)
class LayerState:
    """One layer under a scheme, as plain data that is copied and pickled with the model.

    Attributes:
        scheme: with its defaults filled in.
        frequencies: `late` if the scheme's frequencies are computed in the attention function, `model` if the model's
            tables are read.
        learned: names of its learned parameters.
        forward_cache: what it shares with the other layers of its group.
        config: the model's config, with its current attention implementation.
        num_layers: number of the stack's layers that keep keys in a cache.
        cache_tag: marks a cache with the writer of its keys; one for all layers of a stack.
        both_ways, regions: the regions of the scheme, and those of them that a causal call can see.
        anchor: the position map of the keys in the cache; None if they are unrotated, or rotated by the model itself.
        kept: the rotation of the keys in the cache, as text.
        rotates: whether queries and keys are rotated in the attention function.
        tables: names the rotary tables, which layers may share.
        kind: layers of one group and kind differ only in states and weights.
        own_tables: those by which the attention module rotates, if other layers share the model's; their module is a
            copy, which does not move with the model.
        scores: whether the attention function scores, instead of delegating to the one before.
        watch: is told how each call of the layer is computed, while `explain` runs.
    """

    scheme: Scheme
    layer: AttentionLayer
    rotation: Rotation
    frequencies: Literal["model", "late"]
    learned: LearnedWeights
    attention: AttentionMode
    forward_cache: StackForwardCache
    config: Any
    num_layers: int
    own_tables: RotaryTables | None = None
    watch: Watch | None = None

    def __post_init__(self) -> None:
        slots = self.scheme.slots
        self.both_ways: tuple[Region, ...] = self.scheme.segments() if "segments" in slots else ()
        # regions of negative distance contain only keys after the query, which a causal call never sees
        self.regions = tuple(region for region in self.both_ways if region.stop > 0)
        self.rotates = self.rotation in ("late", "anchored")
        farthest = max(self.regions, key=lambda region: region.start, default=None)
        # the model's own tables have one position for all pairs: a map with a pair axis is no anchor
        anchored = self.rotation == "anchored" and farthest is not None and pairs_of(farthest.key_map) is None
        self.anchor: PositionMap | None = farthest.key_map if anchored else None  # type: ignore[union-attr]
        kept = "unrotated" if self.anchor is None else f"rotated by {self.anchor}"
        self.kept = kept if self.rotates else OWN_ROTATION
        self.cache_tag = cache_tag(self.scheme, self.kept)
        self.follows_positions = bool(self.rotates or self.regions or slots & {"bias", "values"} or self.scheme.decays)
        rotary = self.layer.rotary
        self.tables = None if rotary is None else (rotary.layer_type, id(rotary.module))
        self.kind = self.tables, self.layer.sliding_window
        self._static: dict[torch.device, Frequencies] = {}
        self._own: dict[torch.device, RotaryTables] = {}
        # properties that every call needs
        self.methods, self.decays, self.scales = self.scheme.methods, self.scheme.decays, "query_scale" in slots
        self.scores = bool(slots & {"segments", "bias", "values"}) or self.decays or self.attention != "auto"

    @property
    def reads_groups(self) -> bool:
        """Whether pads and documents may be passed as groups of keys instead of a mask."""
        return self.layer.sliding_window is None

    def weights(self, module: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """The learned parameters by name, of any shape: those of the attention `module` that is called, which is a
        replica of the layer's own under `nn.DataParallel`, and of its stack.
        """
        if module is None or not is_linked(module):  # a server calls with a module of its own
            module = self.layer.module
        return self.learned.of(module, stack_of(module, self.layer.name))

    def own_tables_on(self, device: torch.device) -> RotaryTables:
        """`own_tables` on a device. Replicas on several devices run at once, so none moves what another reads."""
        own = cast(RotaryTables, self.own_tables)
        if torch.compiler.is_compiling():
            return self._own.get(device, own)
        if device not in self._own:
            self._own[device] = dataclasses.replace(own, module=copy.deepcopy(own.module).to(device))
        return self._own[device]

    def anchor_for(self, keeps_keys: bool) -> PositionMap | None:
        """The rotation that the module should apply. Without a cache, no rotation is the least work."""
        if self.anchor is None or (keeps_keys and self.anchor != UNROTATED):
            return self.anchor
        return UNROTATED if cast(RotaryTables, self.layer.rotary).attention_scaling == 1 else None

    def frequencies_of(self, lengths: Lengths, weights: Weights, device: torch.device, anchored: bool) -> Frequencies:
        """f of this layer, with arguments as of `own_frequencies`. If queries and keys are `anchored`, the model's own
        factor was already applied to them.
        """
        if self.frequencies == "late":
            return self.own_frequencies(lengths, weights, device)
        rotary = cast(RotaryTables, self.layer.rotary)
        # a replica of the model is on another device
        return Frequencies(rotary.inv_freq.to(device), 1.0 if anchored else rotary.attention_scaling)

    def own_frequencies(self, lengths: Lengths, weights: Weights, device: torch.device) -> Frequencies:
        """f of the scheme itself on a `device`, with its decay and learned `weights`, for rows of these `lengths`."""

        def compute() -> Frequencies:
            own = self.scheme.frequencies_on(self.layer.spec, lengths, weights)
            decay = None if own.decay is None else own.decay.to(device)
            return dataclasses.replace(own, inv_freq=own.inv_freq.to(device), decay=decay)

        if lengths is not None or weights or torch.compiler.is_compiling():
            return compute()
        if device not in self._static:  # copied to a device once
            self._static[device] = compute()
        return self._static[device]
