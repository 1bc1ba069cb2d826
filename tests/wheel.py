"""Install a built wheel in an environment of its own and use it outside the repository: `python tests/wheel.py dist`.

The environment has what the wheel requires and the command line, so no matplotlib and no PEFT. What it requires is not
installed a second time: it is linked from the environment of this Python, by the wheel's own list of requirements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

from packaging.requirements import Requirement

ONE_LINER = """
import torch, transformers, rope_patch
from rope_patch.shipped import recipes_folder

model = rope_patch.from_pretrained(recipes_folder() / "assets" / "tiny-llama")
ids = torch.arange(1, 41)[None]
plain = model(ids).logits
with rope_patch.patch(model, "rerope", window=16):
    assert not torch.equal(model(ids).logits, plain)
assert torch.equal(model(ids).logits, plain)
print(rope_patch.__file__)
"""


def main(dist: str) -> None:
    (wheel,) = Path(dist).resolve().glob("*.whl")
    (sdist,) = Path(dist).resolve().glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(wheel, Path(folder).resolve())
    for file in (wheel, sdist):
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")


def try_wheel(wheel: Path, folder: Path) -> None:
    """Raises where a command fails or prints something unexpected."""
    environment = folder / "environment"
    venv.create(environment)
    programs = environment / "bin"
    (packages,) = environment.glob("lib/*/site-packages")
    away = folder / "away"
    away.mkdir()

    def run(program: str, *words: str) -> str:
        print("$", program, " ".join(words).strip().split("\n")[0], flush=True)
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run([programs / program, *words], cwd=away, env=clean, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{program} {' '.join(words)}: exit status {done.returncode}")
        return done.stdout

    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-compile", "--no-deps", "--no-index", str(wheel)], check=True)
    link(wheel, set(), packages)
    subprocess.run([*pip, "check"], check=True)
    refused = subprocess.run([programs / "rope-patch", "list"], capture_output=True, text=True, cwd=away)
    if refused.returncode != 2 or 'pip install ".[cli]" in a checkout of rope_patch' not in refused.stderr:
        raise SystemExit(f"without tyro: {refused}")
    link(wheel, {"cli"}, packages)
    where = run("python", "-c", ONE_LINER).strip()
    if not Path(where).is_relative_to(environment):
        raise SystemExit(f"rope_patch was imported from {where}, not from the wheel")
    run("python", "-c", "import importlib.util as u; assert u.find_spec('matplotlib') is None")
    plot = subprocess.run([programs / "rope-patch", "plot"], capture_output=True, text=True, cwd=away)
    if plot.returncode != 2 or "comes with the repository" not in plot.stderr or "plot" in run("rope-patch", "--help"):
        raise SystemExit(f"the wheel should have no tools: {plot}")
    schemes = json.loads(run("rope-patch", "list", "--json"))
    run("rope-patch", "describe", "--scheme", "yarn:factor=4")
    settings = ("--lengths", "64,128", "--targets", "8", "--documents", "1", "--scheme", "rerope:window=32")
    rows = json.loads(run("rope-patch", "perplexity", *settings, "--output", "results", "--json"))
    if not schemes or {row["length"] for row in rows} != {64, 128}:
        raise SystemExit(f"the wheel lists {len(schemes)} schemes and measured {rows}")


def link(wheel: Path, extras: set[str], packages: Path) -> None:
    """Link what a wheel requires, and what that requires, into the `site-packages` of another environment."""
    (metadata,) = (path for path in ZipPath(ZipFile(wheel)).iterdir() if path.name.endswith(".dist-info"))
    for required in requirements(PathDistribution(metadata), extras, {}):
        for name in {file.parts[0] for file in required.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(required.locate_file(name))


def requirements(
    package: Distribution, extras: Iterable[str], known: dict[tuple[str, str], Distribution]
) -> Iterator[Distribution]:
    """The packages that one requires under some of its extras, with all that these require; `known` are left out."""
    for requirement in map(Requirement, package.requires or ()):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in {"", *extras}):
            key = requirement.name, ",".join(sorted(requirement.extras))
            if key not in known:
                known[key] = distribution(requirement.name)
                yield known[key]
                yield from requirements(known[key], requirement.extras, known)


if __name__ == "__main__":
    main(sys.argv[1])
