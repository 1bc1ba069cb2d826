"""The config of all Baichuan models, with the field names as published."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from rope_patch.errors import InvalidField, did_you_mean

POSITION_KINDS = ("rope", "alibi")

TRAINING_LENGTH = 4096  # the length of every published checkpoint, for a config without one

_ROTARY_ARCHITECTURE = "BaiChuanForCausalLM"
_ROTARY_HIDDEN_SIZE = 4096
_NORM_HEAD_VOCABULARY = 125696
_LEFT_OUT = {  # values that are not written to files, because published configs do not contain them
    **dict.fromkeys(("max_position_embeddings", "model_max_length", "normalize_lm_head", "position_embedding_type")),
    "fused_qkv": False,
}


class BaichuanConfig(PreTrainedConfig):
    """The config of Baichuan-7B (RoPE), Baichuan-13B (ALiBi) and Baichuan 2 (either, with a normalised head), base and
    chat.

    Args:
        position_embedding_type: `rope` or `alibi`. The default follows the published configs: RoPE if the architecture
            is `BaiChuanForCausalLM`, `max_position_embeddings` is set, or `hidden_size` is 4096; else ALiBi.
        max_position_embeddings: training length in tokens of the RoPE kind.
        model_max_length: training length in tokens of the ALiBi kind; also allowed in a RoPE config.
        normalize_lm_head: whether the head multiplies by rows of length one. Default: True if the vocabulary has the
            125696 entries of Baichuan 2.
        z_loss_weight: weight of the mean squared largest logit in the loss.
        gradient_checkpointing: `[false]` in published configs, which is ignored.
        fused_qkv: keep `W_pack` as one module instead of `q_proj`, `k_proj` and `v_proj`; files are the same either
            way.
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, hidden_act: as in
            `LlamaConfig`.
        initializer_range, rms_norm_eps, use_cache, tie_word_embeddings, rope_parameters: as in `LlamaConfig`.
        pad_token_id, bos_token_id, eos_token_id: as in `LlamaConfig`; 0, 1 and 2 by default.

    Raises:
        InvalidField: the position kind is unknown.
    """

    model_type = "baichuan"
    keys_to_ignore_at_inference = ("cache", "past_key_values")
    attribute_map = {"num_key_value_heads": "num_attention_heads"}  # noqa: RUF012  # every head has its own keys

    # Llama's parts read these; no Baichuan has them
    attention_bias = False
    mlp_bias = False
    attention_dropout = 0.0
    # the class that AutoTokenizer uses for a folder that names none
    tokenizer_class = "BaichuanTokenizer"

    vocab_size: int = 64000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    hidden_act: str = "silu"
    max_position_embeddings: int | None = None
    model_max_length: int | None = None
    position_embedding_type: str | None = None
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    normalize_lm_head: bool | None = None
    z_loss_weight: float = 0.0
    gradient_checkpointing: Any = False
    rope_parameters: dict[str, Any] | None = None
    fused_qkv: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        kind = self.position_embedding_type
        if kind not in (None, *POSITION_KINDS):
            raise InvalidField(f"position_embedding_type {kind!r}: {did_you_mean(str(kind), POSITION_KINDS)}")
        self.architectures: list[str] = self.architectures or []  # AutoModelForCausalLM iterates over them
        rotary = not self.uses_alibi
        if rotary and self.max_position_embeddings is None:
            # set explicitly, so that a saved config shows the kind whatever its architecture
            self.max_position_embeddings = self.model_max_length or TRAINING_LENGTH
        if not rotary and self.model_max_length is None:
            self.model_max_length = self.max_position_embeddings or TRAINING_LENGTH
        if self.normalizes_head:
            self.normalize_lm_head = True  # also when the vocabulary is resized
        super().__post_init__(**kwargs)
        if not rotary:
            self.rope_parameters = None  # also written to files: vLLM reads them from every Baichuan

    @property
    def uses_alibi(self) -> bool:
        """Whether positions are a penalty on distance (the 13B models) instead of a rotation (the 7B models)."""
        if self.position_embedding_type is not None:
            return self.position_embedding_type == "alibi"
        return not (
            _ROTARY_ARCHITECTURE in self.architectures
            or self.max_position_embeddings is not None
            or self.hidden_size == _ROTARY_HIDDEN_SIZE
        )

    @property
    def normalizes_head(self) -> bool:
        """Whether the rows of the head have length one in the product (Baichuan 2)."""
        if self.normalize_lm_head is not None:
            return self.normalize_lm_head
        return self.vocab_size == _NORM_HEAD_VOCABULARY

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict, without fields that published configs lack if they have their default."""
        fields = super().to_dict().items()
        return {name: value for name, value in fields if name not in _LEFT_OUT or value != _LEFT_OUT[name]}
