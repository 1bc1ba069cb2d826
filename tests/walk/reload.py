"""The walk of a checkpoint's folder through the package: from `from_pretrained` to the model under its scheme.

A *stay* is one entry into a named function of the package, leaf helpers included. Comprehensions and lambdas belong to
the function around them, a function that calls itself stays once, so does one that is called many times in a row, and a
generator that goes on does not enter again.
The walk has two doors. A function of `schemes` is one stay: how a scheme reads its own fields is its own affair.
`mount_record` is one stay, too: from there the walk is that of `patch`, wherever the scheme comes from. Behind this
door only the functions that hand the record on into the config are stays.

A *climb* is a call from a lower floor to a higher one; the floors are those of `tests.floors`.

    python -m tests.walk.reload [SCHEME ...]
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import rope_patch
from tests.families import build
from tests.test_architecture import PACKAGE, floor_of

DOORS = {"mount_scheme", "mount_record"}

HANDING_ON = {"_check_record", "_write_record"}
"""Functions behind the door that hand the record on, besides the methods of `Record`."""


@dataclass(frozen=True)
class Entry:
    """An entry into a function of the package.

    Attributes:
        module, function: by their full and qualified names.
        around: the entries that are open at that time, outermost first.
    """

    module: str
    function: str
    around: tuple[Entry, ...]

    @property
    def climbs(self) -> bool:
        """Whether a function of a lower floor called."""
        return bool(self.around) and floor_of(self.module) > floor_of(self.around[-1].module)

    @property
    def is_stay(self) -> bool:
        """Whether the entry belongs to the walk, see the top of this file."""
        if any(is_in_schemes(each.module) for each in self.around):
            return False
        is_behind = any(each.function in DOORS for each in self.around)
        return not is_behind or self.function in HANDING_ON or self.function.startswith("Record.")


def is_in_schemes(module: str) -> bool:
    """Whether a module is on the floor of schemes."""
    return module.startswith("rope_patch.schemes")


def entries(act: Callable[[], Any]) -> list[Entry]:
    """The entries into named functions of the package while `act` runs."""
    found: list[Entry] = []
    seen: set[FrameType] = set()
    around: list[tuple[FrameType, Entry]] = []

    def follow(frame: FrameType, event: str, _: Any) -> None:
        if not frame.f_code.co_filename.startswith(f"{PACKAGE}/") or frame.f_code.co_name.startswith("<"):
            return
        if event == "return":
            if around and around[-1][0] is frame:
                around.pop()
        elif event == "call":
            path = Path(frame.f_code.co_filename).relative_to(PACKAGE.parent).with_suffix("")
            module, function = ".".join(path.parts), frame.f_code.co_qualname
            entry = Entry(module, function, tuple(each for _, each in around))
            is_nested = entry.around and (module, function) == (entry.around[-1].module, entry.around[-1].function)
            if frame not in seen and not is_nested:
                found.append(entry)
            seen.add(frame)
            around.append((frame, entry))

    sys.setprofile(follow)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def saved(spec: str, folder: str) -> None:
    """Save a tiny Llama under a scheme."""
    with rope_patch.patch(build("llama"), spec) as handle:
        handle.model.save_pretrained(folder)


def walk(spec: str) -> list[Entry]:
    """The stays of a tiny Llama's folder that was saved under a scheme."""
    with tempfile.TemporaryDirectory() as folder:
        saved(spec, folder)
        rope_patch.from_pretrained(folder)  # modules are imported, and registries filled
        gc.collect()  # else a model of another test may end during this walk, and what it leaves would count
        found = entries(lambda: rope_patch.from_pretrained(folder))
    start = next(index for index, entry in enumerate(found) if entry.function == "from_pretrained")
    stays = [entry for entry in found[start:] if entry.is_stay]
    return [entry for last, entry in zip([None, *stays], stays, strict=False) if entry != last]


def main() -> None:
    """Print the walk under each scheme of the command line."""
    for spec in sys.argv[1:] or ["rerope:window=6"]:
        stays = walk(spec)
        for entry in stays:
            depth = sum(each.is_stay for each in entry.around)
            print(f"{'  ' * depth}{entry.module.removeprefix('rope_patch.')}.{entry.function}")
        files, climbs = len({entry.module for entry in stays}), sum(entry.climbs for entry in stays)
        print(f"{spec}: {len(stays)} stays in {files} files, {climbs} climbs\n")


if __name__ == "__main__":
    main()
