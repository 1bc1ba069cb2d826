"""The distribution `rope-doctor`, `rope-patch doctor` without dependencies, the action and the hook: no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

import rope_patch
from tests.doctor.action import run_action
from tests.doctor.test_command import INTEGER, LLAMA, WEB

pytest.importorskip("hatchling", reason="what builds distributions comes with the extra dev")
pytest.importorskip("build")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rope_patch" / "doctor"
AWAY = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""The environment of a program that knows nothing of this checkout."""


def run(*words, cwd, environment=AWAY):
    return subprocess.run([*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True)


def built(project, output):
    words = ("-m", "build", "--no-isolation", "--outdir", output, project)
    done = run(sys.executable, *words, cwd=output)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def environment_with(wheel, folder):
    """A new environment in which a wheel is installed without what it requires."""
    venv.create(folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check")
    done = run(*pip, "install", "--quiet", "--no-compile", "--no-deps", "--no-index", wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with an sdist of the checkout, and the wheel that was built from that sdist."""
    return built(ROOT / "doctor", tmp_path_factory.mktemp("dist"))


@pytest.fixture
def repository(tmp_path):
    """Three configs: one that all read, one that vLLM does not start with, and one of a web project."""
    for name, config in {"models/fine": LLAMA, "models/wrong": INTEGER, "web": WEB}.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_distribution_has_every_file_of_the_package_and_nothing_else(dist):
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    own = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json")}
    assert {"__main__.py", "architectures.json", "schema.json"} <= own
    with ZipFile(wheel) as file:
        inside = {name.partition("/")[2]: name for name in file.namelist() if name.startswith("rope_doctor/")}
        assert inside.keys() == own
        assert all(file.read(inside[name]) == (PACKAGE / name).read_bytes() for name in own)
        (metadata,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        said = Parser().parsestr(file.read(metadata).decode())
    assert said["Name"] == "rope-doctor"
    assert said["Version"] == rope_patch.__version__
    assert said["Requires-Python"] == ">=3.10"
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Dist"] is None
    with tarfile.open(sdist) as file:
        assert own <= {name.partition("/rope_doctor/")[2] for name in file.getnames()}


def test_its_licence_is_that_of_the_repository():
    assert (ROOT / "doctor" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_it_runs_alone(dist, repository, tmp_path_factory):
    (wheel,) = dist.glob("*.whl")
    programs = environment_with(wheel, tmp_path_factory.mktemp("alone"))
    done = run(programs / "rope-doctor", "models/fine", cwd=repository)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("models/fine/config.json says\n")
    assert run(programs / "rope-doctor", "models/wrong", "--for", "vllm", cwd=repository).returncode == 1
    refused = run(programs / "python", "-m", "rope_doctor", "nowhere", cwd=repository)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_rope_patch_without_what_it_requires_answers_the_same(repository, tmp_path_factory):
    output = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", output, ROOT, cwd=output)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = output.glob("*.whl")
    programs = environment_with(wheel, tmp_path_factory.mktemp("bare"))
    done = run(programs / "rope-patch", "doctor", "models/fine", "--for", "vllm,mlx", "--json", cwd=repository)
    assert (done.returncode, done.stderr) == (0, "")
    assert [each["reader"] for each in json.loads(done.stdout)["readers"]] == ["vLLM", "mlx-lm"]
    assert run(programs / "rope-patch", "doctor", "models/wrong", cwd=repository).returncode == 1
    helped = run(programs / "rope-patch", "doctor", "--help", cwd=repository)
    assert (helped.returncode, helped.stderr) == (0, "")
    refused = run(programs / "rope-patch", "doctor", "--nope", cwd=repository)
    assert refused.returncode == 2
    assert refused.stderr.startswith("rope-patch: doctor: unrecognized arguments: --nope")
    others = run(programs / "rope-patch", "list", cwd=repository)
    assert others.returncode == 2
    assert "needs tyro" in others.stderr


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """What the machine of the action has: a Python whose pip finds hatchling without a network."""
    folder = tmp_path_factory.mktemp("runner")
    venv.create(folder)
    (packages,) = folder.glob("lib/*/site-packages")
    import hatchling

    (packages / "here.pth").write_text(str(Path(hatchling.__file__).parents[1]))
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "HOME": str(folder)}
    return {**AWAY, **offline, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def test_the_action_checks_the_configs_of_a_repository(repository, runner):
    done = run_action(repository, {"readers": "vllm,llama.cpp"}, runner)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert "models/fine/config.json: vLLM, llama.cpp agree\n" in done.stdout
    assert "models/wrong/config.json says\n" in done.stdout
    assert "does not load it" in done.stdout
    assert "web/config.json: skipped, no field of a text model\n" in done.stdout
    assert done.stdout.endswith("3 files: 1 agree, 1 differ, 1 skipped\n")


@pytest.mark.slow
def test_the_action_takes_patterns_readers_and_leniency(repository, runner):
    paths = "models/f*/config.json\nweb"
    assert run_action(repository, {"paths": paths, "strict": "false"}, runner).returncode == 0
    missing = run_action(repository, {"paths": "nowhere/*.json $(touch hacked) `touch hacked`"}, runner)
    assert (missing.returncode, missing.stderr) == (2, "rope-doctor: no file matches 'nowhere/*.json'\n")
    assert not (repository / "hacked").exists()
    with pytest.raises(ValueError, match="no input reader"):
        run_action(repository, {"reader": "vllm"}, runner)


def test_the_hook_runs_from_a_clone_with_nothing_installed(repository, tmp_path_factory):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["language"] == "script"
    bare = tmp_path_factory.mktemp("hook")
    venv.create(bare)
    environment = {**AWAY, "PATH": f"{bare / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    files = ["models/fine/config.json", "models/wrong/config.json", "web/config.json"]
    words = (ROOT / hook["entry"], "--strict", "--for", "vllm")
    done = run(*words, *files, cwd=repository, environment=environment)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith("3 files: 1 agree, 1 differ, 1 skipped\n")
    assert run(*words, files[0], files[2], cwd=repository, environment=environment).returncode == 0
