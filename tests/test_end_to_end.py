"""The blocks of output in docs/how-to/end-to-end.md are what its commands print.

What follows from the config alone is printed by the commands of the page, on a narrow model of the checkpoint's shape.
What was measured is printed from the rows that the page was made of, in docs/results/end_to_end.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from rope_patch import patch
from rope_patch.cli import main
from rope_patch.evaluation.row import Rows
from rope_patch.evaluation.scheme_specs import display_name
from rope_patch.evaluation.standard_errors import paired_difference
from rope_patch.evaluation.tables import print_table, signed

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "end-to-end.md").read_text()
RESULTS = ROOT / "docs" / "results" / "end_to_end"
BLOCKS = re.findall(
    r"^```sh\n((?:(?!^```).)*?)^```\n(?:(?!^```).)*?^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)
"""The commands of a step, and the output that the page shows for them."""


def narrow(folder: str, scheme: str | None = None) -> None:
    """A model of stories15m's depth and L in a folder, as a training under a scheme leaves it."""
    sizes = {"hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 6, "num_attention_heads": 6}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, max_position_embeddings=256, **sizes))
    if scheme:
        patch(model, scheme)
    model.save_pretrained(folder)


def words(text: str) -> str:
    """A text without its line breaks: the page breaks a long sentence."""
    return " ".join(text.split())


def run_here(commands: str) -> None:
    for command in commands.replace("\\\n", "").splitlines():
        program, *rest = shlex.split(command)
        if program == "rope-patch" and rest[0] != "checkpoint":  # which fetches
            assert main(rest) == 0


@pytest.mark.filterwarnings("ignore::rope_patch.RopePatchWarning")
@pytest.mark.parametrize(("commands", "output"), BLOCKS, ids=[shlex.split(block[0])[1] for block in BLOCKS])
def test_the_page_shows_what_is_printed(commands, output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "rope-patch finetune" in commands:
        print_table(Rows(RESULTS / "finetune.jsonl").rows, Console(width=100))
    else:
        narrow("runs/checkpoints/stories15m")
        narrow("runs/book/finetune/yarn-target-auto/checkpoint", "yarn:target=1024")
        capsys.readouterr()
        run_here(commands)
    printed = capsys.readouterr().out
    shown = ".*".join(re.escape(words(part)) for part in re.split(r"^\.\.\.$", output, flags=re.MULTILINE))
    assert re.fullmatch(shown, words(printed)), printed


def test_all_blocks_of_output_are_compared():
    assert len(BLOCKS) == PAGE.count("```text") == 3


def test_the_table_of_the_sweep_is_that_of_the_rows():
    rows = {(display_name(row.line), row.length): row for row in Rows(RESULTS / "sweep.jsonl").rows}
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)]
    assert table[0][:2] == ["scheme", "1024"]
    for name, at_target, minus_cut, minus_plain, at_half, _ in table[2:]:
        row = rows[name, 1024]
        difference, error = paired_difference(row, rows["sliding window", 1024])
        apart = f"{difference:+.3f} ±{error:.3f}" if difference else "0"
        before = rows[name, 256].nll - rows["plain checkpoint", 256].nll
        shown = f"{row.nll:.3f}", apart, signed(before), f"{rows[name, 512].nll:.3f}"
        assert (at_target, minus_cut, minus_plain, at_half) == shown
    assert f"is {table[3][2].replace('+', '').replace('±', '± ')} above it" in PAGE
