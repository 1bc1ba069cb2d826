"""The record of a scheme in the config of a checkpoint: the patch, and the values of the config before it.

The record is a dict under the key `rope_patch` of a config, so plain Transformers keeps and ignores it. Only this file
knows the form of the record.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from rope_patch.errors import InvalidField
from rope_patch.models.rope_entries import check_computable
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.registry import scheme_from_dict

RECORD = "rope_patch"
"""The key of the record in a config, and in the settings of adapters."""

NATIVE = ("rope_parameters", "max_position_embeddings")
"""Fields of a config that a patch may change; the record then has their earlier values."""


@dataclass(frozen=True)
class Record:
    """The record of a scheme under which a checkpoint was saved, with the fields that restore the checkpoint without
    it.

    Attributes:
        scheme: the only scheme, or the scheme of the largest factor.
        native: values of the fields `NATIVE` before the patch, if it may have changed them.
        left_alone: reasons by the index of each layer that does not run the scheme; empty if the config says the same.
        positions: number of rows of the replaced table of positions in the weights; None if the table is the original
            one.
        per_request: schemes by factor, from which a server chooses for each request, in ascending order.
    """

    scheme: Scheme
    native: Mapping[str, Any] = field(default_factory=dict)
    left_alone: Mapping[int, str] = field(default_factory=dict)
    positions: int | None = None
    per_request: Mapping[int, Scheme] = field(default_factory=dict)

    @classmethod
    def read(cls, config: Any) -> Record | None:
        """Read the record in a config, or in the config of its text model; None without one.

        Args:
            config: a config of Transformers, or the fields of a settings file.

        Raises:
            InvalidField: the record does not have this form; the message names the field, its value and what is
                allowed.
            UnknownScheme: the library does not know a scheme.
            UnsupportedModel: Transformers could not compute the native `rope_parameters`.
        """
        fields = config if isinstance(config, dict) else getattr(config, "__dict__", {})
        if (written := fields.get(RECORD)) is None:
            return cls.read(fields["text_config"]) if "text_config" in fields else None
        if not isinstance(written, dict):
            raise InvalidField(f"config.{RECORD}={written!r:.200} is not allowed; it must be a dict with a 'scheme'")
        for name, (allows, allowed) in _ALLOWED.items():
            if name in written and not allows(written[name]):
                raise InvalidField(f"`{RECORD}` has {name}={written[name]!r:.80}; it must be {allowed}")
        by_factor = {int(factor): scheme for factor, scheme in written.get("per_request", {}).items()}
        record = cls(
            scheme=scheme_from_dict(written.get("scheme", {})),
            native={name: written[name] for name in NATIVE if name in written},
            left_alone={int(index): reason for index, reason in written.get("left_alone", {}).items()},
            positions=written.get("positions"),
            per_request={factor: scheme_from_dict(by_factor[factor]) for factor in sorted(by_factor)},
        )
        if record.native and isinstance(config, PreTrainedConfig):
            text = config.get_text_config()
            others = {name: value for name, value in record.native.items() if value != getattr(text, name, None)}
            if "rope_parameters" in others:  # Transformers has read the config's own
                check_computable(_with(text, others))
        return record

    @classmethod
    def find(cls, model: Any) -> Record | None:
        """Find the record in the config of a model or of a module in it; None without one.

        Raises:
            InvalidField, UnknownScheme, UnsupportedModel: see `read`.
        """
        modules = model.modules() if isinstance(model, nn.Module) else ()
        configs = (vars(module).get("config") for module in modules)
        return next((record for record in map(cls.read, configs) if record is not None), None)

    def write(self, config: Any) -> None:
        """Write the record into a config, or into the fields of a settings file; `read` reads it back."""
        written = {"scheme": self.scheme.to_dict(), **copy.deepcopy(dict(self.native))}
        if self.left_alone:
            written["left_alone"] = {str(index): reason for index, reason in self.left_alone.items()}
        if self.positions is not None:
            written["positions"] = self.positions
        if self.per_request:
            written["per_request"] = {str(factor): scheme.to_dict() for factor, scheme in self.per_request.items()}
        fields = config if isinstance(config, dict) else vars(config)
        fields[RECORD] = written

    def is_stated(self, config: Any) -> bool:
        """Whether the `rope_parameters` of a text model's config express the scheme, so Transformers applies it."""
        own = getattr(config, "rope_parameters", None)
        return bool(self.native.get("rope_parameters", own) != own)

    def restore(self, config: Any) -> None:
        """Give the config of a text model the values from before the patch."""
        for name, value in self.native.items():
            setattr(config, name, copy.deepcopy(value))


def forget_record(config: Any) -> None:
    """Remove the record from a config and from the configs inside it."""
    vars(config).pop(RECORD, None)
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            forget_record(value)


def before_patch(config: Any) -> Any:
    """The config as it was before the patch, if it records a scheme; any other config is returned unchanged."""
    record = vars(config).get(RECORD)
    if not isinstance(record, dict):
        return config
    return _with(config, {name: record[name] for name in NATIVE if name in record})


def _with(config: Any, native: Mapping[str, Any]) -> Any:
    """Copy a config with other values of some fields; `setattr` could raise Transformers' own errors."""
    copied = copy.copy(config)
    vars(copied).update({copied.attribute_map.get(name, name): value for name, value in native.items()})
    return copied


def _has_numbers(value: Any, least: int) -> bool:
    return isinstance(value, dict) and all(str(key).isdecimal() and int(key) >= least for key in value)


_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_position_embeddings": (lambda value: type(value) is int and value >= 1, "a length in tokens"),
    "positions": (lambda value: type(value) is int and value >= 1, "a number of rows"),
    "left_alone": (lambda value: _has_numbers(value, 0), "a reason for each layer's index"),
    "per_request": (lambda value: _has_numbers(value, 1), "a scheme for each factor"),
}
"""The check on each field of the record, and the allowed values in words."""
