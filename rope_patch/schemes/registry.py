"""Names for schemes: look-up, strings such as `rerope:window=128+logn`, and dicts for a saved config."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from rope_patch.errors import InvalidField, MissingField, UnknownScheme, did_you_mean, nearest
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.compose import Compose
from rope_patch.schemes.rules import plain_number
from rope_patch.schemes.target import Reaching, filled_for, takes_target

_REGISTRY: dict[str, type[Scheme]] = {}

FORMS: dict[str, Callable[..., Scheme]] = {}
"""Names of mixtures of schemes, each with the function that makes it; text in brackets is the field `layers`."""

_ALL = "`rope-patch list` shows all"
_NOTHING = "for the model as it is, do not patch it, or call unpatch(model)"
_SINKS = (
    "lm_infinite comes nearest: a window and the first tokens, all far distances alike, such as "
    "lm_infinite:local_window=1024,n_global=4"
)
_LAYOUT = "it is a layout of training rows: `rope-patch finetune --layout randomized`, or `--pose-row N` for PoSE"
_ADVICE = {
    **dict.fromkeys(("none", "null", "plain", "off", "original", "native", "unpatched"), _NOTHING),
    **dict.fromkeys(("streamingllm", "attentionsink", "attentionsinks"), _SINKS),
    **dict.fromkeys(("randomized", "randomizedpositions", "pose"), _LAYOUT),
}
"""Advice on names that have no scheme here, or have other fields."""

_FIELDS_MEANT = {
    **dict.fromkeys(("scale", "scaling", "scaling_factor", "s", "k", "extension_factor", "rope_scale"), "factor"),
    **dict.fromkeys(("alpha", "alpha_value", "compress_pos_emb", "ratio", "times"), "factor"),
    **dict.fromkeys(("rope_theta", "theta", "rope_base", "rope_freq_base", "freq_base"), "base"),
    **dict.fromkeys(("length", "target_length", "max_length", "max_len", "max_seq_len", "max_seq_length"), "target"),
    **dict.fromkeys(("max_position_embeddings", "max_model_len", "context_length", "ctx", "n_ctx"), "target"),
    **dict.fromkeys(("attn_factor", "temperature"), "attention_factor"),
    **dict.fromkeys(("window_size", "sliding_window", "neighbor_window", "w"), "window"),
    **dict.fromkeys(("group", "groups", "group_factor", "g"), "group_size"),
    **dict.fromkeys(("original_length", "original_max_length"), "original_max_position_embeddings"),
}
"""Names of fields in papers and other programs."""

_CONSTANTS = {"true": "True", "false": "False", "null": "None", "none": "None"}
"""Spellings of true, false and null in YAML and JSON."""

_CALL = re.compile(r"\s*([\w-]+)\s*\((.*)\)\s*", re.DOTALL)

_APART = re.compile(r"\s*([\w-]+)[\s,;]+(\w+\s*=.*)", re.DOTALL)
"""A name and its fields without the colon, such as `rerope, window=512`."""

_COUNTED = re.compile(r"(.*?[A-Za-z])[\s_x*-]*(\d+(?:\.\d+)?)x?", re.IGNORECASE)
"""A name with a number, such as `yarn4` or `yarn 4x`."""

_LONGEST_NAME = 64  # characters; the form above takes the square of their number

_DEEPEST = 8  # brackets within brackets: a list of numbers in a mixture of layers has two


def register_scheme(cls: type[Scheme]) -> type[Scheme]:
    """Register a scheme class under its `name`, so that names, command lines and saved models find it. It works as a
    decorator.

    The same definition may be run again, as cells of a notebook are; the newer class is found from then on.

    Args:
        cls: the class, whose `name` is in snake_case.

    Raises:
        InvalidField: another class has the name already.
    """
    registered = _REGISTRY.get(cls.name, cls)
    if (registered.__module__, registered.__qualname__) != (cls.__module__, cls.__qualname__):
        raise InvalidField(f"the scheme name {cls.name!r} belongs to {registered.__qualname__} already")
    _REGISTRY[cls.name] = cls
    return cls


def list_schemes() -> list[str]:
    """The registered names, sorted."""
    return sorted(_REGISTRY)


def scheme_class(name: str) -> type[Scheme]:
    """The class behind a name.

    Args:
        name: a registered name, or a spelling that `find_name` understands.

    Raises:
        UnknownScheme: no scheme has this name; the message lists the five nearest names.
    """
    return _REGISTRY[find_name(name if isinstance(name, str) else repr(name))]


def _folded(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()


def other_names(cls: type[Scheme]) -> list[str]:
    """Other names of a scheme in Transformers, in vLLM and in papers."""
    return [name for name in (cls.rope_type, *vars(cls).get("aliases", ())) if name]


def find_name(typed: str, forms: Iterable[str] = ()) -> str:
    """Resolve a typed name to the registered one, or to one of the `forms`.

    Args:
        typed: the name in any case, with or without hyphens and underscores; the name of the class; or the name in
            Transformers (its `rope_type`), in vLLM or in a paper (its `aliases`).

    Raises:
        UnknownScheme: no scheme has this name; the message lists the five nearest names, or says what to write instead.
    """
    names = [*_REGISTRY, *forms]
    if typed in names:
        return typed
    spelled = {_folded(name): name for name in names}
    for name, cls in _REGISTRY.items():
        for other in (cls.__name__, *other_names(cls)):
            spelled.setdefault(_folded(other), name)
    if (meant := spelled.get(_folded(typed))) is not None:
        return meant
    if (advice := _ADVICE.get(_folded(typed))) is not None:
        raise UnknownScheme(f"there is no scheme {typed!r}; {advice}")
    listed = [part.strip() for part in typed.split(",")]
    if len(listed) > 1 and all(_folded(part) in spelled for part in listed):
        raise UnknownScheme(f"there is no scheme {typed!r}; schemes are joined by a plus: write {'+'.join(listed)!r}")
    counted = _COUNTED.fullmatch(typed) if len(typed) <= _LONGEST_NAME else None
    if counted and (meant := spelled.get(_folded(counted[1]))) in _REGISTRY:
        line = f"{meant}:{_main_field(_REGISTRY[meant])}={counted[2]}"
        raise UnknownScheme(f"there is no scheme {typed!r}; write {line!r}")
    ranked = dict.fromkeys(spelled[other] for other in nearest(_folded(typed), spelled, len(spelled), 0))
    *most, last = map(repr, list(ranked)[:5])
    raise UnknownScheme(f"there is no scheme {typed!r}; did you mean {', '.join(most)} or {last}? {_ALL}")


def get_scheme(name: str, **fields: Any) -> Scheme:
    """Build a scheme from its name and fields, or from a string that spells both.

    Args:
        name: a registered name, `name:field=value,...`, or several of these joined by `+`. Case, hyphens and
            underscores do not matter. Names in Transformers and in papers are understood too.
        **fields: the fields, with exactly one plain name. `target`, a length in tokens, is allowed with any name: it
            fills the open fields of all schemes that have a rule for it, see `Scheme.fields_for`. `"auto"` fills the
            fields that follow from the checkpoint alone.

    Returns:
        the scheme; with a `target` it waits for a checkpoint, which `patch` or `Scheme.reach` gives it.

    Raises:
        UnknownScheme: there is no such name.
        InvalidField: a field is unknown, missing or wrong.

    Example:
        >>> get_scheme("yarn", factor=8) == get_scheme("yarn:factor=8")
        True
        >>> str(get_scheme("yarn:beta_fast=16", target=8192))
        'yarn:target=8192,beta_fast=16'
    """
    if not isinstance(name, str):
        raise _no_scheme(name, fields)
    if name.lstrip().startswith("{"):
        raise _of_text(name)
    parts = [_parse(part) for part in split_outside_brackets(name, "+")]
    if "target" in fields and (len(parts) > 1 or parts[0][1]):
        _aim(parts, fields.pop("target"))
    if fields and (len(parts) > 1 or parts[0][1]):
        raise _beside(name, parts, fields)
    schemes = [_build(part, {**spelled, **fields}) for part, spelled in parts]
    return schemes[0] if len(schemes) == 1 else Compose(*schemes)


def scheme_from_dict(data: dict[str, Any]) -> Scheme:
    """Rebuild the scheme that `Scheme.to_dict` wrote.

    Args:
        data: `{"name": ..., **fields}`.

    Raises:
        UnknownScheme, InvalidField: the dict does not describe a scheme.
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
            raise InvalidField(f"{data!r} is not a composition: its name and a list of 'schemes' are expected")
        return Compose(*map(_from_dict, parts))
    return _build(data["name"], fields)


