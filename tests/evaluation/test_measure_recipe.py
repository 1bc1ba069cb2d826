"""`rope-patch measure`: the runs of a plan, their commands, and what is refused before anything runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from rope_patch.cli import main

REAL = Path(__file__).parents[2] / "recipes" / "configs" / "real" / "qwen2.5-coder-1.5b.yaml"


@pytest.fixture
def plan(checkpoint, tmp_path):
    """A plan of two runs on a tiny checkpoint with L = 16; `plan(old="new")` writes it with a text replaced."""
    (tmp_path / "texts").mkdir()
    for name in ("one", "two"):
        (tmp_path / "texts" / f"{name}.txt").write_text(f"{name} quick brown fox jumps over a lazy dog. " * 12)

    def write(old: str = "", new: str = "") -> str:
        text = f"""
model: {checkpoint}
text: {tmp_path / "texts"}
output: {tmp_path / "out"}
schemes: [plain, "rerope:window=8"]
targets: 4
references: false
runs:
  ordinary:
    command: perplexity
    lengths: [16, 32]
    windows_per_document: 2
  spans:
    command: passkey
    task: spans
    lengths: [32]
    depths: [0.5]
    trials: 2
    span: 4
    schemes: [plain]
"""
        assert old in text
        path = tmp_path / "plan.yaml"
        path.write_text(text.replace(old, new))
        return str(path)

    return write


def rows(path: Path) -> list[tuple[str, int]]:
    return [(row["line"], row["length"]) for row in map(json.loads, path.read_text().splitlines())]


def test_every_run_has_its_options_and_its_folder_and_resumes(plan, tmp_path, capsys):
    assert main(["measure", plan()]) == 0
    out = tmp_path / "out"
    assert rows(out / "ordinary" / "perplexity.jsonl") == [
        (line, length) for length in (16, 32) for line in ("plain", "rerope:window=8")
    ]
    assert rows(out / "spans" / "spans.jsonl") == [("plain", 32)]
    before = (out / "ordinary" / "perplexity.jsonl").read_bytes()
    in_short = capsys.readouterr().out.splitlines()[-3:]
    assert in_short[0] == "In short"
    assert in_short[1].startswith("- ordinary: At 32 tokens ReRoPE, w = 8")
    assert in_short[2].startswith("- spans: Nothing can be said about reading farther")
    assert main(["measure", plan(), "--only", "ordinary"]) == 0
    assert (out / "ordinary" / "perplexity.jsonl").read_bytes() == before
    assert "run spans" not in capsys.readouterr().err


def test_the_command_line_overrules_the_plan_and_a_dry_run_prints_what_would_run(plan, tmp_path, capsys):
    assert main(["measure", plan(), "--dry-run", "--device", "cuda", "--output", "elsewhere"]) == 0
    first, second = (shlex.split(line, comments=True) for line in capsys.readouterr().out.splitlines())
    assert first[:2] == ["rope-patch", "perplexity"]
    assert second[:2] == ["rope-patch", "passkey"]
    for words, name in ((first, "ordinary"), (second, "spans")):
        assert words[words.index("--device") + 1] == "cuda"
        assert words[words.index("--output") + 1] == f"elsewhere/{name}"
    assert first.count("--scheme") == 2
    assert second.count("--scheme") == 1  # its own list stands in place of the shared one
    assert "--targets" not in second  # passkey has no such option
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("lengths: [32]", "lenghts: [32]", ("run spans", "'lenghts'", "lengths")),
        ("trials: 2", "trials: many", ("many",)),  # of the second run, before the first one measures
        ("command: passkey", "command: passkeys", ("run spans", "'passkeys'", "passkey")),
        ("    command: passkey\n", "", ("run spans", "None")),
        ("targets: 4\n", "targets: 4\nspam: 3\n", ("no command of its runs has the option 'spam'",)),
        ("    trials: 2", "    trials: 2\n    context_parallel: 2", ("context_parallel",)),
        ("    lengths: [16, 32]", "    lengths: [16, 32]\n    context_parallel: 2", ("run its command by itself",)),
        ("runs:", "walks:", ("`runs` must give each run by its name",)),
    ],
)
def test_a_mistake_is_named_before_anything_runs(old, new, words, plan, tmp_path, capsys):
    assert main(["measure", plan(old, new)]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_not_there(plan, capsys):
    assert main(["measure", plan(), "--only", "whatever"]) == 2
    assert "has no run 'whatever'; allowed: ordinary, spans" in capsys.readouterr().err


def test_the_plan_of_the_real_checkpoint_asks_what_everyone_asks(capsys):
    assert main(["measure", str(REAL), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    runs = {line.rpartition("# ")[2]: line for line in lines}
    assert list(runs) == ["repeat-code", "repeat-prose", "last-code", "last-prose", "far", "passkey"]
    assert "--lengths 4096 16384 32768 65536 131072" in runs["last-code"]
    assert "--depths 5 --trials 6" in runs["passkey"]
    for line in lines:
        for scheme in ("plain", "yarn:", "rerope:window=16384+logn", "self_extend:", "dca:", "lm_infinite:"):
            assert f"--scheme {scheme}" in line
