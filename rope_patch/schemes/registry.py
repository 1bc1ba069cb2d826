"""Names for schemes: look-up, strings such as `rerope:window=128+logn`, and dicts for a saved config."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from rope_patch.errors import InvalidField, MissingField, UnknownScheme, did_you_mean
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.compose import Compose
from rope_patch.schemes.names import WHERE, find_name
from rope_patch.schemes.target import Reaching, filled_for, takes_target

_REGISTRY: dict[str, type[Scheme]] = {}
_FORMS: dict[str, Callable[..., Scheme]] = {}
_SAVED: dict[str, Callable[..., Scheme]] = {}
"""Names of mixtures of schemes: what makes one from its fields or from text in brackets, and from a dict."""

_DEEPEST = 8
"""Brackets within brackets: a list of numbers in a mixture of layers has two."""


def register_scheme(cls: type[Scheme]) -> type[Scheme]:
    """Give a scheme class its `name`, so that names, command lines and saved models find it. Usable as a decorator.

    The same definition may be run again, as cells of a notebook are; the newer class is found from then on.

    Args:
        cls: the class, whose `name` is in snake_case.

    Raises:
        InvalidField: when another class has the name already.
    """
    known = _REGISTRY.get(cls.name, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise InvalidField(f"the scheme name {cls.name!r} belongs to {known.__qualname__} already")
    _REGISTRY[cls.name] = cls
    return cls


def register_form(name: str, make: Callable[..., Scheme], load: Callable[..., Scheme] | None = None) -> None:
    """Let specs use a `name` for what `make` makes of their fields, or of a `text` in brackets; `load` reads what
    `Scheme.to_dict` wrote under that name.
    """
    _FORMS[name] = make
    if load is not None:
        _SAVED[name] = load


def list_schemes() -> list[str]:
    """The registered names, sorted."""
    return sorted(_REGISTRY)


def scheme_class(name: str) -> type[Scheme]:
    """The class behind a name.

    Args:
        name: as registered, or as `find_name` understands it.

    Raises:
        UnknownScheme: with the five nearest names.
    """
    return _REGISTRY[find_name(name if isinstance(name, str) else repr(name), _REGISTRY)]


def get_scheme(name: str, **fields: Any) -> Scheme:
    """A scheme from its name and fields, or from a string that spells both.

    Args:
        name: a registered name, or `name:field=value,...` and several of them joined by `+`. Case, hyphens and
            underscores do not matter, and the names of Transformers and of papers lead to ours.
        **fields: the fields, with exactly one plain name. `target`, a length in tokens, is allowed with any: it
            fills the open fields of all schemes that it means something to, see `Scheme.fields_for`. `"auto"` fills
            those that follow from the checkpoint alone.

    Returns:
        the scheme; with a `target` it waits for a checkpoint, which `patch` or `Scheme.reach` gives it.

    Raises:
        UnknownScheme: no such name.
        InvalidField: an unknown, missing or wrong field.

    Example:
        >>> get_scheme("yarn", factor=8) == get_scheme("yarn:factor=8")
        True
        >>> str(get_scheme("yarn:beta_fast=16", target=8192))
        'yarn:target=8192,beta_fast=16'
    """
    if not isinstance(name, str):
        raise _no_scheme(name, fields)
    parts = [_parse(part) for part in split_outside_brackets(name, "+")]
    if "target" in fields and (len(parts) > 1 or parts[0][1]):
        _aim(parts, fields.pop("target"))
    if fields and (len(parts) > 1 or parts[0][1]):
        raise InvalidField(f"fields {', '.join(fields)} with {name!r}: they are allowed with one plain name only")
    schemes = [_made(part, {**spelled, **fields}) for part, spelled in parts]
    return schemes[0] if len(schemes) == 1 else Compose(*schemes)


def scheme_from_dict(data: dict[str, Any]) -> Scheme:
    """The scheme that `Scheme.to_dict` wrote.

    Args:
        data: `{"name": ..., **fields}`.

    Raises:
        UnknownScheme, InvalidField: when the dict does not describe a scheme.
    """
    try:
        return _from_dict(data)
    except RecursionError:
        raise InvalidField("a dict with dicts nested this deep does not describe a scheme") from None


def _from_dict(data: Any) -> Scheme:
    if not isinstance(data, dict) or "name" not in data:
        raise InvalidField(f"{data!r} does not describe a scheme: a dict with a 'name' and its fields is expected")
    fields = {key: value for key, value in data.items() if key != "name"}
    if data["name"] == Compose.name:
        parts = fields.get("schemes")
        if not isinstance(parts, (list, tuple)) or len(fields) > 1:
            raise InvalidField(f"{data!r} is no composition: its name and a list of 'schemes' are expected")
        return Compose(*map(_from_dict, parts))
    if isinstance(name := data["name"], str) and name in _SAVED:
        return _called(name, _SAVED[name], fields)
    return _build(scheme_class(data["name"]), fields)


def as_scheme(schemes: Iterable[str | Scheme], fields: dict[str, Any]) -> Scheme:
    """One scheme from what `patch` was given: names, objects, and fields with exactly one name.

    Args:
        schemes: names, spelled-out strings, or schemes.
        fields: of the only name; `target` is allowed with several.

    Raises:
        InvalidField: nothing was given, or fields without exactly one name.
    """
    schemes = list(schemes)
    if "target" in fields and len(schemes) > 1 and all(isinstance(scheme, str) for scheme in schemes):
        schemes = ["+".join(map(str, schemes))]
    if not schemes:
        raise InvalidField(f"no scheme was given; name one, such as 'yarn', factor=4; {WHERE}")
    if fields and (len(schemes) > 1 or isinstance(schemes[0], Scheme)):
        raise _misplaced(schemes, fields)
    built = [scheme if isinstance(scheme, Scheme) else get_scheme(scheme, **fields) for scheme in schemes]
    return built[0] if len(built) == 1 else Compose(*built)


def _misplaced(schemes: list[Any], fields: dict[str, Any]) -> InvalidField:
    """What to write for fields with several schemes, or with one that has its own."""
    given, first = _spelled(fields), schemes[0]
    if len(schemes) > 1 or type(first) not in _REGISTRY.values():
        inside = ",".join(f"{name}={value}" for name, value in fields.items())
        return InvalidField(
            f"{given} with several schemes: write it inside the name that it belongs to, 'NAME:{inside}'"
        )
    wanted = f"{first.name!r}, {given}"
    if "target" not in fields:
        known = dataclasses.fields(first)
        own = {field.name: value for field in known if (value := getattr(first, field.name)) != field.default}
        wanted += f", or {type(first).__name__}({_spelled({**own, **fields})})"
    return InvalidField(f"{given} with a scheme that has its fields: write {wanted}")


def _no_scheme(given: Any, fields: dict[str, Any]) -> UnknownScheme | InvalidField:
    """What to write instead of something that is neither a name nor a scheme."""
    if given is None:
        find_name("none", _REGISTRY)
    if given not in _REGISTRY.values():
        return UnknownScheme(
            f"{given!r} is not a scheme; write a name such as 'yarn', or an object such as YaRN(factor=4)"
        )
    words = _spelled({**dict.fromkeys(_required(given), ...), **fields}).replace("Ellipsis", "...")
    by_name = ", ".join(filter(None, [repr(given.name), words]))
    return InvalidField(f"{given.__name__} is a class: write {given.__name__}({words}), or {by_name}")


def _spelled(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _aim(parts: list[tuple[str, dict[str, Any]]], target: Any) -> None:
    """Give a target to those of several parsed schemes that take one."""
    aimed = [fields for name, fields in parts if name not in _FORMS and takes_target(scheme_class(name))]
    if not aimed:
        raise _means_nothing([name for name, _ in parts], target)
    for fields in aimed:
        if "target" in fields:
            raise InvalidField(f"target={target!r} and target={fields['target']!r}: it is allowed once")
        fields["target"] = target


def _means_nothing(names: list[str], target: Any) -> InvalidField:
    takers = (name for name in list_schemes() if takes_target(_REGISTRY[name]))
    return InvalidField(
        f"target={target!r} means nothing to {' and '.join(names)}; schemes that take it: {', '.join(takers)}"
    )


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    typed, _, rest = text.strip().partition(":")
    name = find_name(typed.strip(), _REGISTRY, _FORMS)
    if rest.startswith("[") and name in _FORMS:
        return name, {"text": rest}
    fields: dict[str, Any] = {}
    for item in filter(None, split_outside_brackets(rest)):
        key, equals, value = item.partition("=")
        if not equals:
            raise InvalidField(f"{item!r} in {text!r} is not of the form field=value")
        if (field := key.strip()) in fields:
            raise InvalidField(f"{text!r} gives {field!r} twice; each field is allowed once")
        fields[field] = _value(value.strip())
    return name, fields


def split_outside_brackets(text: str, separator: str = ",") -> list[str]:
    """A text cut at every separator that stands outside of all brackets.

    Raises:
        InvalidField: brackets are nested deeper than any scheme needs.
    """
    items, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "[(") - (character in ")]")
        if depth > _DEEPEST:
            raise InvalidField(f"{text!r} nests brackets more than {_DEEPEST} deep")
        if character == separator and depth == 0:
            items.append(text[start:index])
            start = index + 1
    return [*items, text[start:]]


def _value(text: str) -> Any:
    """A Python literal, with the YAML spellings of true, false and null; a list may be one of words; else a word."""
    spelled = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in spelled:
        return spelled[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        listed = len(text) > 1 and text[0] == "[" and text[-1] == "]"
        return tuple(_value(item.strip()) for item in text[1:-1].split(",")) if listed and text[1:-1] else text
    return tuple(value) if isinstance(value, list) else value


def _made(name: str, fields: dict[str, Any]) -> Scheme:
    return _called(name, _FORMS[name], fields) if name in _FORMS else _build(scheme_class(name), fields)


def _called(name: str, make: Callable[..., Scheme], fields: dict[str, Any]) -> Scheme:
    known = inspect.signature(make).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for field in () if takes_any else fields:
        if field not in known:
            raise InvalidField(f"{name} has no field {field!r}; {did_you_mean(field, known)}")
    if missing := [field for field, parameter in known.items() if _needed(parameter) and field not in fields]:
        raise InvalidField(f"{name} needs {', '.join(missing)}, such as layers:[0-2=nope;rest=none]")
    return make(**fields)


def _needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD


def _build(cls: type[Scheme], fields: dict[str, Any]) -> Scheme:
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if "target" in fields and "target" not in known:
        return _reaching(cls, {**fields})
    allowed = [*known, "target"] if takes_target(cls) else list(known)
    for name, value in fields.items():
        if name not in known:
            raise InvalidField(f"{cls.name} has no field {name!r}; {did_you_mean(str(name), allowed)}")
        if value == "auto" and takes_target(cls) and name in filled_for(cls, 1):
            raise InvalidField(
                f"{cls.name}: {name}='auto' is not allowed; write target=8192, the length in tokens to reach, or "
                "target=auto where lengths are measured"
            )
    if missing := [name for name in _required(cls) if name not in fields]:
        error = MissingField(f"{cls.name} needs {', '.join(missing)}; its fields are {', '.join(allowed)}")
        error.scheme, error.given = cls, fields
        raise error
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def _required(cls: type[Scheme]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]  # type: ignore[arg-type]


def _reaching(cls: type[Scheme], fields: dict[str, Any]) -> Scheme:
    target = fields.pop("target")
    if not takes_target(cls):
        raise _means_nothing([cls.name], target)
    like = _build(cls, {**filled_for(cls, target), **fields})  # what is wrong with the others is known now
    given = (field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
    return Reaching(like, target, tuple(name for name in given if fields.get(name) is not None))