def as_scheme(schemes: Iterable[str | Scheme], fields: dict[str, Any]) -> Scheme:
    """Build one scheme from the arguments of `patch`: names, objects, and fields with exactly one name.

    Args:
        schemes: names, spelled-out strings, or schemes.
        fields: fields of the only name; `target` is allowed with several names.

    Raises:
        InvalidField: there is no argument, or there are fields without exactly one name.
    """
    schemes = list(schemes)
    if len(schemes) > 1 and isinstance(schemes[0], str) and isinstance(schemes[1], (int, float)):
        raise _unplaced(*schemes[:2])
    if "layers" in fields and schemes and not _makes_layers(schemes[0]):
        raise _of_layers(schemes, fields)
    if not schemes:
        raise _unnamed(fields)
    if fields and len(schemes) > 1 and all(isinstance(scheme, str) for scheme in schemes):
        schemes = ["+".join(map(str, schemes))]  # a target is given to those that take it; others are refused by name
    if fields and (len(schemes) > 1 or isinstance(schemes[0], Scheme)):
        raise _misplaced(schemes, fields)
    built = [scheme if isinstance(scheme, Scheme) else get_scheme(scheme, **fields) for scheme in schemes]
    return built[0] if len(built) == 1 else Compose(*built)


def _unnamed(fields: dict[str, Any]) -> InvalidField:
    """The error for fields without a scheme, with the line to write; one of the fields may name a scheme, as in
    `yarn=4`.
    """
    for typed, value in fields.items():
        others = _spelled({name: each for name, each in fields.items() if name != typed})
        with suppress(UnknownScheme):
            if isinstance(value, str) and _folded(value) not in _ADVICE and (name := find_name(value)):
                line = ", ".join(filter(None, (repr(name), others)))
                return InvalidField(f"{typed}={value!r} is no argument: write {line}")
        with suppress(UnknownScheme):
            cls = _scheme_for(_FIELDS_MEANT.get(typed, typed)) or _REGISTRY[find_name(typed)]
            return InvalidField(f"{typed}={value!r} names no scheme: write {cls.name!r}, {_main_field(cls)}={value!r}")
    return InvalidField(f"no scheme was given; name one, such as 'yarn', factor=4; {_ALL}")


