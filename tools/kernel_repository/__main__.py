"""Write the Triton kernel as a repository for the package `kernels`, which Transformers reads.

    python -m tools.kernel_repository OUT

The folder has build.toml with its source, and what `get_local_kernel` loads without a network:

    attention = kernels.get_local_kernel(Path("OUT")).attention
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from rope_patch.version import __version__

NAME, BACKENDS = "rope-patch-attention", ("cpu", "cuda", "rocm")
SOURCES = {
    "__init__.py": Path(__file__).with_name("regions.py"),
    "triton_kernels.py": Path(__file__).parents[2] / "rope_patch/attention/triton_kernels.py",
}
BUILD = f"""[general]
name = "{NAME}"
version = 1
license = "Apache-2.0"
backends = {json.dumps(BACKENDS)}

[torch-noarch]
"""


def write(out: Path) -> None:
    """Write the repository into a folder that is new or empty of it."""
    builds = {out / "build" / f"torch-{backend}": backend for backend in BACKENDS}
    for folder in (out / "torch-ext" / NAME.replace("-", "_"), *builds):
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in SOURCES.items():
            text = source.read_text(encoding="utf-8")
            text = text.replace("from rope_patch.attention import triton_kernels", "from . import triton_kernels")
            (folder / name).write_text(text, encoding="utf-8")
    for folder, backend in builds.items():
        identity = f"_{NAME.replace('-', '_')}_{backend}_{__version__.replace('.', '_')}"
        facts = {"name": NAME, "id": identity, "version": 1, "license": "Apache-2.0"}
        facts |= {"python-depends": [], "backend": {"type": backend}, "digest": digest(folder)}
        (folder / "metadata.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "build.toml").write_text(BUILD)
    shutil.copy(Path(__file__).parents[2] / "LICENSE", out / "LICENSE")


def digest(folder: Path) -> dict[str, Any]:
    """The SHA-256 of each source of a build, by its name, as metadata.json has it: `kernels verify-signature` compares
    the files with it, and refuses a build without it.
    """
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).digest() for name in sorted(SOURCES)}
    return {"algorithm": "sha256", "files": {name: base64.b64encode(each).decode() for name, each in hashes.items()}}


def main() -> None:
    """Write it where the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the repository")
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
