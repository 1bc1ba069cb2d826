"""A reader of configs: a program, the fields that it reads, and the deviations of its versions, each with a source."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .entries import TRANSFORMERS_5, Spelling, rotations_of
from .errors import Unreadable
from .rotation import Rotation
from .sources import Source
from .versions import is_ordered, older

EXACT = 1e-5
"""The relative difference up to which two frequencies or factors count as equal: readers compute in float32."""


@dataclass(frozen=True)
class Layer:
    """The layers of one type, with the rotation that a reader has derived so far.

    Attributes:
        rotation: the rotation so far.
        source: the config.
        entry: the fields beside the scaling, as written.
        kind: the layer type; empty if all layers are alike.
    """

    rotation: Rotation
    source: Source
    entry: Mapping[str, Any]
    kind: str = ""


Case = Callable[[Layer], bool]
Change = Callable[[Layer], "Rotation | None"]


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The versions of a program for which a fact holds; by default all.

    Attributes:
        since, until: the first version for which it holds, and the first for which it no longer holds; empty for all.
        begun, ended: the same in words, if only a date or a pull request is known. The table's version tells whether
            the fact still holds.
    """

    since: str = ""
    until: str = ""
    begun: str = ""
    ended: str = ""

    def holds_for(self, version: str, newest: str) -> bool | None:
        """Whether the fact holds for a version; None if that cannot be told.

        Args:
            newest: the version that the table has. A version that cannot be ordered, such as a commit, may be older or
                newer.
        """
        if version == newest or (is_ordered(version) and is_ordered(newest) and older(newest, version)):
            return not self.until and not self.ended
        if self.begun or self.ended:
            return None
        if not is_ordered(version):
            return None if self.since or self.until else True
        return not (self.since and older(version, self.since)) and not (self.until and not older(version, self.until))


@dataclass(frozen=True)
class Deviation(Versions):
    """One computation of a program that differs from the config.

    Attributes:
        words: the behaviour, as the end of a sentence that begins with "it".
        when: a test whether it applies to the layers of one type.
        then: the computation that replaces the config's; None if the program refuses to load the checkpoint.
        source: repository, path and version that were read, or the thread that reports the deviation.
        cure: a line to write into the config, or an option to start the program with; may contain `{length}`.
        layers: the layer types that it applies to; empty for all.
        partly: whether the program computes most texts as the config says.
        silent: whether the program says nothing about it.
    """

    words: str
    when: Case
    then: Change
    source: str
    cure: str = ""
    layers: tuple[str, ...] = ()
    partly: bool = False
    silent: bool = True


@dataclass(frozen=True)
class Limit(Versions):
    """A program's limit of texts to `max_position_embeddings`, although the scaling reaches further.

    Attributes:
        types: the rope types that it applies to.
        with_l: whether it applies only if the config states L, `original_max_position_embeddings`.
    """

    types: tuple[str, ...]
    with_l: bool = False


@dataclass(frozen=True)
class Understood:
    """The positions that a reader takes from a config.

    Attributes:
        rotations: the rotations by layer type.
        deviations: the deviations that changed something.
        possible: the deviations that would change something if they held for this version, which is not known.
        refusal: the reason why the reader does not load the checkpoint; empty if it loads it.
    """

    rotations: Mapping[str, Rotation]
    deviations: tuple[Deviation, ...] = ()
    possible: tuple[Deviation, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class Reader:
    """The facts about one program that reads configs.

    Attributes:
        name: the usual name.
        key: the name behind `--for`.
        version: the newest version that the table has facts about.
        known: `run`, if the program or its own rotary functions ran, or `read`, if its source was read.
        source: the program, functions or files that ran or were read.
        takes: the fields of a config that it reads, as a sentence without its full stop.
        spelling: the same fields for `rotations_of`.
        deviations: in the order in which they apply.
        limits: the limits that it sets on the length of texts.
        by_layer: the model types for which it was checked how the program reads parameters by layer type; `*` for any.
        unchecked: exceptions from `*` in `by_layer`: model types that were not checked.
        writes: for a trainer, the fields that it writes into the config of a saved checkpoint.
        start: the option that sets its context length, with `{length}`.
        record: the fate of a scheme that only rope_patch records, as the end of a sentence.
        unknown: sentences on facts that are not established.
    """

    name: str
    key: str
    version: str
    known: str
    source: str = ""
    takes: str = ""
    spelling: Spelling = TRANSFORMERS_5
    deviations: tuple[Deviation, ...] = ()
    limits: tuple[Limit, ...] = ()
    by_layer: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    writes: str = ""
    start: str = ""
    record: str = ""
    unknown: str = ""

    def understood(self, source: Source, version: str = "") -> Understood:
        """Compute the positions that a version of the program takes from a config; by default the newest version in the
        table.
        """
        version = version or self.version
        try:
            stated = rotations_of(source, self.spelling)
            return self._with_deviations(source, stated.rotations, stated.entries, version)
        except Unreadable as error:
            return Understood({}, refusal=str(error))

    def knows_layers_of(self, model_type: str) -> bool:
        """Whether the table knows how the program reads parameters by layer type in a model of this `model_type`."""
        known = any(model_type.startswith(name.removesuffix("*")) for name in self.by_layer)
        return known and model_type not in self.unchecked

    def limit(self, source: Source, rotation: Rotation, version: str = "") -> int | None:
        """The longest text that the program takes, in tokens, if it limits the type of a `rotation` of a `source`; else
        None. The `version` is by default the newest in the table.
        """
        version = version or self.version
        for each in self.limits:
            stated = not each.with_l or "original_max_position_embeddings" in f"{source.fields}"
            if rotation.rope_type in each.types and stated and each.holds_for(version, self.version):
                return rotation.longest or None
        return None

    def _with_deviations(
        self, source: Source, stated: Mapping[str, Rotation], entries: Mapping[str, Mapping[str, Any]], version: str
    ) -> Understood:
        rotations = dict(stated)
        met: list[Deviation] = []
        possible: list[Deviation] = []
        for deviation in self.deviations:
            holds = deviation.holds_for(version, self.version)
            if holds is False:
                continue
            for kind, rotation in rotations.items():
                layer = Layer(rotation, source, entries.get(kind, {}), kind)
                if (deviation.layers and kind not in deviation.layers) or not deviation.when(layer):
                    continue
                changed = deviation.then(layer)
                if changed is not None and is_same(rotation, changed):
                    continue
                (possible if holds is None else met).append(deviation)
                if holds is None:
                    continue
                if changed is None:
                    return Understood({}, tuple(dict.fromkeys(met)), refusal=deviation.words)
                rotations[kind] = changed
        return Understood(rotations, tuple(dict.fromkeys(met)), tuple(dict.fromkeys(possible)))


def is_same(one: Rotation, other: Rotation) -> bool:
    """Whether two rotations turn every pair alike, for short and for long texts."""
    if one == other:
        return True
    if one.axes() != other.axes() or not math.isclose(one.temperature(), other.temperature(), rel_tol=EXACT):
        return False
    longest = max(one.longest, other.longest, one.trained, other.trained)
    lengths = {1, one.trained, one.trained + 1, other.trained, other.trained + 1, 2 * longest}
    return all(
        math.isclose(a, b, rel_tol=EXACT)
        for length in lengths
        for a, b in zip(one.frequencies(length), other.frequencies(length), strict=True)
    )