def _of_text(text: str) -> InvalidField:
    """The error for a dict that came as text, such as `rope_scaling` for vLLM, with the string to write."""
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        given = ast.literal_eval(re.sub(r"\b(true|false|null)\b", lambda word: _CONSTANTS[word[0]], text))
        kind = next(given.pop(key) for key in ("rope_type", "type", "name") if key in given)
        inside = _inside({key: value for key, value in given.items() if key not in ("type", "rope_theta")})
        return InvalidField(
            f"{text!r} is the text of a dict: write '{':'.join(filter(None, (find_name(kind), inside)))}'"
        )
    return InvalidField(f"{text!r} is the text of a dict: write 'NAME:field=value', such as 'yarn:factor=4'")


def _unplaced(name: str, value: float) -> InvalidField:
    """The error for a number behind a name, with the field that it is meant for."""
    field = _main_field(_REGISTRY[name]) if name in _REGISTRY else "field"
    return InvalidField(f"{value!r} is not a scheme: name its field, {name!r}, {field}={value!r}")


def _main_field(cls: type[Scheme]) -> str:
    """The first required field of a scheme, or else its first field."""
    return (*_required(cls), *inspect.signature(cls).parameters, "field")[0]


def _beside(name: str, parts: list[tuple[str, dict[str, Any]]], fields: dict[str, Any]) -> InvalidField:
    """The error for fields beside a string that has fields of its own, or several schemes, with the line to write."""
    given = f"{_spelled(fields)} with " + (
        "several schemes" if len(parts) > 1 else f"{name!r}, but fields are allowed with one plain name only"
    )
    makers: list[Any] = [FORMS.get(part) or _REGISTRY[part] for part, _ in parts]
    owners = [index for index, make in enumerate(makers) if fields.keys() <= inspect.signature(make).parameters.keys()]
    if not owners and len(parts) == 1:
        _build(parts[0][0], parts[0][1] | fields)  # refuses the field that it does not have
    if len(owners) != 1 or fields.keys() & parts[owners[0]][1].keys():
        return InvalidField(f"{given}: write it inside the name that it belongs to, 'NAME:{_inside(fields)}'")
    (owner,), spelled = owners, split_outside_brackets(name, "+")
    spelled[owner] = f"{parts[owner][0]}:{_inside(parts[owner][1] | fields)}"
    return InvalidField(f"{given}: write '{'+'.join(spelled)}'")


