"""Names for schemes: look-up, strings such as `rerope:window=128+logn`, and dicts for a saved config."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable
from typing import Any

from rope_patch.errors import InvalidField, UnknownScheme, did_you_mean
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.compose import Compose

_REGISTRY: dict[str, type[Scheme]] = {}


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


def list_schemes() -> list[str]:
    """The registered names, sorted."""
    return sorted(_REGISTRY)


def scheme_class(name: str) -> type[Scheme]:
    """The class behind a name.

    Args:
        name: as registered.

    Raises:
        UnknownScheme: with the closest name and the list of all.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise UnknownScheme(f"there is no scheme {name!r}; {did_you_mean(str(name), _REGISTRY)}")
    return _REGISTRY[name]


def get_scheme(name: str, **fields: Any) -> Scheme:
    """A scheme from its name and fields, or from a string that spells both.

    Args:
        name: a registered name, or `name:field=value,...` and several of them joined by `+`.
        **fields: the fields, beside exactly one plain name.

    Raises:
        UnknownScheme: no such name.
        InvalidField: an unknown, missing or wrong field.

    Example:
        >>> get_scheme("yarn", factor=8) == get_scheme("yarn:factor=8")
        True
    """
    if not isinstance(name, str):
        raise UnknownScheme(f"{name!r} is not the name of a scheme; {did_you_mean(str(name), _REGISTRY)}")
    parts = [_parse(part) for part in name.split("+")]
    if fields and (len(parts) > 1 or parts[0][1]):
        raise InvalidField(f"fields {', '.join(fields)} beside {name!r}: they are allowed beside one plain name only")
    schemes = [_build(scheme_class(part), {**spelled, **fields}) for part, spelled in parts]
    return schemes[0] if len(schemes) == 1 else Compose(*schemes)


def scheme_from_dict(data: dict[str, Any]) -> Scheme:
    """The scheme that `Scheme.to_dict` wrote.

    Args:
        data: `{"name": ..., **fields}`.

    Raises:
        UnknownScheme, InvalidField: when the dict does not describe a scheme.
    """
    if not isinstance(data, dict) or "name" not in data:
        raise InvalidField(f"{data!r} does not describe a scheme: a dict with a 'name' and its fields is expected")
    fields = {key: value for key, value in data.items() if key != "name"}
    if data["name"] == Compose.name:
        parts = fields.get("schemes")
        if not isinstance(parts, (list, tuple)) or len(fields) > 1:
            raise InvalidField(f"{data!r} is no composition: its name and a list of 'schemes' are expected")
        return Compose(*map(scheme_from_dict, parts))
    return _build(scheme_class(data["name"]), fields)


def as_scheme(schemes: Iterable[str | Scheme], fields: dict[str, Any]) -> Scheme:
    """One scheme from what `patch` was given: names, objects, and fields beside exactly one name.

    Args:
        schemes: names, spelled-out strings, or schemes.
        fields: of the only name.

    Raises:
        InvalidField: nothing was given, or fields do not stand beside exactly one name.
    """
    schemes = list(schemes)
    if not schemes:
        raise InvalidField(f"no scheme was given; {did_you_mean('', _REGISTRY)}")
    if fields and not (len(schemes) == 1 and isinstance(schemes[0], str)):
        raise InvalidField(f"fields {', '.join(fields)} are allowed beside exactly one scheme name")
    built = [scheme if isinstance(scheme, Scheme) else get_scheme(scheme, **fields) for scheme in schemes]
    return built[0] if len(built) == 1 else Compose(*built)


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    name, _, rest = text.strip().partition(":")
    fields: dict[str, Any] = {}
    for item in filter(None, _split_outside_brackets(rest)):
        key, equals, value = item.partition("=")
        if not equals:
            raise InvalidField(f"{item!r} in {text!r} is not of the form field=value")
        if (field := key.strip()) in fields:
            raise InvalidField(f"{text!r} gives {field!r} twice; each field is allowed once")
        fields[field] = _value(value.strip())
    return name.strip(), fields


def _split_outside_brackets(text: str) -> list[str]:
    items, depth = [""], 0
    for character in text:
        depth += (character in "[(") - (character in ")]")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return items


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


def _build(cls: type[Scheme], fields: dict[str, Any]) -> Scheme:
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in fields:
        if name not in known:
            raise InvalidField(f"{cls.name} has no field {name!r}; {did_you_mean(str(name), known)}")
    required = [name for name, field in known.items() if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in fields]
    if missing:
        raise InvalidField(f"{cls.name} needs {', '.join(missing)}; its fields are {', '.join(known)}")
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
