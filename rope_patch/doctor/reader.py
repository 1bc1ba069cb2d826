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
"""Relative difference up to which two frequencies or factors are equal: float32 arithmetic, which readers use."""


@dataclass(frozen=True)
class Layer:
    """The layers of one type, with the rotation that a reader has derived so far.

    Attributes:
        rotation: what it computes so far.
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
        since, until: the first version that does so, and the first that does not any more; empty for all.
        begun, ended: the same in words, where no version is established but a date or a pull request; it is over, or
            holds, in the version that the table has.
    """

    since: str = ""
    until: str = ""
    begun: str = ""
    ended: str = ""

    def holds_for(self, version: str, newest: str) -> bool | None:
        """Whether the fact holds for a version; None if that cannot be told.

        Args:
            newest: the version that the table has. A version that cannot be ordered, such as a commit, may be any.
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
    """One computation of a program that differs from what the config says.

    Attributes:
        words: what it does, as the end of a sentence that begins with "it".
        when: whether the layers of one type meet it.
        then: what it computes instead; None where it refuses to load the checkpoint.
        source: repository, path and version that were read, or the thread that reports it.
        cure: what to write or to start instead; may contain `{length}`.
        layers: layer types that it is about; empty for all.
        partly: whether it computes most texts as the config says.
        silent: whether it says nothing about it.
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
    """A limit of a program: it limits texts to `max_position_embeddings`, though the scaling reaches further.

    Attributes:
        types: rope types that it is about.
        with_l: only where the config states L, `original_max_position_embeddings`.
    """

    types: tuple[str, ...]
    with_l: bool = False


@dataclass(frozen=True)
class Understood:
    """The positions that a reader takes from a config.

    Attributes:
        rotations: by layer type.
        deviations: those that changed something.
        possible: those that would, if the version is among those that deviate, which is not known.
        refusal: why it does not load the checkpoint; empty if it does.
    """

    rotations: Mapping[str, Rotation]
    deviations: tuple[Deviation, ...] = ()
    possible: tuple[Deviation, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class Reader:
    """The facts about one program that reads configs.

    Attributes:
        name: as people call it.
        key: its name behind `--for`.
        version: the newest one whose facts are here.
        known: `run`, if the program or its own rotary functions ran, or `read`, if its source was read.
        source: what ran or was read.
        takes: the words of a config that it takes, as a sentence without its full stop.
        spelling: the same for `rotations_of`.
        deviations: in the order in which they apply.
        limits: what it does to the length of texts.
        by_layer: model types whose parameters by layer type were looked at, `*` for any; of others it is not known.
        unchecked: model types of which it is not known either, where `by_layer` has any.
        writes: of a trainer: what it puts into the config of the checkpoint that it saves.
        start: the option that gives it the context, with `{length}`.
        record: what becomes of a scheme that rope_patch alone records, as the end of a sentence.
        unknown: what is not established about it; sentences.
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
        """Compute the positions that a version of the program takes from a config; by default the newest that is known
        here.
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
        None. The `version` is by default the newest that is known here.
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
