"""Typed options from YAML and from the command line: one dataclass declares them, and tyro reads it.

This module does not import torch, so `--help` and mistyped options answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from rope_patch.cli.refusals import no_option, no_place, sentence_of
from rope_patch.errors import EvaluationError, RopePatchError, RopePatchWarning, did_you_mean, require
from rope_patch.json_files import is_text

require("tyro", "the command line", extra="cli")
import tyro  # noqa: E402  what is missing was named
import yaml  # noqa: E402
from tyro.conf import Positional as Positional  # noqa: E402  a word without the name of an option

T = TypeVar("T")

INTERRUPTED, NO_READER = 130, 141  # exit statuses after Ctrl-C, and where whoever read stdout went away


class Multiple(float):
    """A length in multiples of the training length L, until the checkpoint is known."""

    def __str__(self) -> str:
        return f"{self:g}x"


def _hint(default: str) -> str:
    """The help's text on a default; empty without a default, because the option's own help describes that case."""
    return "" if default in ("", "''", "None") else f"(default: {default})"


def _listed(pattern: str, metavar: str, what: str, several: bool = True) -> Any:
    """The rule by which tyro reads whole numbers, and multiples of L if the pattern allows them."""

    def read(words: list[str]) -> Any:
        listed = re.split(r"[,\s]+", ",".join(words).lower().strip())
        if not all(re.fullmatch(pattern, word) for word in listed):
            thousands = all(re.fullmatch(r"\d+k?", word) for word in listed)
            counted = (str(int(word[:-1]) * 1024 if word.endswith("k") else word) for word in listed)
            cure = f"; if k is 1024, write {','.join(counted)}" if thousands else ""
            raise ValueError(f"{' '.join(words)!r} is not {what}{cure}")
        # a multiple is an integer as soon as `run` has asked the checkpoint
        numbers = tuple(Multiple(word[:-1]) if word.endswith("x") else int(word) for word in listed)
        return numbers if several else numbers[0]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*" if several else 1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, tuple if several else (int, Multiple, type(None))),
        str_from_instance=lambda value: [",".join(map(str, value if several else (value,)))],
    )


_LENGTH = r"-?\d+|\d+(\.\d+)?x"

_NUMBERS = _listed(r"-?\d+", "N,N,...", "a list of whole numbers such as 256,512,1024")
_LENGTHS = _listed(_LENGTH, "N,Nx,...", "a list of lengths such as 256,512,1024 or 1x,2x,4x")
_ONE = _listed(_LENGTH, "N|Nx", "a length such as 1024 or 4x", several=False)
_arg = functools.partial(tyro.conf.arg, help_behavior_hint=_hint)

# the types of options; lengths are in tokens, or in multiples of the training length, such as 4x
Numbers = Annotated[tuple[int, ...], _NUMBERS, _arg()]  # whole numbers: `256,512` or `256 512`
Lengths = Annotated[tuple[int, ...], _LENGTHS, _arg()]  # likewise
Length = Annotated[int, _ONE]
OptionalLength = Annotated[int | None, _ONE, _arg()]
Specs = Annotated[
    tuple[str, ...], tyro.conf.arg(name="scheme", metavar="SCHEME"), tyro.conf.UseAppendAction
]  # repeated
Readers = Annotated[str, _arg(name="for", metavar="NAME,NAME,...")]  # programs that read a folder: the option `--for`
Names = Annotated[tuple[str, ...], _arg(metavar="NAME")]  # words behind one option
Amounts = Annotated[tuple[float, ...], _arg(metavar="FLOAT")]  # numbers behind one option
Word = Annotated[str | None, _arg(metavar="[NAME]")]  # a positional word that may be left out
FolderWord = Annotated[str | None, _arg(metavar="[DIR]")]  # a checkpoint as such a word
Words = Annotated[tuple[str, ...], _arg(metavar="[NAME ...]")]  # several of them
Name = Annotated[str, _arg(metavar="NAME")]
File = Annotated[str, _arg(metavar="FILE")]
Folder = Annotated[str, _arg(metavar="DIR")]  # where a checkpoint is meant, also a GGUF file or a Hub ID
OptionalName = Annotated[str | None, _arg(metavar="NAME")]  # this one and those below may be left out
OptionalFile = Annotated[str | None, _arg(metavar="FILE")]
OptionalFolder = Annotated[str | None, _arg(metavar="DIR")]
OptionalScheme = Annotated[str | None, _arg(metavar="SCHEME")]
Text = Annotated[str | None, _arg(metavar="STR")]
Count = Annotated[int | None, _arg(metavar="INT")]
Amount = Annotated[float | None, _arg(metavar="FLOAT")]


@dataclass(kw_only=True)
class Measured:
    """Options of every measurement. The default text is Python's standard library."""

    # checkpoint: a folder, a GGUF file or a Hub ID (default: the small checkpoint of the recipes)
    model: OptionalFolder = None
    # text to read: a .txt, .jsonl or .parquet file, a folder or a pattern (default: Python's library)
    text: OptionalFile = None
    dataset: OptionalName = None  # name or folder of a dataset, instead of --text
    split: OptionalName = None  # split of the dataset (default: test)
    column: Name = "text"  # column that holds the text
    dtype: Name = "auto"  # dtype of the weights: auto (the checkpoint's own), float32, bfloat16 or float16
    device: Name = "auto"  # device to run on: auto, cpu, cuda, cuda:1, mps
    attention: Name = "auto"  # attention implementation of Transformers: auto, sdpa, eager, flash_attention_2
    seed: int = 0  # random seed
    json: bool = False  # print one JSON document instead of tables

    resumes: ClassVar[bool] = True  # the same command goes on where it was stopped


