"""Saving a patched model: adapters record the scheme, and one warning names the positions that plain libraries will
drop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from rope_patch.errors import warn
from rope_patch.models.adapter_record import renew_checksum, write_adapter_record
from rope_patch.models.record import RECORD, Record
from rope_patch.mounting.model_card import write_card
from rope_patch.mounting.parameters import NAME
from rope_patch.mounting.undo import Changes
from rope_patch.schemes.reach import spelled

OF_PROMPTS = "learned prompts in front of a patched model"
"""Beginning of the warning that PEFT saves learned prompts without the scheme."""

_OF_THE_BASE = "base_model."
"""The end of the prefix of weights in a model behind learned prompts; in one with adapters, `model.` follows."""


@dataclass
class Notice:
    """The record of a scheme for saved folders, and the warnings about it, each given once.

    Attributes:
        native: the scheme of the plain checkpoint, as text.
        is_native: whether the mounted scheme equals it.
        is_stated: whether plain Transformers reads the scheme from the config and the weights.
        warned: the classes of the objects that were saved with a warning.
    """

    record: Record
    native: str
    is_native: bool
    is_stated: bool
    warned: set[type] = field(default_factory=set)


class SaveModel:
    """The `save_pretrained` of a patched model, set as an attribute of the model."""

    def __init__(self, owner: Any, notice: Notice) -> None:
        self.owner = owner
        self.notice = notice
        self._before = vars(owner).get("save_pretrained")

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as the plain model would, record the scheme if the config does not, and warn."""
        for hook in getattr(self.owner, "_state_dict_pre_hooks", {}).values():
            if isinstance(hook, AdapterHook):  # Transformers saves the config of adapters before it collects weights
                hook(self.owner)
        save = self._before or type(self.owner).save_pretrained.__get__(self.owner)
        result = save(save_directory, *args, **kwargs)
        folder, is_main = Path(save_directory), kwargs.get("is_main_process", True)
        self._record(folder)
        if is_main and folder.is_dir() and self._is_whole() and not self.notice.is_native:
            write_card(folder, self.notice.record.scheme, self.notice.is_stated)
        lost = "" if self.notice.is_native else self._lost(str(save_directory))
        if lost and type(self) not in self.notice.warned and is_main:
            self.notice.warned.add(type(self))
            warn(lost, stacklevel=2)
        return result

    def restore(self) -> None:
        """Remove this attribute, even if the patch of another part has replaced it."""
        holder = vars(self.owner).get("save_pretrained")
        if holder is self and self._before is None:
            del self.owner.save_pretrained
        elif holder is self:
            self.owner.save_pretrained = self._before
        while isinstance(holder, SaveModel):
            if holder._before is self:
                holder._before = self._before
            holder = holder._before

    def _record(self, folder: Path) -> None:
        """Renew the checksum of adapters, whose record was written before their weights; a config already has its
        record.
        """
        renew_checksum(folder)

    def _is_whole(self) -> bool:
        """Whether everything that is saved has this scheme."""
        return _is_recorded(self.owner)

    def _lost(self, folder: str) -> str:
        """A sentence on the positions that a reader of the folder will lose; empty if it loses none."""
        if not self._is_whole():
            return _part_warning(self.notice, folder)
        if self.notice.is_stated or vars(self.owner).get("_hf_peft_config_loaded"):  # then only the adapters are saved
            return ""
        return (
            f"plain Transformers (AutoModel, pipeline) reads {folder} under {self.notice.native}, without "
            f"{spelled(self.notice.record.scheme)}; rope_patch.from_pretrained({folder!r}) reads it under the scheme"
        )


