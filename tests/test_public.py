"""What is public is what docs/reference/public.md lists; what a release says of itself agrees."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import rope_patch
from rope_patch.cli import COMMANDS, load
from rope_patch.cli.options import Measured, _flags
from rope_patch.doctor.command import OPTIONS

tomllib = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reference" / "public.md").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.partition(f"## {title}\n")[2], flags=re.MULTILINE)[0]


def listed(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_the_names_of_the_page_are_those_of_the_package():
    assert listed(section("Names in `rope_patch`").partition("Also public")[0]) == set(rope_patch.__all__)


def options_of(command: str) -> set[str]:
    if command == "doctor":
        return {settings.get("metavar", word) if word.isidentifier() else word for word, settings in OPTIONS.items()}
    fields = dataclasses.fields(load(command).Options)
    inherited = {field.name for field in dataclasses.fields(Measured)} if is_measured(command) else set()
    return {
        field.name.upper() if "Positional" in str(field.type) else _flags(field)[0]
        for field in fields
        if field.name not in inherited
    }


def is_measured(command: str) -> bool:
    return command != "doctor" and issubclass(load(command).Options, Measured)


def test_the_commands_of_the_page_and_their_options_are_those_there_are():
    rows = re.findall(r"^\| `([\w-]+)`( \*)? \| (.*) \|$", section("Commands and their options"), re.MULTILINE)
    assert [name for name, *_ in rows] == list(COMMANDS)
    assert {name: listed(options) for name, _, options in rows} == {name: options_of(name) for name in COMMANDS}
    assert [name for name, star, _ in rows if star] == [name for name in COMMANDS if is_measured(name)]
    common = {_flags(field)[0] for field in dataclasses.fields(Measured)}
    assert listed(section("Commands and their options").partition("|")[0]) == common


def test_the_project_has_one_home():
    urls, readme = PROJECT["urls"], (ROOT / "README.md").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"Homepage", "Repository", "Documentation", "Changelog"} <= urls.keys()
    assert f"git clone {urls['Repository']} && cd rope_patch\n" in readme
    assert urls["Repository"] == citation["repository-code"]


def test_the_changes_begin_with_this_version():
    changes = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[0] == rope_patch.__version__


def test_the_metadata_is_complete():
    pythons = [entry for entry in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", entry)]
    assert PROJECT["requires-python"] == f">={pythons[0].rpartition(' ')[2]}"
    assert "License" not in " ".join(PROJECT["classifiers"]), "`license` has the expression"
    assert PROJECT["license"] == "Apache-2.0"
    assert len(PROJECT["keywords"]) == len(set(PROJECT["keywords"])) > 5


def test_no_page_has_a_badge():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if re.search(r"shields\.io|badge\.svg", page.read_text())]
