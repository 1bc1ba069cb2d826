"""Register the native classes with the Auto classes of Transformers."""

from __future__ import annotations


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