def with_fields(scheme: str, fields: dict[str, Any]) -> str:
    """Spell fields inside a typed scheme; of several schemes, `NAME` stands for the one that they belong to."""
    return f"NAME:{_inside(fields)}" if "+" in scheme else f"{scheme}{',' if ':' in scheme else ':'}{_inside(fields)}"


def _inside(fields: dict[str, Any]) -> str:
    return ",".join(f"{field}={value}" for field, value in fields.items())


def _makes_layers(scheme: Any) -> bool:
    """Whether a typed scheme has a field `layers`."""
    if not isinstance(scheme, str):
        return False
    with suppress(UnknownScheme):
        return "layers" in inspect.signature(FORMS.get(name := find_name(scheme, FORMS)) or _REGISTRY[name]).parameters
    return ":" in scheme and "layers" in scheme.partition(":")[0]


def _of_layers(schemes: list[Any], fields: dict[str, Any]) -> InvalidField:
    """The error for `layers=` beside a scheme, with the line to write for a scheme on some layers."""
    layers, others = fields["layers"], {name: value for name, value in fields.items() if name != "layers"}
    is_list = isinstance(layers, (list, tuple, range))
    selector = ",".join(map(str, layers)) if is_list else "0-2" if layers is None else str(layers)
    inner = "+".join(map(str, schemes))
    if others:
        inner += f":{_inside(others)}"
    return InvalidField(
        f"layers={layers!r} with {inner!r}: write 'layers:[{selector}={inner};rest=none]', which leaves the others as "
        f"they are, or PerLayer({{{selector!r}: {inner!r}, 'rest': None}})"
    )


def _misplaced(schemes: list[Any], fields: dict[str, Any]) -> InvalidField:
    """The error for fields beside several schemes, or beside a scheme object, with the line to write."""
    spelled, first = _spelled(fields), schemes[0]
    if len(schemes) > 1 or type(first) not in _REGISTRY.values():
        return InvalidField(
            f"{spelled} with several schemes: write it inside the name that it belongs to, 'NAME:{_inside(fields)}'"
        )
    suggestion = f"{first.name!r}, {spelled}"
    if "target" not in fields:
        declared = dataclasses.fields(first)
        own = {field.name: value for field in declared if (value := getattr(first, field.name)) != field.default}
        suggestion += f", or {type(first).__name__}({_spelled({**own, **fields})})"
    return InvalidField(f"{spelled} beside a scheme that has its fields already: write {suggestion}")


def _no_scheme(scheme: Any, fields: dict[str, Any]) -> UnknownScheme | InvalidField:
    """The error for something that is neither a name nor a scheme, with the line to write instead."""
    if scheme is None:
        find_name("none")
    if hasattr(scheme, "named_modules"):
        return UnknownScheme(f"a {type(scheme).__name__} is not a scheme; current_scheme(model) is the one that it has")
    if scheme not in _REGISTRY.values():
        return UnknownScheme(
            f"{scheme!r} is not a scheme; write a name such as 'yarn', or an object such as YaRN(factor=4)"
        )
    arguments = _spelled({**dict.fromkeys(_required(scheme), ...), **fields}).replace("Ellipsis", "...")
    by_name = ", ".join(filter(None, [repr(scheme.name), arguments]))
    return InvalidField(f"{scheme.__name__} is a class: write {scheme.__name__}({arguments}), or {by_name}")


