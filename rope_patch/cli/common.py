"""How every command speaks, fails and is interrupted."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rope_patch.errors import RopePatchError

ROWS = "finished rows are kept"
"""What an interrupted command whose rows are written one by one says of them."""

NO_READER = 128 + 13
"""Exit status where whoever read stdout went away, as of a program that SIGPIPE ends."""


class Stopped(KeyboardInterrupt):
    """A signal asked the process to end.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def run_politely(action: Callable[[], object], kept: str = "", again: str = "") -> int:
    """Run `action()` with errors in one line instead of a traceback; of several processes the first says it.

    Args:
        action: called without arguments.
        kept: what an interruption leaves, for people; empty where nothing is.
        again: the command that goes on from there.

    Returns:
        exit status: 0, 2 for wrong input, 130 when interrupted, 143 when terminated.

    Raises:
        BrokenPipeError: whoever read stdout went away.
    """
    try:
        action()
    except BrokenPipeError:
        raise
    except (RopePatchError, OSError) as error:
        say(_one_line(error))
        return 2
    except KeyboardInterrupt as stop:
        if is_first():
            print(file=sys.stderr)  # the terminal shows ^C
        say(_interrupted(kept, again))
        return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)
    return 0


def in_own_process(run: Callable[[], int]) -> int:
    """Run what the whole process is for: signals and a reader that goes away end it without a traceback.

    The first Ctrl-C stops the work; further ones disturb neither what is still said and written nor the end of the
    interpreter. SIGTERM stops the work likewise, unless a launcher minds this process.

    Args:
        run: gives an exit status.

    Returns:
        exit status: that of `run`, or 141 where whoever read stdout went away.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without a sign shows another one
    with _stopped_once():
        try:
            try:
                return run()
            finally:
                sys.stdout.flush()  # now, while a reader that went away can still be met
        except OSError as error:
            # or the interpreter would complain at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                return NO_READER
            say(_one_line(error))
            return 2


def run_recipe(words: str, action: Callable[[str], object]) -> int:
    """The command line of a recipe: `python recipes/NAME.py CONFIG`.

    Args:
        words: what `--help` says.
        action: called with the path of a description in YAML.

    Returns:
        exit status, see `run_politely`.
    """
    from rope_patch.cli.parser import Parser

    def run() -> int:
        parser = Parser(description=words)
        parser.add_argument("config", metavar="CONFIG", help="a description in YAML")
        config = parser.parse_args().config
        return run_politely(lambda: action(config), ROWS, as_typed())

    return in_own_process(run)


def as_typed() -> str:
    """The command line that started this process, to be typed again."""
    program = Path(sys.argv[0])
    if program.name != "rope-patch":  # a script or `-m`: the interpreter's own words
        return shlex.join(sys.orig_argv)
    found = shutil.which(program.name)
    is_found = found is not None and Path(found).resolve() == program.resolve()
    return shlex.join([program.name if is_found else sys.argv[0], *sys.argv[1:]])


def is_first() -> bool:
    """Whether this process is the one that prints, also where the others have not been joined yet."""
    return not _is_launched() or int(os.environ.get("RANK", "0")) == 0


def say(sentence: str) -> None:
    """A sentence of the first process for the reader, on stderr, so that stdout holds the results alone."""
    if is_first():
        print(f"rope-patch: {sentence}", file=sys.stderr)


@contextmanager
def busy(doing: str) -> Iterator[None]:
    """Show on the terminal that something takes its time; where stderr is no terminal, show nothing."""
    from rich.console import Console

    console = Console(stderr=True)
    if is_first() and console.is_terminal and not console.is_dumb_terminal:
        with console.status(doing):
            yield
    else:
        yield


def quietly(run: Callable[[Any, Callable[[str], None]], Any], description: Any) -> Any:
    """`run(description, say)`, without what Transformers would say meanwhile."""
    from rope_patch.evaluation.loading import quiet_transformers

    with quiet_transformers():
        return run(description, say)


def _is_launched() -> bool:
    """Whether torchrun or accelerate started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def _stopped_once() -> Iterator[None]:
    """While the block runs, the first SIGINT or SIGTERM is `Stopped`, and those after it are ignored to the end."""
    wanted: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler}
    if not _is_launched():  # a launcher that ends its processes wants them to end at once
        wanted[signal.SIGTERM] = signal.SIG_DFL
    # what is ignored from outside, as in the background of a script, stays ignored
    taken = {number: handler for number, handler in wanted.items() if signal.getsignal(number) is handler}
    for number in taken:
        signal.signal(number, _stop)
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in taken.items():
            if signal.getsignal(number) is _stop:
                signal.signal(number, handler)


def _stop(number: int, _: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)


def _interrupted(kept: str, again: str) -> str:
    if not kept:
        return "interrupted; nothing was written"
    return f"interrupted; {kept}; to go on: {'start the same processes again' if _is_launched() else again}"


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
