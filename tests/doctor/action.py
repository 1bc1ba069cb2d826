"""Run the steps of a composite action on this machine: `python -m tests.doctor.action FOLDER [INPUT=VALUE ...]`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def run_action(
    workspace: Path, inputs: Mapping[str, str], environment: Mapping[str, str] = os.environ, action: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run the steps in turn, as a runner of GitHub does, until one fails; returns the last one."""
    described: dict[str, Any] = yaml.safe_load((action / "action.yml").read_text(encoding="utf-8"))
    if unknown := inputs.keys() - described["inputs"].keys():
        raise ValueError(f"the action has no input {', '.join(sorted(unknown))}")
    values = {name: inputs.get(name, each["default"]) for name, each in described["inputs"].items()}

    def substituted(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: values[found[1]], text)

    with tempfile.TemporaryDirectory() as temporary:
        given = {"GITHUB_ACTION_PATH": str(action), "GITHUB_WORKSPACE": str(workspace), "RUNNER_TEMP": temporary}
        for step in described["runs"]["steps"]:
            own = {name: substituted(text) for name, text in step.get("env", {}).items()}
            command = [step["shell"], "--noprofile", "--norc", "-eo", "pipefail", "-c", substituted(step["run"])]
            done = subprocess.run(
                command, cwd=workspace, env={**environment, **given, **own}, capture_output=True, text=True
            )
            if done.returncode:
                break
    return done


if __name__ == "__main__":
    ended = run_action(Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:]))
    print(ended.stdout, end="")
    print(ended.stderr, end="", file=sys.stderr)
    sys.exit(ended.returncode)
