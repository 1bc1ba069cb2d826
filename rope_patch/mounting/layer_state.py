"""The data of one layer under a scheme. Its hook, its calls, servers and `describe` read them; the data refer to no
hook.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import nn

from rope_patch.attention.forward import StackForwards
from rope_patch.attention.problem import AttentionMode, Problem
from rope_patch.graphs import traced
from rope_patch.models.base import AttentionLayer, RotaryTables
from rope_patch.models.cached_keys import OWN_ROTATION, cache_tag
from rope_patch.mounting.parameters import LearnedWeights
from rope_patch.mounting.running_stack import is_linked, stack_of
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import Region
from rope_patch.schemes.tools.positions import UNROTATED, pairs_of
from rope_patch.typing import NO_WEIGHTS, Frequencies, Lengths, PositionMap, RotarySpec, Weights

Rotation = Literal["module", "own", "late", "anchored"]
"""The place where queries and keys are rotated: in the attention module, by the model's tables or the scheme's own; in
the attention function; or in both. In the last case the module uses the positions of the farthest region, which the
cache keeps, and the function adds the difference.
"""


Watch = Callable[[str, "Problem | None"], None]
"""A function that receives the executor that scored a layer, or the model's own attention, and the problem, if any."""


@dataclass(frozen=True)
class OwnTables:
    """A scheme's own rotary tables, whose module is a copy that does not move with the model."""

    tables: RotaryTables
    by_device: dict[torch.device, RotaryTables] = field(default_factory=dict, compare=False, repr=False)

    def on(self, device: torch.device) -> RotaryTables:
        """The tables on a device. Each device has a copy, because replicas run at the same time, and none may move
        tables that another one reads.
        """
        if traced():
            return self.by_device.get(device, self.tables)
        if device not in self.by_device:
            module = copy.deepcopy(self.tables.module).to(device)
            self.by_device[device] = dataclasses.replace(self.tables, module=module)
        return self.by_device[device]


@dataclass(frozen=True)
class FrequencySource:
    """The source of a layer's frequencies; layers with the same tables have equal sources.

    Attributes:
        scheme: the scheme of the layer.
        rotary: the model's tables; None for a layer without tables.
        spec: the facts that the scheme reads.
        late: whether the scheme's frequencies are read instead of the frequencies in the model's tables.
        static: the scheme's frequencies on each device, if they are constant.
    """

    scheme: Scheme = field(compare=False)
    rotary: RotaryTables | None
    spec: RotarySpec
    late: bool
    static: dict[torch.device, Frequencies] = field(default_factory=dict, compare=False, repr=False)

    def frequencies(
        self, lengths: Lengths, device: torch.device, anchored: bool, weights: Weights = NO_WEIGHTS
    ) -> Frequencies:
        """The frequencies f of the layer; the arguments are those of `of_scheme`. If queries and keys are `anchored`,
        the model's own factor was already applied to them.
        """
        if self.late:
            return self.of_scheme(lengths, device, weights)
        rotary = cast(RotaryTables, self.rotary)
        # a replica of the model is on another device
        return Frequencies(rotary.inv_freq.to(device), 1.0 if anchored else rotary.attention_scaling)

    def of_scheme(self, lengths: Lengths, device: torch.device, weights: Weights = NO_WEIGHTS) -> Frequencies:
        """The scheme's own frequencies f on a `device`, with its decay and learned `weights`, for rows of these
        `lengths`.
        """
        depends = lengths is not None or len(weights) > 0 or traced()
        if not depends and device in self.static:  # copied to a device once
            return self.static[device]
        own = self.scheme.frequencies_on(self.spec, lengths, weights)
        decay = None if own.decay is None else own.decay.to(device)
        own = dataclasses.replace(own, inv_freq=own.inv_freq.to(device), decay=decay)
        if not depends:
            self.static[device] = own
        return own


