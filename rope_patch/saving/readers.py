"""The positions that programs compute from an exported config, according to `rope_patch.doctor`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.doctor import Reader, Reading, Report, Source, diagnose
from rope_patch.doctor.readers import READERS as ALL_READERS
from rope_patch.errors import InvalidField, NotExpressible, did_you_mean
from rope_patch.models.rope_parameters import entry_of, export_rope_parameters
from rope_patch.saving.spelling import new_words, older_words
from rope_patch.schemes.base import Scheme
from rope_patch.typing import NO_WEIGHTS, Weights

BY_KEY = {reader.key: reader for reader in ALL_READERS}

READERS = tuple(reader for reader in ALL_READERS if not reader.writes)
"""Programs that generate text from a folder; trainers are only available with `--for`."""

TRANSFORMERS, VLLM, LLAMA_CPP = (BY_KEY[key] for key in ("transformers", "vllm", "llama.cpp"))

SERVERS = ("config", VLLM.name, LLAMA_CPP.name)
"""Programs that may serve a scheme; `config` is any program that reads the `rope_parameters` of Transformers."""

ROUNDED = 2e-3
"""Relative error of a temperature that a program finds from a rounded length; it changes no answer."""


@dataclass(frozen=True)
class Support:
    """The answer whether a program computes the scheme from a folder. `reads` is `yes`, `partly` or `no`; `words` are
    its start options or the reason; `known` says how this was established (see `doctor.Reader`), and for which version.
    """

    name: str
    reads: str
    words: str
    known: str


def has_equal_lists(parameters: dict[str, Any]) -> bool:
    """Whether `rope_parameters` are lists of factors that are the same for short and long texts."""
    entry = entry_of(parameters)
    return bool(entry["rope_type"] == "longrope" and entry["short_factor"] == entry["long_factor"])


def readers_called(keys: Iterable[str]) -> tuple[Reader, ...]:
    """The readers with these names, from `--for`; all readers without a name.

    Raises:
        InvalidField: there is no such reader.
    """
    for key in keys:
        if key not in BY_KEY:
            raise InvalidField(f"there is no reader {key!r}; {did_you_mean(key, BY_KEY)}")
    return tuple(BY_KEY[key] for key in keys) or READERS


def supported(
    parameters: dict[str, Any],
    architectures: Any,
    length: int = 0,
    readers: Iterable[Reader] = READERS,
    fields: Mapping[str, Any] | None = None,
) -> tuple[Support, ...]:
    """Find out how each of some readers computes `rope_parameters`.

    Args:
        architectures: the `architectures` of the config.
        length: the context to serve, in tokens; default the factor times L of the parameters.
        fields: the fields of the written config; default these parameters in both spellings, in a model of Llama's
            kind.
    """
    readers = tuple(readers)
    if not readers:
        return ()
    if fields is None:
        fields = _in_both_spellings({}, parameters, length)
    source = Source(Path("config.json"), dict(fields), whole={**fields, "architectures": architectures})
    report = diagnose(source, [reader.key for reader in readers])
    return tuple(
        _support(reader, reading, report, length) for reader, reading in zip(readers, report.readings, strict=True)
    )


def _support(reader: Reader, reading: Reading, report: Report, length: int) -> Support:
    reads = {"agrees": "yes", "partly": "partly"}.get(reading.verdict, "no")
    if _differs_by_rounding(reading, report):
        reads = "yes"
    start = reader.start.format(length=length) or f"it takes {reader.takes}"
    reasons = "; ".join(reading.reasons)
    words = {"yes": start, "partly": f"{start}; {reasons}", "no": reasons}[reads]
    return Support(reader.name, reads, words, f"{reader.known}, {reader.version}")


def _differs_by_rounding(reading: Reading, report: Report) -> bool:
    """Whether a reader turns every pair as the config says, with a temperature that is off by a rounded length."""
    alike = all(
        reading.rotations[kind].axes() == rotation.axes()
        for kind, rotation in report.rotations.items()
        if kind in reading.rotations
    )
    return (
        reading.verdict == "differs"
        and reading.limit is None
        and alike
        and bool(reading.differences)
        and all(abs(each.temperature - 1) < ROUNDED and not any(each.angles.values()) for each in reading.differences)
    )


def _in_both_spellings(before: Mapping[str, Any], parameters: dict[str, Any], length: int) -> dict[str, Any]:
    """A config with these parameters in the fields of Transformers 5 and of older versions, with the fields that
    positions depend on.
    """
    entry = entry_of(parameters)
    trained = entry.get("original_max_position_embeddings") or before.get("max_position_embeddings") or 4096
    longest = length or round(trained * (entry.get("factor") or 1))
    width = 2 * len(entry.get("short_factor", ())) / entry.get("partial_rotary_factor", 1.0)
    sizes = {"model_type": "llama", "head_dim": round(width) or 128, **before}
    return {**new_words(sizes, parameters, trained, longest), **older_words(parameters)}


def parameters_for(
    readers: Iterable[Reader],
    scheme: Scheme,
    config: Any,
    architectures: Any,
    length: int,
    weights: Weights = NO_WEIGHTS,
) -> dict[str, Any]:
    """The `rope_parameters` of a scheme that most of the readers compute: its own type, or `equal_lists`. Lists state
    their temperature under every name for it.

    Args:
        readers: default all programs; then Transformers decides.
        config: config of the unpatched checkpoint; it stays unchanged.
        architectures: the `architectures` of the config.
        length: the context to serve, in tokens.
        weights: the argument of `export_rope_parameters`.

    Raises:
        NotExpressible: neither form expresses the scheme; the message has the reason of its own type.
    """
    forms, reasons = [], []
    for as_lists in (None, length):
        try:
            forms.append(export_rope_parameters(scheme, config, as_lists, weights))
        except NotExpressible as error:
            reasons.append(error)
    if not forms:
        raise reasons[0]
    if len(forms) == 2 and has_equal_lists(forms[0]):
        del forms[0]  # equal lists, but with a temperature that fewer programs read
    for form in forms:
        for entry in [form] if "rope_type" in form else filter(None, form.values()):
            if entry["rope_type"] == "longrope" and "attention_factor" in entry:  # vLLM and SGLang read the others
                entry |= dict.fromkeys(("short_mscale", "long_mscale"), entry["attention_factor"])
    readers, order, before = tuple(readers), ("yes", "partly", "no"), config.to_dict()
    written = [_in_both_spellings(before, form, length) for form in forms]
    rows = [
        supported(form, architectures, length, readers, fields) for form, fields in zip(forms, written, strict=True)
    ]
    worst = [sorted((order.index(row.reads) for row in each), reverse=True) for each in rows]
    return forms[worst.index(min(worst))]


def served_by(scheme: Scheme | None, config: Any) -> list[str]:
    """The names in `SERVERS` that can compute a scheme on a checkpoint, with "(partly)" after servers with limits. All
    servers serve the plain checkpoint, which is None.
    """
    if scheme is None:
        return list(SERVERS)
    try:
        check_own_code(config.name_or_path, {"model_type": config.model_type, **vars(config)})
        text = config.get_text_config()
        parameters = parameters_for((), scheme, text, config.architectures, text.max_position_embeddings)
    except NotExpressible:
        return []
    if entry_of(parameters)["rope_type"] == "dynamic":
        return []  # programs that read it disagree
    rows = zip(
        SERVERS, supported(parameters, config.architectures, readers=(TRANSFORMERS, VLLM, LLAMA_CPP)), strict=True
    )
    return [f"{name} (partly)" if row.reads == "partly" else name for name, row in rows if row.reads != "no"]


def check_own_code(folder: Any, fields: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that needs its own model code, by the fields of its config.

    Raises:
        NotExpressible: the checkpoint needs its own code.
    """
    kind = fields.get("model_type")
    if fields.get("auto_map") or kind == "baichuan":
        raise NotExpressible(
            f"{folder} needs its own code ({kind}), which may ignore rope_parameters; "
            "serve it in Transformers with rope_patch.from_pretrained"
        )


def refused_by_vllm(scheme: Scheme) -> str:
    """The part of a scheme that the vLLM plugin cannot compute from queries, keys and positions; empty if it can serve
    the whole scheme.
    """
    by_content = {"content_bias", "weight_factor", "relative_values", "running_bias"}
    refused = {
        "learned parameters": scheme.learns,
        "positions that are added at the input": "embedding" in scheme.slots,
        "content biases, and factors on weights": bool(scheme.methods & by_content),
    }
    return next((what for what, holds in refused.items() if holds), "")


def servers_of(scheme: Scheme, spelled: str) -> str:
    """A sentence, without its full stop, on the programs that serve a scheme that no config expresses."""
    if scheme.stateful or "running_bias" in scheme.methods:
        return "Only `generate` computes it: load it with rope_patch.from_pretrained"
    plugin = "" if refused_by_vllm(scheme) else ", and vLLM does with the plugin of this package (docs/how-to/serve.md)"
    return f"`rope-patch serve DIR --scheme {spelled}` serves it{plugin}"
