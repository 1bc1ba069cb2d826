"""Baichuan and Baichuan 2 as native models of Transformers 5, for the published checkpoint folders.

Importing this package registers nothing and imports no class; call `register_baichuan()` for that.
"""

from __future__ import annotations

from torch import nn

__all__ = ["published_remote_code", "register_baichuan"]

_REMOTE = "transformers_modules."


def register_baichuan() -> None:
    """Let `AutoConfig`, `AutoModel`, `AutoModelForCausalLM` and `AutoTokenizer` load Baichuan's folders natively.

    You may call it more than once. Afterwards the remote code in a checkpoint's `auto_map` never runs, not even with
    `trust_remote_code=True`.
    """
    # imported here, so that importing the library loads none of it
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES

    from rope_patch.models.baichuan.configuration import BaichuanConfig
    from rope_patch.models.baichuan.modeling import BaiChuanForCausalLM, BaichuanForCausalLM, BaichuanModel
    from rope_patch.models.baichuan.tokenization import BaiChuanTokenizer, BaichuanTokenizer

    AutoConfig.register(BaichuanConfig.model_type, BaichuanConfig, exist_ok=True)
    AutoModel.register(BaichuanConfig, BaichuanModel, exist_ok=True)
    # Transformers picks the class in the config's `architectures`, or the first one
    AutoModelForCausalLM.register(BaichuanConfig, (BaichuanForCausalLM, BaiChuanForCausalLM), exist_ok=True)
    # by name, not by config class: otherwise AutoTokenizer prefers the code in the checkpoint folder
    for tokenizer in (BaichuanTokenizer, BaiChuanTokenizer):
        REGISTERED_TOKENIZER_CLASSES[tokenizer.__name__] = tokenizer


def published_remote_code(module: nn.Module) -> str | None:
    """Advice for a model that runs the code of 2023 in Baichuan's checkpoint folders.

    That code reads positions from its own tables, outside the attention interface of Transformers, so no scheme can be
    mounted on it, whether it is all of `module` or a part. None for any other model.
    """
    for part in module.modules():
        cls = type(part)
        if cls.__module__.startswith(_REMOTE) and "modeling_baichuan" in cls.__module__ and hasattr(part, "W_pack"):
            return (
                f"{type(module).__name__} runs Baichuan's published remote code ({cls.__module__}), whose attention "
                "bypasses Transformers; load the same folder with rope_patch.from_pretrained(path), or call "
                "register_baichuan() and omit trust_remote_code=True"
            )
    return None