def run(options: type[T], main: Callable[[T], object], words: Sequence[str] | None = None, prog: str = "") -> int:
    """Parse a command line, call `main` with the options, and turn an error into one line.

    Args:
        options: a dataclass, whose module's docstring is the help.
        words: arguments of the command line; default those of this process, which then ends.

    Returns:
        exit status: 0, 2 for wrong input, 130 when interrupted, 141 when stdout was closed.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # also the bars of libraries: in a log they are no lines
    try:
        typed = sys.argv[1:] if words is None else words
        resumes = getattr(options, "resumes", False)
        status = _ending(lambda: main(in_tokens(_in_processes(parse(options, typed, prog), typed))), resumes)
    except SystemExit as end:  # after --help
        status = int(end.code or 0)
    if words is None:
        sys.exit(status)
    return status


def parse(options: type[T], words: Sequence[str], prog: str = "") -> T:
    """Parse `[CONFIG.yaml] [DIR] [--option value] ...` to options; the command line overrules the file. A command with
    `--model` also takes the checkpoint as its first word, and a command with the checkpoint as its word also takes
    `--model`.

    Raises:
        EvaluationError: an option is wrong; the message names it, its value and what is allowed.
        OSError: the file cannot be read.
        SystemExit: after `--help`.
    """
    check_words(words)
    words, flags = list(words), flags_of(options)
    configured = "plan" not in flags and words and words[0].endswith((".yaml", ".yml"))  # a plan is no config
    of_file = words_of(path := Path(words.pop(0)), read_yaml(path), flags) if configured else {}
    words = _checkpoint_either_way(words, flags)
    alone = _words_alone(options)
    allowed = {"--help", *(flag for name, spellings in flags.items() if name not in alone for flag in spellings)}
    allowed |= {"--model"} if "checkpoint" in alone else set()
    typed = {word.partition("=")[0].replace("_", "-"): word for word in words if _OPTION.match(word)}
    if unknown := typed.keys() - allowed - {"-h"}:
        raise no_option(typed[min(unknown)].partition("=")[0], words, allowed, alone)
    # several schemes may be meant together, or one after the other; another option is overruled by a later one
    if "scheme" in flags and sum(word.partition("=")[0] == "--scheme" for word in words) > 1:
        raise EvaluationError("--scheme is given twice; this command takes one, or several together: --scheme A+B")
    for name in of_file:
        if typed.keys().isdisjoint(flags[name]):
            words = [*of_file[name], *words]
    description = sys.modules[options.__module__].__doc__
    asks = not {"--help", "-h"}.isdisjoint(words)
    shown = io.StringIO()
    try:
        with contextlib.nullcontext() if asks else _drawn_plainly(shown):
            return check_numbers(
                tyro.cli(options, prog=prog or Path(sys.argv[0]).name, description=description, args=words)
            )
    except SystemExit as end:
        if not end.code:
            raise
    text = sentence_of(shown.getvalue())
    if lacking := re.fullmatch(r"(--\S+) needs a value", text):
        text = f"{text}; write {lacking[1]} {_value_of(lacking[1], options)}"
    label, _, stray = text.partition(": ")
    raise no_place(stray.split(", "), allowed) if label == "Unrecognized options" else EvaluationError(text)


_OPTION = re.compile(r"--|-(?!inf|nan)[A-Za-z]")


def _value_of(flag: str, options: type) -> str:
    """The value that an option takes, as the help writes it: `N|Nx`, `INT` or `{all,last}`."""
    shown = io.StringIO()
    with contextlib.suppress(SystemExit), _drawn_plainly(shown):
        tyro.cli(options, args=["--help"])
    written = re.search(rf"{flag} ([^\s\]]+)", shown.getvalue())
    return written[1] if written else "VALUE"


@contextlib.contextmanager
def _drawn_plainly(shown: io.StringIO) -> Iterator[None]:
    """Capture tyro's output, which uses the colours of the terminal behind stdout and, from `COLUMNS`, its width."""
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100000"
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            yield
    finally:
        del os.environ["COLUMNS"]
        os.environ.update({} if width is None else {"COLUMNS": width})


