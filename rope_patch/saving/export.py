"""Export a checkpoint folder whose config expresses its scheme for other programs.

docs/serving.md lists the fields that each program reads, with its source files.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers.utils import CONFIG_NAME

from rope_patch.doctor import Reader
from rope_patch.errors import AlreadyPatched, NotExpressible, UnsupportedModel, did_you_mean
from rope_patch.models.config import checkpoint_of_config, training_length
from rope_patch.models.record import NATIVE, RECORD, Record
from rope_patch.models.rope_parameters import entry_of, export_rope_parameters, stated_length
from rope_patch.mounting.model_card import CARD, copy_without_section
from rope_patch.saving.checkpoint_kind import read_config
from rope_patch.saving.loading import load_config
from rope_patch.saving.own_files import check_weights, own_file
from rope_patch.saving.readers import (
    Support,
    check_own_code,
    has_equal_lists,
    parameters_for,
    readers_called,
    servers_of,
    supported,
)
from rope_patch.saving.spelling import new_words, older_words
from rope_patch.saving.trained import copy_without_learned, trained_weights
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.reach import shortened
from rope_patch.schemes.registry import get_scheme, list_schemes, scheme_class
from rope_patch.schemes.slots import Checkpoint
from rope_patch.schemes.target import reached
from rope_patch.typing import NO_WEIGHTS, Weights

_OF_TRAINING = ("optimizer", "scheduler", "rng_state", "trainer_state", "training_args", "scaler")
"""Prefixes of a trainer's files, which no reader needs."""


