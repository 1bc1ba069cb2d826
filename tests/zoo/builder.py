"""A small random model of any model type of Transformers that reads text."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.families import FAMILIES, GENERIC, TRAINING_LENGTH, VOCABULARY

AUTO = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForMaskedLM, AutoModelForImageTextToText, AutoModel)
"""The first that knows a config makes the model."""

SPECIAL = yaml.safe_load((Path(__file__).parent / "special.yaml").read_text(encoding="utf-8"))
"""Values of single model types, on top of those that all share."""

WORDS = 80
"""Token ids from here on are images, ends and the like."""

SHORT = TRAINING_LENGTH - 4
"""Tokens of a text that fits into a table of positions."""

_LARGEST = 70_000_000
_WHOLE = {key: value for key, value in GENERIC.items() if value is not None}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BASES = (
    {**GENERIC, "head_dim": 16},
    GENERIC,
    _WHOLE,
    {key: value for key, value in _WHOLE.items() if not key.endswith("head_dim")},
    {**_WHOLE, "is_decoder": True, "num_experts_per_tok": 1},
    *(
        {**GENERIC, "head_dim": 16, "rope_parameters": {**_ROPE, "mrope_section": sections}}
        for sections in ([4, 2, 2], [2, 1, 1])
    ),
    {key: GENERIC[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")},
    {"vocab_size": VOCABULARY},
)
"""Values for a text model, of which most config classes can make a small one; one after the other is tried."""

# by the end of a name, in any part of a config
_SIZES = [
    (re.compile(rf"(?:^|.*_)(?:{names})$"), size)
    for names, size in (
        (r"hidden_size_per_layer_input|index_head_dim|index_topk|laurel_rank|d_state|state_size", 16),
        (r"vocab_size(_per_layer_input)?|group_vocab", VOCABULARY),
        (r"hidden_size|d_model|n_embd|embed_dim|emb_dim|embedding_size|embedding_dim|hidden_dim", 64),
        (r"projection_dim|output_dim|proj_dim|adapter_out_dim|projection_size|hidden_size_global", 64),
        (r"condition_dim|adapter_in_dim|adapter_input_size|upsample_groups", 64),
        (r"intermediate_size|ffn_dim|d_ff|ffn_hidden_size|mlp_dim|ffn_size|linear_units|d_inner", 96),
        (r"hidden_layers|n_layers?|num_layers|depth|coder_layers|layers|num_blocks", 2),
        (r"attention_heads|num_heads|n_heads?|key_value_heads|kv_heads|index_n_heads", 4),
    )
]
_KEPT = re.compile(r".*(feat_extract|kv_shared)_layers$")
_OF_FAMILIES = {
    values["model_type"]: {key: value for key, value in values.items() if key != "model_type"}
    for name, values in reversed(FAMILIES.items())
}
_TOKEN = re.compile(r".*token_(id|index)$")


class NotBuilt(Exception):
    """No small model came out, and the reason of the last attempt."""


@dataclass(frozen=True)
class Specimen:
    """A small model of one type, with outputs of order one.

    Attributes:
        is_part: whether it is the text model alone of a larger one.
        reads_text: whether token ids are all that it needs.
    """

    model: PreTrainedModel
    is_part: bool
    reads_text: bool = True

    def fresh(self) -> PreTrainedModel:
        """A copy."""
        return copy.deepcopy(self.model)

    def again(self, config: PreTrainedConfig, implementation: str | None = None) -> PreTrainedModel:
        """A model of the same class, with the same weights and with another config."""
        implementation = implementation or self.model.config._attn_implementation
        model = type(self.model)._from_config(copy.deepcopy(config), attn_implementation=implementation)
        model.load_state_dict(self.model.state_dict(), strict=False)  # a tower may lack its pooler
        return model.eval()


def model_types() -> list[str]:
    """Those that an Auto class knows and whose config, or a part of it, has a vocabulary."""
    known = {config.model_type for auto in AUTO for config in auto._model_mapping.keys()}  # noqa: SIM118
    return sorted(name for name in known if name in CONFIG_MAPPING and _reads_text(name))


def _reads_text(model_type: str) -> bool:
    try:
        return 'vocab_size"' in json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str)
    except Exception:  # a config that needs its parts
        return True


def text(rows: int = 1, length: int = TRAINING_LENGTH + 8, seed: int = 0) -> torch.Tensor:
    """Random token ids, `(rows, length)`, none of which is special."""
    return torch.randint(1, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(model: PreTrainedModel, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The logits, or the last hidden states, `(rows, length, width)`."""
    return outputs(model, ids, **{"use_cache": False, **inputs})[0]


@torch.no_grad()
def outputs(model: PreTrainedModel, ids: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, Any]:
    """Logits or last hidden states, and the cache."""
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"], ids = ids, text(seed=1).expand(len(ids), -1)
    if model.config.is_encoder_decoder and "attention_mask" in inputs:
        inputs["decoder_attention_mask"] = inputs.pop("attention_mask")
    if not hasattr(model.config, "use_cache") and not hasattr(model.config.get_text_config(), "use_cache"):
        inputs.pop("use_cache", None)
    found = model(input_ids=ids, **inputs)
    states = found.get("logits", found.get("last_hidden_state"))
    return found[0] if states is None else states, found.get("past_key_values")