class SaveAdapters(SaveModel):
    """The `save_pretrained` of the config of adapters in or around a patched model, set as an attribute of that config.

    Args:
        owner, notice: the fields of `SaveModel`.
        model: the model that has the adapters. It is not kept, because PEFT copies the config.
    """

    def __init__(self, owner: Any, notice: Notice, model: PreTrainedModel) -> None:
        super().__init__(owner, notice)
        self._is_recorded = _is_recorded(model)
        saved = owner.to_dict().get("modules_to_save") or ()
        learned = (value for name, value in model.named_parameters() if f".{NAME}." in name)
        self._drops = NAME not in saved and any(value.requires_grad for value in learned)

    def _record(self, folder: Path) -> None:
        if self._is_recorded:
            write_adapter_record(folder, self.notice.record.scheme)

    def _is_whole(self) -> bool:
        return self._is_recorded

    def _lost(self, folder: str) -> str:
        if not self._is_recorded:
            return _part_warning(self.notice, folder)
        if self._drops:
            scheme = self.notice.record.scheme
            return f"{folder} lacks weights of {spelled(scheme)}: patch before PEFT, with modules_to_save=[{NAME!r}]"
        base = Path(self.owner.base_model_name_or_path or "", CONFIG_NAME)
        beneath = Record.read(json.loads(base.read_text(encoding="utf-8"))) if base.is_file() else None
        if self.notice.is_stated and beneath is not None and beneath.scheme == self.notice.record.scheme:
            return ""
        return (
            f"plain PEFT reads {folder} without {spelled(self.notice.record.scheme)}; "
            f"rope_patch.from_pretrained({folder!r}) patches the base checkpoint, too"
        )


class AdapterHook:
    """A hook before the weights of a model are collected, which lets the configs of its adapters record the scheme.

    PEFT saves adapters without a call to the model around which it was built, but it collects that model's weights.
    Learned prompts leave no trace in that model, so there is only a warning.
    """

    def __init__(self, notice: Notice, changes: Changes) -> None:
        self.notice = notice
        self.changes = changes

    def __call__(self, model: PreTrainedModel, prefix: str = "", *_: Any) -> None:
        self.find([model])
        if prefix.endswith(_OF_THE_BASE) and not _adapters(model) and AdapterHook not in self.notice.warned:
            self.notice.warned.add(AdapterHook)
            scheme = self.notice.record.scheme
            warn(
                f"{OF_PROMPTS} are saved without {spelled(scheme)}; rope_patch.save_pretrained(model, FOLDER) "
                "records it",
                stacklevel=2,
            )

    def find(self, models: Sequence[PreTrainedModel]) -> None:
        """Find the configs of new adapters. If models share a config, it records the scheme of this model."""
        for model, config in [(each, config) for each in models for config in _adapters(each)]:
            top = holder = vars(config).get("save_pretrained")
            while isinstance(holder, SaveModel) and holder.notice is not self.notice:
                holder = holder._before
            if not isinstance(holder, SaveModel):
                _replace(config, SaveAdapters(config, self.notice, model), self.changes)
            elif holder is not top:
                holder.restore()
                holder._before, config.save_pretrained = top, holder


def install_saving(models: Iterable[nn.Module], notice: Notice, changes: Changes) -> None:
    """Let Transformers models, and adapters in or around them, be saved as `notice` requires."""
    hook = AdapterHook(notice, changes)
    saved = [model for model in dict.fromkeys(models) if isinstance(model, PreTrainedModel)]
    for model in saved:
        _replace(model, SaveModel(model, notice), changes)
        changes.hook_saving(model, hook)
    hook.find(saved)


def _adapters(model: PreTrainedModel) -> list[Any]:
    """The config of each adapter in a model."""
    return [*(vars(model).get("peft_config") or {}).values()]


def _replace(owner: Any, save: SaveModel, changes: Changes) -> None:
    owner.save_pretrained = save
    changes.log(owner, save)


def _is_recorded(model: PreTrainedModel) -> bool:
    """Whether the config of a model records a scheme."""
    return vars(model.config).get(RECORD) is not None


def _part_warning(notice: Notice, folder: str) -> str:
    scheme = notice.record.scheme
    return f"{folder} does not record {spelled(scheme)}, which only a part of the model carries: patch that part again"
