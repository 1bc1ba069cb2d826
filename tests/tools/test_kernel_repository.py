"""The Triton kernel as a repository for the package `kernels`: loaded without a network, equal to the oracle."""

from __future__ import annotations

import base64
import importlib.util
import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from tools.kernel_repository import __main__ as kernel_repository

missing = [name for name in ("triton", "kernels") if importlib.util.find_spec(name) is None]


def error_of(folder: Path, by_kernels: bool) -> float:
    """Of ReRoPE's two regions, relative to the norm."""
    from rope_patch import get_scheme
    from rope_patch.attention.executors import reference
    from rope_patch.attention.problem import Problem
    from rope_patch.attention.turner import Branch

    if by_kernels:
        from kernels import get_local_kernel

        module = get_local_kernel(folder)
    else:
        spec = importlib.util.spec_from_file_location("alone", folder / "build/torch-cpu/__init__.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["alone"] = module
        spec.loader.exec_module(module)
    random, regions = torch.Generator().manual_seed(0), get_scheme("rerope:window=9").segments()
    used = [region for region in regions if region.stop > 0]
    queries, keys = ([torch.randn(1, h, n, 16, generator=random) for _ in used] for h, n in ((4, 20), (2, 50)))
    value, positions = torch.randn(1, 2, 50, 16, generator=random), torch.arange(50)[None]
    inputs = Problem((), value, positions[:, 30:], positions, None, True, 30, 0.25)
    expected = reference.attend(inputs.replaced(branches=tuple(map(Branch, used, queries, keys))))[0]
    bounds = [(int(region.start), None if region.stop == float("inf") else int(region.stop)) for region in used]
    out, _ = module.attention(queries, keys, value, bounds)
    return float((out - expected).norm() / expected.norm())


@pytest.fixture
def run(monkeypatch):
    """Under Triton's interpreter, in a process of its own."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.mark.skipif("triton" in missing, reason='Triton is not installed: pip install ".[triton]"')
def test_its_files_need_nothing_of_rope_patch_and_equal_the_oracle(run, tmp_path):
    kernel_repository.write(tmp_path)
    assert not [path for path in tmp_path.rglob("*.py") if "import rope_patch" in path.read_text()]
    assert not [path for path in tmp_path.rglob("*.py") if "from rope_patch" in path.read_text()]
    assert "[torch-noarch]" in (tmp_path / "build.toml").read_text()
    assert run(error_of, tmp_path, False) < 1e-6


def test_every_build_has_the_hash_of_each_of_its_files(tmp_path):
    kernel_repository.write(tmp_path)
    for build in (tmp_path / "build").iterdir():
        digest = json.loads((build / "metadata.json").read_text())["digest"]
        assert digest["algorithm"] == "sha256"
        assert digest["files"].keys() == {path.name for path in build.iterdir()} - {"metadata.json"}
        summed = subprocess.run(["sha256sum", *digest["files"]], cwd=build, capture_output=True, text=True, check=True)
        hashes = {name: base64.b64decode(value).hex() for name, value in digest["files"].items()}
        assert summed.stdout.split() == [word for name, value in hashes.items() for word in (value, name)]


def test_the_digest_is_that_of_kernels(tmp_path):
    data = pytest.importorskip("kernels_data", reason="not installed: pip install kernels-data")
    kernel_repository.write(tmp_path)
    for build in (tmp_path / "build").iterdir():
        expected = data.Metadata.read_from_file(build / "metadata.json").digest
        (build / "__pycache__").mkdir()
        (build / "__pycache__" / "made_by_an_import.pyc").touch()
        expected.validate(data.Digest.hash_variant(expected.algorithm, build))
        (build / "__init__.py").write_text("")
        with pytest.raises(data.DigestValidationError):
            expected.validate(data.Digest.hash_variant(expected.algorithm, build))


@pytest.mark.skipif(bool(missing), reason=f"not installed: {' and '.join(missing)}")
def test_get_local_kernel_loads_it_without_a_network(run, tmp_path):
    kernel_repository.write(tmp_path)
    assert run(error_of, tmp_path, True) < 1e-6


def test_regions_without_queries_of_their_own_are_refused(tmp_path):
    pytest.importorskip("triton")
    from tools.kernel_repository import regions

    with pytest.raises(ValueError, match="2 bounds need as many queries and keys, not 1 and 1"):
        regions.attention(
            [torch.zeros(1, 1, 1, 16)], [torch.zeros(1, 1, 1, 16)], torch.zeros(1, 1, 1, 16), [(0, 5), (5, None)]
        )
