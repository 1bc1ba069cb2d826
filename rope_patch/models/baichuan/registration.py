"""Making the Auto classes of Transformers take the native classes."""

from __future__ import annotations


def register_baichuan() -> None:
    """Let `AutoConfig`, `AutoModel`, `AutoModelForCausalLM` and `AutoTokenizer` load Baichuan's folders natively.

    May be called any number of times. From then on the code beside a checkpoint, which its `auto_map` names, is never
    run, not even under `trust_remote_code=True`.
    """
    # imported here, so that importing the library touches none of it
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES

    from rope_patch.models.baichuan.configuration import BaichuanConfig
    from rope_patch.models.baichuan.modeling import BaiChuanForCausalLM, BaichuanForCausalLM, BaichuanModel
    from rope_patch.models.baichuan.tokenization import BaiChuanTokenizer, BaichuanTokenizer

    AutoConfig.register(BaichuanConfig.model_type, BaichuanConfig, exist_ok=True)
    AutoModel.register(BaichuanConfig, BaichuanModel, exist_ok=True)
    # Transformers picks the one that the config's `architectures` names, and the first where there is none
    AutoModelForCausalLM.register(BaichuanConfig, (BaichuanForCausalLM, BaiChuanForCausalLM), exist_ok=True)
    # by name and not by config class: only so does AutoTokenizer prefer it to the code beside the checkpoint
    for tokenizer in (BaichuanTokenizer, BaiChuanTokenizer):
        REGISTERED_TOKENIZER_CLASSES[tokenizer.__name__] = tokenizer