@dataclass(eq=False)
class LayerState:
    """One layer under a scheme, as plain data that is copied and pickled with the model.

    Attributes:
        scheme: the scheme with its defaults filled in.
        frequencies: `late` if the scheme's frequencies are computed in the attention function, `model` if the model's
            tables are read.
        learned: names of its learned parameters.
        forwards: the forward that it shares with the other layers of its group.
        config: the model's config, with its current attention implementation.
        num_layers: number of the stack's layers that keep keys in a cache.
        cache_tag: marks a cache with the writer of its keys; one for all layers of a stack.
        both_ways, regions: the regions of the scheme, and the regions that a causal call can see; empty if they depend
            on the length of the text, see `regions_at`.
        anchor: the position map of the keys in the cache; None if they are unrotated, or rotated by the model itself.
        kept: the rotation of the keys in the cache, as text.
        rotates: whether queries and keys are rotated in the attention function.
        by_head: whether each query head has its own frequencies.
        tables: name of the rotary tables, which layers may share.
        source: the source of their frequencies.
        kind: layers of one group and kind differ only in states and weights.
        own_tables: the tables by which the attention module rotates, if other layers share the model's tables.
        scores: whether the attention function scores, instead of delegating to the model's own.
        watch: a function that receives how each call of the layer is computed, while `explain` runs.
    """

    scheme: Scheme
    layer: AttentionLayer
    rotation: Rotation
    frequencies: Literal["model", "late"]
    learned: LearnedWeights
    attention: AttentionMode
    forwards: StackForwards
    config: Any
    num_layers: int
    own_tables: OwnTables | None = None
    watch: Watch | None = None

    def __post_init__(self) -> None:
        slots = self.scheme.slots
        fixed = "segments" in slots and not self.scheme.regions_by_length
        self.both_ways: tuple[Region, ...] = self.scheme.segments() if fixed else ()
        self.regions = _of_causal_call(self.both_ways)
        self.rotates = self.rotation in ("late", "anchored")
        farthest = max(self.regions, key=lambda region: region.start, default=None)
        # the model's own tables have one position for all pairs: a map with a pair axis is no anchor, nor is one that
        # follows the length, which rotates all keys anew for every token
        anchored = self.rotation == "anchored" and farthest is not None and pairs_of(farthest.key_map) is None
        self.anchor: PositionMap | None = farthest.key_map if anchored else None  # type: ignore[union-attr]
        kept = "unrotated" if self.anchor is None else f"rotated by {self.anchor}"
        self.kept = kept if self.rotates else OWN_ROTATION
        self.cache_tag = cache_tag(self.scheme, self.kept)
        self.follows_positions = bool(self.rotates or self.regions or slots & {"bias", "values"} or self.scheme.decays)
        rotary = self.layer.rotary
        self.tables = None if rotary is None else (rotary.layer_type, id(rotary.module))
        self.kind = self.tables, self.layer.sliding_window
        self.source = FrequencySource(self.scheme, rotary, self.layer.spec, self.frequencies == "late")
        # properties that every call needs
        self.methods, self.decays, self.scales = self.scheme.methods, self.scheme.decays, "query_scale" in slots
        self.by_head = self.scheme.by_head
        self.scores = bool(slots & {"segments", "bias", "values"}) or self.decays or self.attention != "auto"
        self.scores |= self.by_head

    def regions_at(self, length: int, looks_ahead: bool) -> tuple[Region, ...]:
        """The regions of texts of `length` tokens; only the regions that a causal call can see, unless it
        `looks_ahead`.
        """
        regions = self.scheme.at_length(length).segments()
        return regions if looks_ahead else _of_causal_call(regions)

    @property
    def reads_groups(self) -> bool:
        """Whether pads and documents may be passed as segment ids of keys instead of a mask."""
        return self.layer.sliding_window is None

    def weights(self, module: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """The learned parameters by name, of any shape, of the attention `module` that is called and of its stack;
        under `nn.DataParallel` the module is a replica of the layer's own.
        """
        learned = self.learned
        if not (learned.own or learned.shared or learned.table):
            return {}
        if module is None or not is_linked(module):  # a server calls with a module of its own
            module = self.layer.module
        return learned.read_from(module, stack_of(module, self.layer.name))

    def anchor_for(self, keeps_keys: bool) -> PositionMap | None:
        """The rotation that the module should apply before its keys are cached. Without a cache it need not rotate,
        which costs least.
        """
        if self.anchor is None or (keeps_keys and self.anchor != UNROTATED):
            return self.anchor
        return UNROTATED if cast(RotaryTables, self.layer.rotary).attention_scaling == 1 else None


def _of_causal_call(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    # regions of negative distance contain only keys after the query, which a causal call never sees
    return tuple(region for region in regions if region.stop > 0)
