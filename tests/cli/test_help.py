from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rope_patch.cli import COMMANDS, main, make_parser
from rope_patch.cli.common import run_recipe
from rope_patch.cli.completion import all_parsers
from rope_patch.cli.cookbook import find, names
from rope_patch.cli.plot import PICTURES

PACKAGE = Path(__file__).parents[2] / "rope_patch"
PARSERS = {parser.prog: parser for parser in all_parsers(make_parser())}
WITHOUT_JSON = {"rope-patch completion"}
RESUMED = {f"rope-patch {name}" for name in ("perplexity", "passkey", "sweep", "finetune", "compare")}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def help_of(*words):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0


def options(parser):
    return {option for action in parser._actions for option in action.option_strings}


def test_the_commands_stand_under_what_they_are_for(capsys):
    help_of()
    said = capsys.readouterr().out
    found = re.findall(r"^(?:  )?([a-z]+(?: on)?)(?::$|  +\w)", said.partition("options:")[0], re.MULTILINE)
    expected = []
    for purpose, modules in COMMANDS.items():
        expected += [purpose, *(module.__name__.rpartition(".")[2].replace("listing", "list") for module in modules)]
    assert found == expected


@pytest.mark.parametrize("prog", PARSERS)
def test_every_help_teaches(prog):
    parser = PARSERS[prog]
    assert len(parser.description.split()) > 2
    assert "written: " in parser.epilog
    assert "exit status: 0 done; 2 wrong input" in parser.epilog
    assert all(action.help for action in parser._actions)


@pytest.mark.parametrize("prog", PARSERS)
def test_every_command_has_json(prog):
    assert ("--json" in options(PARSERS[prog])) != (prog in WITHOUT_JSON)


@pytest.mark.parametrize("prog", PARSERS)
def test_what_can_be_resumed_says_what_is_kept(prog):
    assert bool(PARSERS[prog].get_default("kept")) == (prog in RESUMED)


@pytest.mark.parametrize(
    "example", sorted({line for parser in PARSERS.values() for line in parser.get_default("examples")})
)
def test_examples_are_command_lines(example):
    """Those that take seconds are run elsewhere; all are at least words that the command takes."""
    words = shlex.split(example.partition("rope_patch.cli ")[2] or example.partition("rope-patch ")[2])
    if words[-1] == "--help":
        return
    arguments = make_parser().parse_args(words)
    config = getattr(arguments, "config", None) or getattr(arguments, "description", None)
    if config is not None:  # an example before this one copies it
        assert config in find(Path(config).stem).files
    if "copy" in words:
        assert words[2] in names()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_prose_keeps_to_the_width_and_commands_stay_whole(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    help_of("perplexity")
    lines = capsys.readouterr().out.splitlines()
    example = "  rope-patch perplexity --scheme yarn:factor=auto --lengths 256,512,1024 --documents 4"
    assert example in lines
    prose = [line for line in lines if not line.startswith(("  rope-patch", "  torchrun", "usage", " " * 7))]
    assert max(map(len, prose)) <= width
    assert len(" ".join(lines)) > 3000


@pytest.mark.parametrize(
    ("settings", "coloured"),
    [({"TERM": "xterm-256color"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
    ids=str,
)
def test_colours_follow_the_terminal(settings, coloured, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    help_of("sweep")
    assert bool(re.search(r"\x1b\[[\d;]*3\d", sys.stdout.getvalue())) == coloured


def test_without_a_terminal_the_help_is_plain(capsys):
    help_of("sweep")
    assert "\x1b" not in capsys.readouterr().out


WRONG = {
    "there is no command 'perplexty'; did you mean 'perplexity'?": "perplexty",
    "there is no option '--lenghts'; did you mean '--lengths'?; see rope-patch perplexity --help": (
        "perplexity --lenghts=256"
    ),
    "there is no option '--foce'; did you mean '--force'?": "recipes copy demo --foce",
    "there is no command 'cpoy'; did you mean 'copy'?": "recipes cpoy demo",
    "there is no SHELL 'fsh'; ": "completion fsh",
    "the following arguments are required: --lengths": "perplexity",
    "the following arguments are required: COMMAND": "",
    "unrecognized arguments: more": "describe more",
    "argument --targets: invalid int value: 'x'": "perplexity --lengths 16 --targets x",
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_words_are_one_line(message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(WRONG[message]))
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("rope-patch: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_wrong_words_of_a_recipe_are_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--confg", "x.yaml"])
    with pytest.raises(SystemExit) as ended:
        run_recipe("What it does.", None)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("rope-patch: there is no option '--confg'; allowed: --help")


def test_the_pictures_are_those_that_can_be_drawn():
    command = pytest.importorskip("rope_patch.plots.command")
    assert tuple(command.PICTURES) == PICTURES


def test_a_picture_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", "sinusoidal"]) == 2
    assert "pip install 'rope-patch[plots]'" in capsys.readouterr().err


def test_the_help_waits_for_nothing_heavy():
    """The package itself is left out: what it imports is not the command line's to choose."""
    code = f"""if True:
        import sys, types
        package = types.ModuleType("rope_patch")
        package.__path__ = [{str(PACKAGE)!r}]
        sys.modules["rope_patch"] = package
        from rope_patch.cli import make_parser
        make_parser().format_help()
        heavy = {{"torch", "transformers", "datasets", "matplotlib", "shtab", "numpy"}}
        print(sorted(heavy & sys.modules.keys()))
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_json_of_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = str(tmp_path / "picture.png")
    assert main(["plot", "sinusoidal", "--dim", "8", "--length", "8", "--output", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"name": "sinusoidal", "options": {"dim": [8], "length": 8}, "picture": path}
