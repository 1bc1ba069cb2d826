"""Install a built wheel in an environment of its own and use it outside the repository: `python tests/wheel.py dist`.

The environment has what the wheel requires and the command line, so no matplotlib and no PEFT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

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
    venv.create(environment, with_pip=True)
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    away = folder / "away"
    away.mkdir()

    def run(program: str, *words: str) -> str:
        print("$", program, " ".join(words).strip().split("\n")[0], flush=True)
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run([programs / program, *words], cwd=away, env=clean, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{program} {' '.join(words)}: exit status {done.returncode}")
        return done.stdout

    run("pip", "install", "--quiet", "--disable-pip-version-check", "torch")
    run("pip", "install", "--quiet", "--disable-pip-version-check", str(wheel))
    refused = subprocess.run([programs / "rope-patch", "list"], capture_output=True, text=True, cwd=away)
    if refused.returncode != 2 or 'pip install ".[cli]" in a checkout of rope_patch' not in refused.stderr:
        raise SystemExit(f"without tyro: {refused}")
    run("pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[cli]")
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


if __name__ == "__main__":
    main(sys.argv[1])