def _spelled(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _aim(parts: list[tuple[str, dict[str, Any]]], target: Any) -> None:
    """Pass a target on to the parsed schemes that take one."""
    aimed = [fields for name, fields in parts if name not in FORMS and takes_target(scheme_class(name))]
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
    if call := _CALL.fullmatch(text):  # as in Python: rerope(window=512)
        text = f"{call[1]}:{call[2]}"
    if apart := _APART.fullmatch(text):
        with suppress(UnknownScheme):
            raise InvalidField(f"{text!r} is not a scheme: write '{find_name(apart[1], FORMS)}:{apart[2]}'")
    typed, _, rest = text.strip().partition(":")
    named, equals, value = typed.partition("=")
    if equals:
        with suppress(UnknownScheme):
            cls = _REGISTRY[find_name(named.strip())]
            raise InvalidField(f"{text!r} is not a scheme: write '{cls.name}:{_main_field(cls)}={value}'")
    name = find_name(typed.strip(), FORMS)
    if rest.startswith("[") and name in FORMS:
        return name, {"layers": rest}
    fields: dict[str, Any] = {}
    for item in filter(None, split_outside_brackets(rest)):
        key, equals, value = item.partition("=")
        if not equals:
            field, _, value = item.strip().rpartition(":")
            field = field or _main_field(FORMS.get(name) or _REGISTRY[name])  # type: ignore[arg-type]
            raise InvalidField(f"{item!r} in {text!r} is not of the form field=value, such as {field}={value}")
        if ":" in key:
            with suppress(UnknownScheme):
                other = find_name(key.partition(":")[0].strip(), FORMS)
                first, second = text.split(item)[0].rstrip(", "), item.strip()
                raise InvalidField(
                    f"{text!r} names {name} and {other}: write '{first}+{second}' for both together, and '{first}' or "
                    f"'{second}' for one of them"
                )
        if (field := key.strip()) in fields:
            raise InvalidField(f"{text!r} gives {field!r} twice; each field is allowed once")
        fields[field] = _value(value.strip())
    return name, fields


def split_outside_brackets(text: str, separator: str = ",") -> list[str]:
    """Split a text at every separator that stands outside of all brackets.

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
    """Parse a value: a Python literal, with the YAML spellings of true, false and null; a list, maybe of words; else a
    word.
    """
    if text.lower() in _CONSTANTS:
        return ast.literal_eval(_CONSTANTS[text.lower()])
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        listed = len(text) > 1 and text[0] == "[" and text[-1] == "]"
        return tuple(_value(item.strip()) for item in text[1:-1].split(",")) if listed and text[1:-1] else text
    return tuple(value) if isinstance(value, list) else value


def _build(name: Any, fields: dict[str, Any]) -> Scheme:
    """Build a scheme, or one of the `FORMS`, from its fields."""
    make: Any = FORMS[name] if isinstance(name, str) and name in FORMS else scheme_class(name)
    aims = isinstance(make, type) and takes_target(make)
    parameters = inspect.signature(make).parameters
    if isinstance(make, type) and "target" in fields and "target" not in parameters:
        return _reaching(make, {**fields})
    allowed = [*parameters, "target"] if aims else list(parameters)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for field, value in fields.items():
        if field not in parameters and not takes_any:
            meant = _FIELDS_MEANT.get(str(field).lower(), "")
            hint = f"did you mean {meant!r}? allowed: {', '.join(sorted(allowed))}" if meant in allowed else ""
            other = None if hint else _scheme_for(meant)
            elsewhere = f"; '{other.name}:{meant}={value}' sets the {meant}" if other else ""
            raise InvalidField(f"{name} has no field {field!r}; {hint or did_you_mean(str(field), allowed)}{elsewhere}")
        if value == "auto" and aims and field in filled_for(make, 1):
            raise InvalidField(
                f"{name}: {field}='auto' is not allowed; write target=8192, the length in tokens to reach, or "
                "target=auto where lengths are measured or it follows from the model alone"
            )
    if missing := [field for field in _required(make) if field not in fields]:
        example = "" if isinstance(make, type) else ", such as layers:[0-2=nope;rest=none]"
        line = f"{name}:{','.join(f'{field}=...' for field in missing)}"
        if isinstance(make, type):
            example = f": write {line!r}"
            if aims and filled_for(make, 1).keys() >= set(missing):
                example += f", or '{name}:target=4x' for four times the length"
        error = MissingField(f"{name} needs {', '.join(missing)}{example}; its fields are {', '.join(allowed)}")
        error.scheme, error.given = make, fields
        raise error
    return make(**{field: tuple(value) if isinstance(value, list) else value for field, value in fields.items()})


def _scheme_for(field: str) -> type[Scheme] | None:
    """The scheme whose only required field is the given one; None if no scheme or more than one has it."""
    found = [cls for cls in _REGISTRY.values() if _required(cls) == [field]]
    return found[0] if len(found) == 1 else None


def _required(make: Callable[..., Scheme]) -> list[str]:
    parameters = inspect.signature(make).parameters.values()
    return [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]


def _reaching(cls: type[Scheme], fields: dict[str, Any]) -> Scheme:
    target = plain_number(fields.pop("target"))
    target = target.lower() if isinstance(target, str) else target
    if not takes_target(cls):
        raise _means_nothing([cls.name], target)
    placeholder = _build(cls.name, {**filled_for(cls, target), **fields})  # refuses what is wrong in the other fields
    names = (field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
    return Reaching(placeholder, target, tuple(name for name in names if fields.get(name) is not None))