def _checkpoint_either_way(words: list[str], flags: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Move the checkpoint to the place that the command expects: every command takes `DIR` and `--model DIR`."""
    positional = flags.keys() & {"plan", "picture", "checkpoint"}
    if "model" in flags and not positional and words and not words[0].startswith("-"):
        return ["--model", *words]
    if "checkpoint" in flags:
        for index, word in enumerate(words):
            if word in ("--model", "--checkpoint") and index + 1 < len(words):
                return [words[index + 1], *words[:index], *words[index + 2 :]]
            if word.startswith(("--model=", "--checkpoint=")):
                return [word.partition("=")[2], *words[:index], *words[index + 1 :]]
    return words


def check_words(words: Sequence[str], where: str = "") -> None:
    """Refuse words that cannot be a path, a name or a text.

    Args:
        where: the source of the words, as the beginning of the message.

    Raises:
        EvaluationError: a word is empty, or contains a NUL or a byte that is not UTF-8, which Python reads as a lone
            surrogate.
    """
    for word in words:
        if not word:
            raise EvaluationError(f"{where}a word is empty, as from an unset variable of the shell; leave it out")
        if "\0" in word:
            raise EvaluationError(f"{where}{word!r:.200} contains a NUL character; leave it out")
        if not is_text(word):
            raise EvaluationError(f"{where}{word!r:.200} contains a byte that is not UTF-8; rename it, or leave it out")


def check_numbers(options: T) -> T:
    """Refuse numbers that do not fit into 64 bits.

    Raises:
        EvaluationError: a whole number has more than 64 bits, or another number is not finite.
    """
    for name, value in vars(options).items():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, int) and not -(2**63) < each < 2**63:
                raise EvaluationError(f"{name}={each!s:.40} is not allowed; it must be below 2^63")
            if isinstance(each, float) and not math.isfinite(each):
                raise EvaluationError(f"{name}={each} is not allowed; it must be a finite number")
    return options


def _in_processes(options: T, words: Sequence[str]) -> T:
    """Return the options in one of the processes that share each row; a launcher must have started a multiple of their
    number. Without a launcher, the processes are started here with the same words, and this process ends after them.
    """
    number = getattr(options, "context_parallel", 1)
    started = int(os.environ.get("WORLD_SIZE", number))
    if number < 1 or started % number:
        raise EvaluationError(f"context_parallel={number} is not allowed with {started} processes; it must divide them")
    if number > 1 and "WORLD_SIZE" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
        recipe = sys.modules[type(options).__module__].__file__
        raise SystemExit(subprocess.call([*launcher, str(recipe), *words]))
    return options


def in_tokens(options: Any) -> Any:
    """Convert every length in the options to tokens; for multiples of L, read L from the config of the checkpoint.

    Raises:
        RopePatchError: there is no such checkpoint, or its config does not give L.
    """

    @functools.cache
    def trained() -> int:
        from rope_patch.saving.loading import default_checkpoint, trained_length

        named = getattr(options, "model", None) or getattr(options, "checkpoint", None)
        return trained_length(named or default_checkpoint())

    def tokens(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(tokens, value))
        return round(value * trained()) if isinstance(value, Multiple) else value

    return check_numbers(dataclasses.replace(options, **{name: tokens(value) for name, value in vars(options).items()}))


def say(sentence: str) -> None:
    """Print a sentence for the user, from the main process, on stderr: stdout holds only results."""
    if is_main():
        print(f"rope-patch: {sentence}", file=sys.stderr)


def is_main() -> bool:
    """Whether this is the main process of those that torchrun or accelerate started."""
    return int(os.environ.get("RANK", "0")) == 0


def in_one_process(what: str) -> None:
    """Refuse the other processes that a launcher started.

    Raises:
        EvaluationError: there is more than one process.
    """
    if (number := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise EvaluationError(f"{what} runs in one process, but a launcher started {number}")


def print_json(document: Any) -> None:
    """Print one JSON document, and only once if several processes measured."""
    if is_main():
        print(json.dumps(document, indent=2))


def _ending(action: Callable[[], object], resumes: bool) -> int:
    def tell(message: Warning | str, category: type[Warning], *where: Any, **_: Any) -> None:
        if issubclass(category, RopePatchWarning):  # a sentence for a person at a terminal
            say(str(message).partition(" (warnings.simplefilter")[0])
        else:
            sys.stderr.write(warnings.formatwarning(message, category, *where[:2]))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", RopePatchWarning)
            warnings.showwarning = tell
            action()
        sys.stdout.flush()  # now, while a reader that went away can still be met
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would complain at its end
        return NO_READER
    except (RopePatchError, OSError) as error:
        named = isinstance(error, OSError) and error.filename and error.strerror
        say(f"{error.filename}: {error.strerror}" if named else " ".join(str(error).split()))  # type: ignore[union-attr]
        return 2
    except KeyboardInterrupt:
        typed = ["rope-patch", *sys.argv[1:]] if Path(sys.argv[0]).name == "rope-patch" else sys.orig_argv
        say("interrupted" + f"; the results so far are saved; to resume: {shlex.join(typed)}" * resumes)
        return INTERRUPTED
    return 0


def flags_of(options: type) -> dict[str, tuple[str, ...]]:
    """The spelling of each option on the command line, by the option's name in a file."""
    return {field.name: _flags(field) for field in dataclasses.fields(options)}


def _words_alone(options: type) -> set[str]:
    """The fields of a command that take a word without an option."""
    return {field.name for field in dataclasses.fields(options) if "Positional" in str(field.type)}


def _flags(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The spellings of an option."""
    other = {"Specs": "scheme", Specs: "scheme", "Readers": "for"}
    name = other.get(field.type, field.name.replace("_", "-"))
    return (f"--{name}", f"--no-{name}") if field.type in ("bool", bool) else (f"--{name}",)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; empty for an empty file.

    Raises:
        EvaluationError: the file is not valid YAML, or no mapping.
        OSError: the file cannot be read.
    """
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), _Settings) or {}
    except RecursionError as error:
        raise EvaluationError(f"{path} is not valid YAML: its brackets are nested too deep") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, no such date, a number of 5000 digits
        raise EvaluationError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise EvaluationError(f"{path}: a mapping of options is expected, not {settings!r:.80}")
    return settings


def words_of(path: Path, settings: dict[str, Any], flags: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Convert the settings of a file to words of a command line, by option, so that they are parsed and refused like
    typed options.

    Raises:
        EvaluationError: there is no such option, or a value is nested.
    """
    words = {}
    for name, value in settings.items():
        if name not in flags:
            raise EvaluationError(f"{path}: there is no option {name!r}; {did_you_mean(str(name), flags)}")
        values, flag = value if isinstance(value, list) else [value], flags[name][0]
        if any(isinstance(each, list | dict) for each in values):
            raise EvaluationError(f"{path}: {name}: {value!r:.80} is nested; a value or a list of values is allowed")
        if isinstance(value, bool):
            words[name] = [flag if value else flags[name][-1]]
        elif flag == "--scheme":
            words[name] = [word for each in values for word in (flag, str(each))]
        elif value is not None:
            words[name] = [flag, *map(str, values)]
        check_words(words.get(name, ()), f"{path}: {name}: ")
    return words


class _Settings(yaml.SafeLoader):
    """The safe YAML loader, with two changes: it refuses aliases, because aliases of aliases of lists grow without end,
    and keys that occur twice.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            place = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"write the value instead of *{place.anchor}", place.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r:.80} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
