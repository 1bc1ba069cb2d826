"""A reader of configs: a program, what it takes from a config, and the deviations of its versions, each with a source."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from .entries import TRANSFORMERS_5, Spelling, rotations_of
from .errors import Unreadable
from .rotation import Rotation
from .sources import Source

Case = Callable[[Rotation, Source], bool]
Change = Callable[[Rotation, Source], "Rotation | None"]


@dataclass(frozen=True)
class Deviation:
    """One thing that a program computes otherwise than the config says.

    Attributes:
        words: what it does, as the end of a sentence that begins with "it".
        when: whether a rotation of a config meets it.
        then: what it computes instead; None where it refuses to load the checkpoint.
        source: repository, path and version that were read, or the thread that reports it.
        cure: what to write or to start instead; may contain `{length}`.
        since, until: the first version that does so, and the first that does not any more; empty for all.
        partly: whether it computes most texts as the config says.
        silent: whether it says nothing about it.
    """

    words: str
    when: Case
    then: Change
    source: str
    cure: str = ""
    since: str = ""
    until: str = ""
    partly: bool = False
    silent: bool = True

    def holds_for(self, version: str) -> bool:
        """Whether a version of the program deviates so."""
        return not (self.since and older(version, self.since)) and not (self.until and not older(version, self.until))


@dataclass(frozen=True)
class Understood:
    """What a reader makes of a config.

    Attributes:
        rotations: by layer type.
        deviations: those that changed something.
        refusal: why it does not load the checkpoint; empty if it does.
    """

    rotations: Mapping[str, Rotation]
    deviations: tuple[Deviation, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class Reader:
    """The facts about one program.

    Attributes:
        name: as people call it.
        key: its name behind `--for`.
        version: the newest one whose facts are here.
        known: `run`, if the program or its own rotary functions ran, or `read`, if its source was read.
        source: what ran or was read.
        spelling: which of the config's words it takes.
        deviations: in the order in which they apply.
        writes: what a trainer puts into the config of the checkpoint that it saves.
        cut: rope types whose texts it limits to `max_position_embeddings`.
        start: the option that gives it the context, with `{length}`.
        record: what becomes of a scheme that rope_patch alone records, as the end of a sentence.
    """

    name: str
    key: str
    version: str
    known: str
    source: str = ""
    spelling: Spelling = TRANSFORMERS_5
    deviations: tuple[Deviation, ...] = ()
    writes: str = ""
    cut: tuple[str, ...] = ()
    start: str = ""
    record: str = ""

    def understood(self, source: Source, version: str = "") -> Understood:
        """What a version of the program computes for a config; by default the newest that is known here."""
        version = version or self.version
        try:
            stated = rotations_of(source, self.spelling).rotations
        except Unreadable as error:
            return Understood({}, refusal=str(error))
        rotations, met = dict(stated), []
        for deviation in self.deviations:
            if not deviation.holds_for(version):
                continue
            for kind, rotation in rotations.items():
                if not deviation.when(rotation, source):
                    continue
                met.append(deviation)
                if (changed := deviation.then(rotation, source)) is None:
                    return Understood({}, tuple(dict.fromkeys(met)), deviation.words)
                rotations[kind] = changed
        return Understood(rotations, tuple(dict.fromkeys(met)))


def older(one: str, other: str) -> bool:
    """Whether a version comes before another; numbers count as numbers, whatever stands around them."""
    pairs = zip_longest(_numbers(one), _numbers(other), fillvalue=0)
    return next((a < b for a, b in pairs if a != b), False)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