@dataclass(frozen=True)
class Serving:
    """The contents of an exported folder.

    Attributes:
        length: the context length of the folder in tokens; its `max_position_embeddings`.
        config: all of config.json.
        changed: keys that differ from the checkpoint's, with their new values; None for removed keys.
        output: the folder; None if it was not written.
        warning: the warning that the scheme reaches less far than the checkpoint does today; empty if it reaches as
            far.
    """

    scheme: Scheme
    training_length: int
    length: int
    config: dict[str, Any]
    changed: dict[str, Any]
    readers: tuple[Support, ...]
    output: Path | None = None
    warning: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict for JSON, without unchanged keys."""
        return {
            "scheme": str(self.scheme),
            "training_length": self.training_length,
            "length": self.length,
            "config": self.changed,
            "readers": {reader.name: dataclasses.asdict(reader) for reader in self.readers},
            "output": None if self.output is None else str(self.output),
            "warning": self.warning,
        }


def describe_serving(
    checkpoint: str | Path,
    scheme: str | Scheme | None = None,
    length: int | None = None,
    readers: Iterable[str] = (),
    by_factor: Mapping[int, Scheme] | None = None,
) -> Serving:
    """Describe the folder that `export_checkpoint` would write.

    Args:
        checkpoint: a folder with a `config.json`.
        scheme: default the scheme under which the checkpoint was saved.
        length: the context to serve, in tokens; default the scheme's factor times L.
        readers: programs for which the config is written, by `Reader.key`. A scheme is written as its own `rope_type`.
            If it has none, or if more of these programs compute lists, it is written as `equal_lists` of the type
            `longrope`.
        by_factor: a scheme for each factor instead of one scheme, see `serving.factors`. The config records them for
            servers that choose by request. For other readers it describes the scheme of the largest factor, or the
            plain checkpoint if it cannot express that scheme.

    Raises:
        NotExpressible: a config cannot express the scheme, at least not for this checkpoint; the message names the
            reason.
        AlreadyPatched: the checkpoint was saved under another scheme.
        UnknownScheme, InvalidField: the scheme is invalid.
        NoCheckpoint: there is no model in the folder, or its config cannot be read.
        UnsupportedModel: the library does not know the checkpoint's own `rope_type`.
    """
    check_length(length)
    folder = Path(checkpoint)
    raw = read_config(folder)
    check_own_code(folder, raw)
    config = load_config(folder)
    nested = not getattr(config, "rope_parameters", None) and isinstance(raw.get("text_config"), dict)
    text = config.text_config if nested else config
    record = Record.read(raw)
    by_factor = by_factor or {}
    chosen = _scheme(folder, by_factor[max(by_factor)] if by_factor else scheme, record)
    spelled = scheme if isinstance(scheme, str) else str(chosen)
    if record is not None:
        record.restore(text)
    facts = checkpoint_of_config(text)
    _check_known(facts, spelled, text)
    chosen = reached(chosen, [facts])
    trained = training_length(text)
    chosen_readers, architectures = readers_called(readers), raw.get("architectures")
    extended = extended_length(chosen, text)
    if by_factor:
        extended = max(by_factor) * facts.max_length
    served = length or extended or trained
    weights = trained_weights(folder, chosen) if record and chosen.learned_frequencies else NO_WEIGHTS
    try:
        parameters = _parameters(
            chosen, spelled, text, chosen_readers if readers else (), architectures, served, weights
        )
    except NotExpressible:
        if not by_factor:
            raise
        parameters, chosen_readers = text.rope_parameters, ()
    length = _length(spelled, parameters, extended, length)
    before = raw["text_config"] if nested else raw
    fields = _written(before, type(text), parameters, trained, length)
    changed = {key: fields.get(key) for key in {**before, **fields} if before.get(key) != fields.get(key)}
    written = {**raw, "text_config": fields} if nested else fields
    written.pop(RECORD, None)
    support = supported(parameters, architectures, length, chosen_readers, fields)
    if by_factor:
        native = {name: getattr(text, name) for name in NATIVE}
        Record(chosen, native, per_request=by_factor).write(written)
    changed = {"text_config": changed} if nested else changed
    return Serving(chosen, trained, length, written, changed, support, warning=shortened(chosen, facts))


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    scheme: str | Scheme | None = None,
    *,
    length: int | None = None,
    readers: Iterable[str] = (),
    link: bool = False,
    by_factor: Mapping[int, Scheme] | None = None,
) -> Serving:
    """Write a copy of a checkpoint folder whose config contains the scheme. Readers do not need `rope_patch`.

    Weights, tokenizer and all other files at the top of the folder are copied unchanged, except a trainer's files.
    Learned parameters of a scheme are left out of the weights: learned frequencies that all layers share become lists
    in the config. Subfolders are not copied, except `additional_chat_templates`. Links are followed only within the
    folder and the Hub's cache of it. The output folder appears atomically, when it is complete.

    Args:
        checkpoint, scheme, length, readers, by_factor: see `describe_serving`.
        output: a new or empty folder.
        link: use hard links instead of copies, for an output on the same disk; a change to a linked file also changes
            the checkpoint's.

    Raises:
        OSError: a file cannot be read or written, `output` is not empty, or a link cannot be created.
        NoCheckpoint: see `describe_serving`, or a file or an index of weights leads out of the folder.
        NotExpressible, AlreadyPatched, UnknownScheme, InvalidField: see `describe_serving`; nothing is written then.
    """
    folder, target = Path(checkpoint), Path(output)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(errno.EEXIST, "it already exists; choose another output, or remove it", str(target))
    files = _files(folder) if folder.is_dir() else {}  # without a folder, `describe_serving` names the reason
    serving = describe_serving(folder, scheme, length, readers, by_factor)
    check_weights(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as aside:
        unfinished = Path(aside) / target.name
        unfinished.mkdir()
        for file, content in files.items():
            copied = unfinished / file.relative_to(folder)
            copied.parent.mkdir(exist_ok=True)
            if file.name == CONFIG_NAME or (RECORD not in serving.config and copy_without_learned(file, copied)):
                continue
            if file.name == CARD and copy_without_section(content, copied):
                continue
            (os.link if link else shutil.copy2)(content, copied)
        config = json.dumps(serving.config, indent=2, sort_keys=True)
        (unfinished / CONFIG_NAME).write_text(config + "\n", encoding="utf-8")
        unfinished.replace(target)
    return dataclasses.replace(serving, output=target)


def _scheme(folder: Path, requested: str | Scheme | None, record: Record | None) -> Scheme:
    saved = None if record is None else record.scheme
    if requested is None:
        if saved is None:
            raise NotExpressible(
                f"{folder} was not saved under a scheme; name the one to export, such as --scheme yarn:factor=4"
            )
        return saved
    scheme = requested if isinstance(requested, Scheme) else get_scheme(requested)
    if saved is not None and saved != scheme:
        raise AlreadyPatched(
            f"{folder} was saved under {saved}, not {scheme}; omit the scheme to export {saved}, or load the folder "
            "with rope_patch.from_pretrained, unpatch and save it before you export another"
        )
    return scheme


def _check_known(checkpoint: Checkpoint, spelled: str, config: Any) -> None:
    """Refuse a checkpoint whose own scaling is unknown, because the length that it reads is then unknown.

    Raises:
        UnsupportedModel: the type is unknown; the message names it, and the known types.
    """
    if checkpoint.native is None:
        kind = entry_of(config.rope_parameters).get("rope_type")
        known = {cls.rope_type for cls in map(scheme_class, list_schemes()) if cls.rope_type}
        raise UnsupportedModel(
            f"{type(config).__name__}: rope_type={kind!r} is not known here, so {spelled} cannot be derived from it; "
            f"{did_you_mean(str(kind), known)}"
        )


def check_length(length: int | None) -> None:
    """Refuse a length below 1.

    Raises:
        NotExpressible: the length is below 1.
    """
    if length is not None and length < 1:
        raise NotExpressible(f"length={length} is not allowed; it must be a number of tokens, at least 1")


def extended_length(scheme: Scheme, config: Any) -> int | None:
    """The context of a checkpoint under a scheme, in tokens: factor times L; None if the scheme has no factor."""
    factors = [part.factor for part in scheme.parts() if getattr(part, "factor", None)]  # type: ignore[attr-defined]
    try:
        return stated_length(scheme, export_rope_parameters(scheme, config), config)
    except NotExpressible:
        return round(factors[0] * training_length(config)) if factors else None


def _parameters(
    scheme: Scheme,
    spelled: str,
    config: Any,
    readers: Iterable[Reader],
    architectures: Any,
    length: int,
    weights: Weights,
) -> dict[str, Any]:
    try:
        parameters = parameters_for(readers, scheme, config, architectures, length, weights)
    except NotExpressible as error:
        raise NotExpressible(
            f"{spelled} cannot be written into a config: {error}. {servers_of(scheme, spelled)}; a config holds "
            "static frequencies, such as yarn:factor=4"
        ) from error
    if entry_of(parameters)["rope_type"] == "dynamic":
        factor = entry_of(parameters)["factor"]
        growth = "l / L" if factor == 1 else f"{factor:g} l / L - {factor - 1:g}"
        raise NotExpressible(
            f"{spelled} cannot be written into a config, because its readers disagree: Transformers keeps the largest "
            "base that any text needed, SGLang uses one base for the longest text, vLLM and llama.cpp its own. "
            f"Export ntk:factor=k with k = {growth} instead, the base for l tokens. {servers_of(scheme, spelled)}"
        )
    return parameters


def _length(spelled: str, parameters: dict[str, Any], extended: int | None, requested: int | None) -> int:
    if requested is None and extended is None:
        raise NotExpressible(f"{spelled} does not define a context length; set a length in tokens")
    entry = entry_of(parameters)
    grows = entry["rope_type"] == "longrope" and not has_equal_lists(parameters)
    if requested not in (None, extended) and (grows or entry["rope_type"] == "yarn"):
        raise NotExpressible(
            f"length={requested} with {spelled}: some readers compute the factor as length / L, so the length must be "
            f"factor times L, {extended}; change the factor instead"
        )
    return cast(int, requested or extended)


def _written(raw: dict[str, Any], kind: Any, parameters: dict[str, Any], trained: int, length: int) -> dict[str, Any]:
    """The fields that config.json gets for the text model."""
    written = new_words(raw, parameters, trained, length)
    if older := older_words(parameters):
        both = {**written, **older}
        if _reads_as(kind, both, parameters):
            return both
    if not _reads_as(kind, written, parameters):
        raise NotExpressible(f"{kind.__name__} does not read rope_parameters={parameters} as they are")
    return written


def _reads_as(kind: Any, written: dict[str, Any], parameters: dict[str, Any]) -> bool:
    """Whether the installed Transformers reads the intended parameters back."""
    read = kind.from_dict(copy.deepcopy(written)).rope_parameters
    return {key: value for key, value in read.items() if key != "type"} == parameters


def _files(folder: Path) -> dict[Path, Path]:
    """The files of a checkpoint that a copy also has, each with the path of its content.

    Raises:
        NoCheckpoint: the content of a file lies outside the checkpoint.
    """
    templates = folder / "additional_chat_templates"
    entries = [*folder.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]
    return {
        entry: own_file(entry, folder)
        for entry in sorted(entries)
        if not entry.is_dir() and not entry.name.startswith((".", *_OF_TRAINING))
    }