def specimen(model_type: str) -> Specimen:
    """A small model of a type: the whole one; or else its text model, or a part of it, alone; or else one that reads
    more than text.

    Raises:
        NotBuilt: none came out of the config; the message names the reason.
    """
    reasons: list[str] = []
    unread: list[Specimen] = []
    for is_part, base in itertools.product((False, True), _BASES):
        try:
            config = _config(model_type, base)
            if is_part and config.get_text_config() is config:
                break
            found = Specimen(_model(config.get_text_config() if is_part else config), is_part)
            unread.append(found)
            _read(found.model)
        except Exception as error:  # every class has requirements of its own
            message = re.sub(r"/\S*/site-packages/", "", " ".join(str(error).split()))  # no paths of this machine
            reasons.append(f"{type(error).__name__}: {message}")
        else:
            return found
    for module in unread[0].model.modules() if unread else ():
        if isinstance(module, PreTrainedModel) and module is not unread[0].model:
            with contextlib.suppress(Exception):
                _read(module)
                return Specimen(module, True)
    if unread:
        return dataclasses.replace(unread[0], reads_text=False)
    raise NotBuilt(reasons[0])


def _read(model: PreTrainedModel) -> None:
    if not torch.equal(*(run(model, text(length=SHORT)) for _ in range(2))):
        raise NotBuilt("two runs differ")


def _config(model_type: str, base: dict[str, Any]) -> PreTrainedConfig:
    cls, special = CONFIG_MAPPING[model_type], SPECIAL.get(model_type) or {}
    try:
        default = cls()
    except Exception:  # a config that needs its parts
        default = cls(**{key: copy.deepcopy(special[key]) for key in special.keys() & cls.sub_configs.keys()})
    return _small(default, base, special)


def _small(default: PreTrainedConfig, base: dict[str, Any], special: dict[str, Any]) -> PreTrainedConfig:
    """A config of the same class with all its parts small."""
    values: dict[str, Any] = {}
    base = _OF_FAMILIES.get(default.model_type, base)
    ids, number = itertools.count(WORDS), getattr(default, "num_hidden_layers", None)
    for key, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            values[key] = _small(value, base, special.get(key) or SPECIAL.get(value.model_type) or {})
        elif type(value) is int and _TOKEN.match(key) and value >= WORDS:
            values[key] = min(next(ids), VOCABULARY - 1)
        elif type(value) is int and value > 4 and not _KEPT.match(key):
            size = _size_of(key)
            if size is not None:
                values[key] = min(size, value)
        elif isinstance(value, list) and value and len(value) == number and default.model_type not in _OF_FAMILIES:
            kinds = [kind for i, kind in enumerate(value) if kind not in value[:i]]  # of layers: each of them, in turn
            few = base.get("num_hidden_layers", 2) if hasattr(default, "vocab_size") else 2
            values[key] = (kinds * few)[:few]
            if "sliding_attention" in kinds:
                values["sliding_window"] = TRAINING_LENGTH // 2
    if hasattr(default, "vocab_size"):
        values |= copy.deepcopy(base)
    special = {key: value for key, value in special.items() if not isinstance(values.get(key), PreTrainedConfig)}
    return type(default)(**{**values, **copy.deepcopy(special)})


def _size_of(key: str) -> int | None:
    return next((size for pattern, size in _SIZES if pattern.match(key)), None)


def _model(config: PreTrainedConfig) -> PreTrainedModel:
    auto = next((auto for auto in AUTO if type(config) in auto._model_mapping), AutoModel)
    with torch.device("meta"):
        size = auto.from_config(copy.deepcopy(config)).num_parameters()
    if size > _LARGEST:
        raise NotBuilt(f"{size / 1e6:,.0f} million parameters are left, in parts with sizes of their own")
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    _vary(model)
    return model


@torch.no_grad()
def _vary(model: PreTrainedModel) -> None:
    """Random weights under which outputs are of order one and depend on positions as in a trained model."""
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    with contextlib.suppress(NotImplementedError, AttributeError):  # of models that read no text
        model.get_input_embeddings().weight.normal_()
    for name, parameter in model.named_parameters():
        if name in linear or (parameter.ndim == 3 and "expert" in name):
            sharp = 2 if re.search(r"(^|[._])(q|k|qkv|query|key|q_b|kv_a|q_a|kv_b|wqkv)(_|\.|$)", name) else 1
            parameter.normal_(std=sharp * parameter.shape[-1] ** -0.5)
        elif "norm" in name:  # Gemma's norms multiply by one plus their weight
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif name.endswith("bias"):
            parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        if getattr(module, "scaling", None) == 1:  # as in T5, whose scores would be of order a hundred
            for name in {"q", "q_proj"} & dict(module.named_children()).keys():
                module.get_submodule(name).weight.mul_(0.2)
