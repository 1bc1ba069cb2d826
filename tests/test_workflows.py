"""Workflows and forms for GitHub: their commands exist, and their versions are the declared ones."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import rope_patch
from rope_patch.cli import main
from tools import release_notes

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS: dict[str, dict[Any, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(GITHUB.glob("workflows/*.yml"))
}
JOBS = {f"{file}/{name}": job for file, workflow in WORKFLOWS.items() for name, job in workflow["jobs"].items()}
FORMS = sorted(path for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if path.stem != "config")
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def combinations(job: dict[str, Any]) -> list[dict[str, str]]:
    """The values of a job's matrix, one dict for each machine; one empty dict without a matrix."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    added, left_out = matrix.pop("include", []), matrix.pop("exclude", [])
    found = [dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())]
    return [one for one in found if not any(each.items() <= one.items() for each in left_out)] + added


def commands(job: dict[str, Any]) -> list[str]:
    """All that the shells of a job run, with the values of its matrix."""
    texts = [step["run"] for step in job["steps"] if "run" in step]
    filled = []
    for text, values in itertools.product(texts, combinations(job)):
        filled.append(re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found, values=values: values[found[1]], text))
    return filled


@pytest.mark.parametrize("name", JOBS)
def test_every_job_runs_what_there_is(name):
    ran = [command for text in commands(JOBS[name]) for command in re.findall(r"\.ci/run (.*)", text)]
    assert all(set(command.split()) <= TARGETS for command in ran)
    for script in re.findall(r"python (\S+\.py)", " ".join(commands(JOBS[name]))):
        assert (ROOT / script).is_file()
    assert all(("run" in step) != ("uses" in step) for step in JOBS[name]["steps"])
    needed = JOBS[name].get("needs")
    assert needed is None or f"{name.partition('/')[0]}/{needed}" in JOBS
    assert JOBS[name]["timeout-minutes"]


def test_a_change_meets_every_python_and_both_ends_of_the_versions():
    parts = {"test": set(), "oldest": set()}
    for one in combinations(JOBS["ci/tests"]):
        parts[one["part"]].add(one["python"])
    assert parts == {"test": set(PYTHONS), "oldest": {PYTHONS[0], PYTHONS[-1]}}
    assert [one["part"] for one in combinations(JOBS["ci/checks"])] == CHECKS


CHECKS = ["lint", "docs", "wheel"]
"""The parts of `.ci/run` beside the tests."""


@pytest.mark.parametrize(
    ("words", "ran"),
    [
        ((), ["setup", f"--jobs=2 --output-sync=target {' '.join(CHECKS)}", "test"]),
        (("oldest",), ["oldest"]),
        (("lint", "docs"), ["lint docs"]),
    ],
)
def test_ci_runs_all_of_it_or_the_parts_that_are_named(words, ran, tmp_path):
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    make.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([ROOT / ".ci" / "run", *words], env=os.environ | {"PATH": path}, check=True)
    assert (tmp_path / "said").read_text().splitlines() == ran


def test_the_makefile_takes_python_versions_and_folder_from_the_environment():
    chosen = {"PYTHON": "python-of-mine", "CONSTRAINTS": "pyproject.toml", "VENV": "folder-of-mine"}
    command = ["make", "--dry-run", "folder-of-mine/.demo"]
    # not what the `make` that runs these tests was given
    outer = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES")}
    said = subprocess.run(command, cwd=ROOT, env=outer | chosen, capture_output=True, text=True, check=True).stdout
    assert "python-of-mine -m venv folder-of-mine" in said
    assert "folder-of-mine/bin/pip install --disable-pip-version-check --no-compile -c pyproject.toml torch" in said


@pytest.mark.parametrize("python", PYTHONS)
def test_every_python_has_one_torch_and_one_transformers_within_the_bounds(python):
    lines = re.findall(r"^(\w[^#\n]*)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    given = [Requirement(line) for line in lines]
    given = [each for each in given if each.marker is None or each.marker.evaluate({"python_version": python})]
    assert sorted(each.name for each in given) == ["torch", "transformers"]
    for each in given:
        (declared,) = re.findall(rf'^    "({each.name}>=[^"]*)",$', PROJECT, re.MULTILINE)
        (version,) = (clause.version for clause in each.specifier)
        assert Requirement(declared).specifier.contains(version)


def test_nothing_but_the_upload_and_the_page_may_write():
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    rights = {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job}
    assert rights == {"release/publish": {"id-token": "write"}, "release/page": {"contents": "write"}}
    for name in rights:
        assert JOBS[name]["if"] == "github.ref_type == 'tag'"
        assert not [step for step in JOBS[name]["steps"] if step.get("uses", "").startswith("actions/checkout")]
    assert not [path for path in GITHUB.rglob("*.yml") if "secrets." in path.read_text()]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_what_a_maintainer_needs(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "labels", "body"} == form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in form["body"]} <= FIELDS
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    for field in fields:
        options = field["attributes"].get("options", [])
        assert all(isinstance(each, str) for each in options) or field["type"] == "checkboxes"
    if path.stem in ("bug", "wrong_number"):
        required = {field["id"] for field in fields if field.get("validations", {}).get("required")}
        assert {"describe", "versions"} <= required
        words = " ".join(path.read_text().split())
        assert "rope-patch doctor DIR" in words
        assert "rope-patch describe DIR --scheme SPEC" in words
        assert "rope-patch --version" in words


def test_the_commands_of_the_forms_run(capsys):
    model = str(ROOT / "recipes" / "assets" / "tiny-llama")
    main(["describe", model, "--scheme", "rerope:window=128", "--attention", "64"])
    assert "rerope:window=128" in capsys.readouterr().out


CHANGES = """# Changelog

## 1.2.0 - 2026-11-27

### Added

- A [page](docs/a.md), [another](https://h/b), [here](#c).

## 1.1.0 - 2026-11-01

Old.
"""


def test_the_notes_are_the_section_of_the_version():
    assert release_notes.release_notes(CHANGES, "1.2.0").startswith("### Added\n\n- A [page](docs/a.md)")
    assert "Old" not in release_notes.release_notes(CHANGES, "1.2.0")
    there = release_notes.release_notes(CHANGES, "1.2.0", "https://h/o/r/blob/v1.2.0/")
    assert (
        there == "### Added\n\n- A [page](https://h/o/r/blob/v1.2.0/docs/a.md), [another](https://h/b), [here](#c).\n"
    )


@pytest.mark.parametrize("heading", ["Unreleased", "1.2.0, unreleased", "1.1.0 - 2026-11-01", "1x2.0 - 2026-11-01"])
def test_notes_of_another_version_or_without_a_date_are_refused(heading):
    with pytest.raises(ValueError, match=re.escape(f"begins with '## {heading}', and the version is 1.2.0: write")):
        release_notes.release_notes(CHANGES.replace("1.2.0 - 2026-11-27", heading), "1.2.0")


def test_the_tag_is_the_version(capsys):
    assert release_notes.main(["--tag", f"v{rope_patch.__version__}"]) == 0
    assert "### Added\n" in capsys.readouterr().out
    assert release_notes.main(["--tag", "v0.0.1"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert f"tag v{rope_patch.__version__}" in said.err
