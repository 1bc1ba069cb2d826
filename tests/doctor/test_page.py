"""What docs/how-to/positions-in-ci.md shows is what its commands print, on the repository that it describes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

import rope_patch
from rope_patch.doctor.command import main
from tests.doctor.test_command import LLAMA, WEB

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "positions-in-ci.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(rope-doctor [^\n]*)\n```\n\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
"""A command, and the output that the page shows for it; "..." stands for lines that it leaves out."""


def words(text: str) -> str:
    """A text without its line breaks: the page breaks a long sentence."""
    return " ".join(text.split())


def settings(name: str) -> dict:
    (text,) = re.findall(rf"^```yaml\n# {re.escape(name)}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return yaml.safe_load(text)


@pytest.mark.parametrize(("command", "output"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_the_page_shows_what_is_printed(command, output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for folder, config in {"models/chat": LLAMA, "models/long": json.loads(shown), "demo": WEB}.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    assert main(shlex.split(command)[1:]) == 1
    printed = capsys.readouterr().out
    pattern = ".*".join(re.escape(words(part)) for part in re.split(r"^\.\.\.$", output, flags=re.MULTILINE))
    assert re.fullmatch(pattern, words(printed), re.DOTALL), printed


def test_all_blocks_of_output_are_compared():
    assert len(BLOCKS) == PAGE.count("```text") == 2


def test_the_action_and_the_hook_of_the_page_are_those_there_are():
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    *_, step = settings(".github/workflows/positions.yml")["jobs"]["positions"]["steps"]
    assert step["with"].keys() <= action["inputs"].keys()
    assert all(f"`{name}`" in PAGE for name in action["inputs"])
    (used,) = settings(".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert used["id"] == hook["id"]
    tags = re.findall(r"(?:@|rev: )v([\d.]+)$", PAGE, re.MULTILINE)
    assert set(tags) == {rope_patch.__version__, "4"}  # and actions/checkout@v4
