"""Command lines that people type from habit: the error shows the line to write, also on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rope_patch.cli import COMMANDS, main
from rope_patch.errors import EvaluationError
from rope_patch.saving.loading import load_model

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "recipes" / "assets" / "tiny-llama")


def refused(words: str, capsys) -> str:
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("rope-patch: ")
    assert shown.err.count("\n") == 1
    return shown.err.removeprefix("rope-patch: ").removesuffix("\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("export", "Missing from rope-patch export: DIR checkpoint folder, or a GGUF file"),
        ("perplexity --lengths 4k", "--lengths: '4k' is not a list of lengths such as 256,512,1024"),
        (f"describe {'a/long/folder' * 30} --seed", "there is no option '--seed'"),
        (f"serve {'a/long/folder' * 30} --port abc", "--port: 'abc' is not a whole number"),
        (f"describe x {'y' * 300}:z", f"'{'y' * 300}:z' stands alone"),
    ],
)
def test_a_terminal_shows_the_same_line(words, said):
    """tyro colours its box, and breaks its lines, where stdout is a terminal."""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "rope_patch.cli", *words.split()],
        **{"stdin": theirs, "stdout": theirs, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT},
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "60"},
    )
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 2
    assert done.stderr.startswith(f"rope-patch: {said}")
    assert "\x1b" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("describe -m DIR", "there is no option '-m'; did you mean '--model'? allowed: --attention, --help"),
        ("describe --model-path DIR", "did you mean '--model'?"),
        ("describe --model_name_or_path=DIR", "there is no option '--model_name_or_path'; did you mean '--model'?"),
        ("perplexity --checkpoint DIR", "did you mean '--model'?"),
        ("export DIR -o OUT", "did you mean '--output'?"),
        ("perplexity --context-length 512", "did you mean '--lengths'?"),
        ("sweep DIR --lengths 4x", "did you mean '--target'?"),
        ("serve DIR --max-model-len 4096", "did you mean '--max-length'?"),
        ("passkey --n 3", "did you mean '--trials'?"),
        ("finetune --lr 1e-4", "did you mean '--learning-rate'?"),
        ("finetune --data x.txt", "did you mean '--text'?"),
        ("perplexity --rope-scaling x", "did you mean '--scheme'?"),
        ("perplexity --zzz x", "there is no option '--zzz'; allowed: --attention"),
        ("perplexity --config conf.yaml", "a YAML file is the first word: rope-patch COMMAND CONFIG.yaml"),
        ("perplexity --trust-remote-code", "is never run"),
        ("describe --scheme yarn --factor 4", "a field stands inside the scheme: write --scheme yarn:factor=4"),
        ("describe --scheme yarn -factor=4", "a field stands inside the scheme: write --scheme yarn:factor=4"),
        ("describe --scheme yarn --factor --json", "a field stands inside the scheme: write --scheme yarn:factor=..."),
        ("describe --scheme=yarn --target=4x", "write --scheme yarn:target=4x"),
        (
            "serve DIR --scheme self_extend:window=64 --group-size 4",
            "write --scheme self_extend:window=64,group_size=4",
        ),
        ("describe --scheme yarn:factor=4 --factor 4", "write --scheme yarn:factor=4"),
        ("describe --window", "write --scheme NAME:window=..."),
        (
            "describe DIR rerope:window=8",
            "'rerope:window=8' stands alone; if it is a scheme, write --scheme rerope:window=8",
        ),
        ("describe DIR factor=4", "stands alone; if it is a field, write --scheme NAME:factor=4"),
        ("perplexity --lengths 8 --json=true", "'true' stands alone; an option such as --json takes no value"),
        ("list --scheme yarn", "there is no option '--scheme'; write its value alone"),
        ("plot --picture biases", "write its value alone"),
        ("describe DIR --scheme logn --scheme yarn:factor=4", "--scheme is given twice; this command takes one"),
        ("plot wavelengths --output x.pdf", "output 'x.pdf': a picture is a PNG; write x.png"),
        ("completion zsh bash", "'bash' stands alone; put its option in front; allowed: --help"),
        ("perplexity --lengths 1K,2", "if k is 1024, write 1024,2"),
        ("perplexity --lengths 1..2k", "'1..2k' is not a list of lengths such as 256,512,1024 or 1x,2x,4x"),
    ],
)
def test_a_mistyped_option_shows_the_right_one(words, said, capsys):
    shown = refused(words, capsys)
    assert shown.endswith(said) or said in shown
    if "did you mean" in said:
        assert "allowed: --" in shown


@pytest.mark.parametrize(
    "words", [["perplexity", "", "--lengths", "8"], ["perplexity", "--model", "", "--lengths", "8"], ["export", ""]]
)
def test_a_variable_without_a_value_is_not_the_default(words, capsys):
    """`--model "$DIR"` measured the small checkpoint of the recipes."""
    assert main(words) == 2
    assert "a word is empty, as from an unset variable of the shell" in capsys.readouterr().err


def test_what_is_allowed_can_be_typed(capsys):
    """A word without an option, such as the checkpoint of `export`, is not among the options."""
    shown = refused("export x --nonsense", capsys)
    assert "--model" in shown
    assert "--checkpoint" not in shown
    for option in ("--model", "--checkpoint"):
        assert main(["export", option, TINY, "--scheme", "yarn:factor=4", "--for", "vllm"]) == 0
    assert "max-model-len 1024" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("train", "'finetune'"),
        ("PPL", "'perplexity'"),
        ("eval --model x", "'perplexity'"),
        ("convert x", "'export'"),
        ("chat x", "'demo-chat'"),
        ("schemes", "'list'"),
        ("download x", "'checkpoint'"),
        ("perplexty", "'perplexity'"),
    ],
)
def test_commands_of_other_programs(words, meant, capsys):
    shown = refused(words, capsys)
    assert f"did you mean {meant}? allowed: checkpoint, compare" in shown


def test_an_option_before_the_command(capsys):
    assert "write rope-patch COMMAND --model ..." in refused("--model x describe", capsys)


def test_help_and_version_in_other_words(capsys):
    for words in (["help"], ["-h"]):
        assert main(words) == 0
        assert all(f"\n  {command} " in capsys.readouterr().out for command in list(COMMANDS)[:1])
    for words in (["help", "describe"], ["describe", "-h"]):
        assert main(words) == 0
        assert "usage: rope-patch describe" in capsys.readouterr().out
    for words in (["version"], ["-V"], ["-v"]):
        assert main(words) == 0
        assert capsys.readouterr().out.startswith("rope-patch ")


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        ({"dtype": "fp16"}, "float16"),
        ({"dtype": "bf16"}, "bfloat16"),
        ({"device": "0"}, "cuda:0"),
        ({"device": "gpu"}, "cuda"),
    ],
)
def test_other_names_of_dtypes_and_devices(settings, meant):
    with pytest.raises(EvaluationError, match=f"did you mean '{meant}'?"):
        load_model(TINY, **settings)


def test_a_command_of_an_earlier_version_names_the_new_one(capsys):
    assert main(["ruler", "--model", "DIR"]) == 2
    assert "lm_eval --model rope_patch" in capsys.readouterr().err
