"""GGUF files as checkpoints: Transformers unpacks them; a file is refused if Transformers would ignore a part of it.

Transformers silently skips tensors and settings that it does not support. The skipped parts may be the positions
themselves: `rope_freqs.weight` of Llama 3.1, or `rope.scaling` of a file made for YaRN.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.utils import cached_file

from rope_patch.errors import NoCheckpoint, UnsupportedModel, require
from rope_patch.models.config import head_dim
from rope_patch.saving.hub import within_reach

_STATED = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Settings that Transformers reads from files of some architectures only, and their names in a config."""

_SCALED_BY_WIDTH = (46, 62)
"""Numbers of layers of Gemma 2 27B and Gemma 3 27B, whose heads are narrower than the scale of their scores assumes."""


def load_gguf(path: str | Path, **kwargs: Any) -> nn.Module:
    """Load the model of a GGUF file, with unpacked weights, in bfloat16 unless `dtype` is set.

    Args:
        **kwargs: for `from_pretrained` of Transformers; fields of the config replace those of the file.

    Raises:
        NoCheckpoint: the file is not a GGUF file, or is truncated.
        UnsupportedModel: Transformers would ignore a part of the file.
        MissingPackage: gguf is not installed.
    """
    metadata = _metadata(path)
    from gguf import GGUFReader
    from transformers import GgufConfig

    if kwargs.get("dtype") in (None, "auto"):
        kwargs["dtype"] = torch.bfloat16
    with _one_error(path):
        tensors = GGUFReader(path).tensors
    held, unpacked = sum(int(tensor.n_elements) for tensor in tensors), GgufConfig(dequantize=True)
    config = kwargs.pop("config", None) or _config_of(path, metadata, kwargs)
    model = AutoModelForCausalLM.from_pretrained(
        Path(path).parent, gguf_file=Path(path).name, config=config, quantization_config=unpacked, **kwargs
    )
    # tied weights count once
    expected = sum({each.data_ptr(): each.numel() for each in model.state_dict().values()}.values())
    if held != expected:
        positions = " (rope_freqs.weight among them)" * any("rope_freqs" in tensor.name for tensor in tensors)
        raise UnsupportedModel(
            f"{path} holds {held} weights{positions}, but {type(model).__name__} has {expected}: Transformers ignores "
            "a part of this file; use the checkpoint from which it was made"
        )
    vars(model.config).pop("_model_name_or_path", None)  # a title, not a path
    model.name_or_path = model.config.name_or_path = str(path)  # adapters refer to it
    return model


def find_gguf(path: str | Path, name: str, location: Mapping[str, Any]) -> Path:
    """The path of a GGUF file that you name as in Transformers, by its folder or Hub ID and its file name."""
    is_here = Path(path).exists()
    return Path(path, name) if is_here else Path(str(cached_file(path, name, **within_reach(path, location))))


def load_gguf_config(path: str | Path) -> Any:
    """Read the config from the settings of a GGUF file; for errors see `load_gguf`."""
    return _config_of(path, _metadata(path), {})


def load_gguf_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a GGUF file; for errors see `load_gguf`."""
    metadata = _metadata(path)
    tokenizer = AutoTokenizer.from_pretrained(Path(path).parent, gguf_file=Path(path).name)
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        # missing from Transformers' table: digits are split off first, so spaces before one belong together
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _metadata(path: str | Path) -> dict[str, Any]:
    require("gguf", f"{path}, a GGUF file,", "gguf")
    from transformers.integrations.gguf.reader import read_gguf_metadata

    with _one_error(path):
        return read_gguf_metadata(str(path))[0]


@contextmanager
def _one_error(path: str | Path) -> Iterator[None]:
    """Turn the errors of numpy and struct that a truncated file causes into `NoCheckpoint`."""
    try:
        yield
    except (IndexError, KeyError, ValueError, struct.error) as error:
        raise NoCheckpoint(f"{path} is not a GGUF file, or is truncated: {error}") from error


def _config_of(path: str | Path, metadata: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Build the config that a file states, with the fields among the `arguments`, which are removed from them."""
    config = AutoConfig.from_pretrained(Path(path).parent, gguf_file=Path(path).name)
    architecture = metadata["general.architecture"]
    stated = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    unread = _STATED.keys() & stated.keys() - GGUF_CONFIG_MAPPING.get(architecture, {}).keys()
    vars(config).update({_STATED[setting]: stated[setting] or None for setting in unread})
    parameters = getattr(config, "rope_parameters", None) or {}
    if (base := stated.get("rope.freq_base_swa")) and "sliding_attention" in parameters:
        parameters["sliding_attention"]["rope_theta"] = base
    if (pattern := stated.get("attention.sliding_window_pattern")) is not None:
        if isinstance(pattern, int):  # the last layer of each such group has full attention
            pattern = [(index + 1) % pattern != 0 for index in range(config.num_hidden_layers)]
        config.layer_types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    scalar, width = "query_pre_attn_scalar", head_dim(config)
    if getattr(config, scalar, None) not in (None, width) and scalar not in arguments:
        if config.num_hidden_layers not in _SCALED_BY_WIDTH:
            raise UnsupportedModel(
                f"{path} does not state {scalar}, and head_dim={width} is not that of a published "
                f"{architecture}; pass {scalar}=..., from the config of the checkpoint from which it was made"
            )
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    config.update({name: arguments.pop(name) for name in vars(config).keys() & arguments.keys() - {"dtype"}})
    kind = next((value for name, value in metadata.items() if name.endswith(".rope.scaling.type")), "none")
    parameters = getattr(config, "rope_parameters", None) or {}
    if kind != "none" and parameters.get("rope_type", "default") == "default":
        raise UnsupportedModel(
            f"{path} has rope scaling {kind!r}, which Transformers does not read from a GGUF file; use the checkpoint "
            "from which it was made"
        )
    return config
