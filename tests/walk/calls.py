"""Records which function of the package calls which, while a model runs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from tests.floors import floor_of

PACKAGE = "rope_patch"


@dataclass(frozen=True, order=True)
class Function:
    """A function of the package."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix(PACKAGE + '.')}.{self.name}"


@dataclass(frozen=True)
class Call:
    """One call of a function of the package.

    Attributes:
        caller: the function that called it; None if it is not of the package.
        outer: the nearest function of the package on the stack, with others in between.
        given: whether an argument is what was looked for.
    """

    function: Function
    caller: Function | None
    outer: Function | None
    given: bool

    @property
    def climbs(self) -> bool:
        """Whether a function called this one on a higher floor."""
        return self.caller is not None and floor_of(self.caller.module) < floor_of(self.function.module)


@dataclass
class Calls:
    """The calls of functions of the package, in order."""

    entered: list[Call] = field(default_factory=list)

    def climbs(self) -> set[str]:
        """Each function with one on a higher floor that it called."""
        return {f"{call.caller} -> {call.function}" for call in self.entered if call.climbs}


def function_of(frame: FrameType | None) -> Function | None:
    """The function of a frame; None if it is not of the package."""
    # of its globals, since a method that `dataclass` makes has no file
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    return Function(module, _name(frame)) if frame is not None and module.startswith(PACKAGE + ".") else None


def _name(frame: FrameType) -> str:
    """The qualified name of a function, which Python 3.10 does not tell."""
    code: Any = frame.f_code
    return getattr(code, "co_qualname", code.co_name)


@contextlib.contextmanager
def recorded(is_given: Callable[[Any], bool] | None = None) -> Iterator[Calls]:
    """Record the calls of this thread and of those that it starts; `is_given` looks at each argument."""
    calls, before = Calls(), (sys.getprofile(), threading.getprofile())

    def look(frame: FrameType, event: str, argument: Any) -> None:
        # a generator is entered once for each of its items
        if event != "call" or frame.f_code.co_name == "<genexpr>" or (function := function_of(frame)) is None:
            return
        caller, above = function_of(frame.f_back), frame.f_back
        while above is not None and function_of(above) is None:
            above = above.f_back
        given = is_given is not None and any(map(is_given, arguments_of(frame)))
        calls.entered.append(Call(function, caller, function_of(above), given))

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])


def arguments_of(frame: FrameType) -> list[Any]:
    """What a function that has just been entered was given."""
    code, values = frame.f_code, frame.f_locals
    number = code.co_argcount + code.co_kwonlyargcount
    number += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return [values[name] for name in code.co_varnames[:number] if name in values]


def holds(value: Any, is_one: Callable[[Any], bool], depth: int = 3) -> bool:
    """Whether a value is such a thing, or an object, a list or a dict that keeps one."""
    if is_one(value):
        return True
    inner: list[Any] = []
    if depth > 0 and isinstance(value, dict):
        inner = list(value.values())
    elif depth > 0 and isinstance(value, list | tuple):
        inner = list(value)
    elif depth > 0 and (dataclasses.is_dataclass(value) or type(value).__module__.startswith(PACKAGE + ".")):
        inner = list(getattr(value, "__dict__", {}).values())
    return any(holds(each, is_one, depth - 1) for each in inner)
