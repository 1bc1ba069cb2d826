"""Baichuan, built from parts of Transformers' Llama."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from rope_patch.attention.forward import Forward
from rope_patch.attention.terms import upcast
from rope_patch.models.arguments import cache_in
from rope_patch.models.baichuan.alibi import alibi_attention_forward
from rope_patch.models.baichuan.configuration import BaichuanConfig
from rope_patch.models.cached_keys import known_positions, remember
from rope_patch.models.paged import is_paged
from rope_patch.schemes.tools.positions import query_start

# The names of weights in files belong to a model class, so they are registered where it is defined. A module that keeps
# `W_pack` finds its own name among the keys, and Transformers does not convert such keys.
register_checkpoint_conversion_mapping(
    BaichuanConfig.model_type,
    [
        WeightConverter(
            source_patterns="self_attn.W_pack.weight",
            target_patterns=[f"self_attn.{name}_proj.weight" for name in "qkv"],
            operations=[Chunk(dim=0)],
        )
    ],
    overwrite=True,
)


_WRITES_PAGES = "cache" in inspect.signature(LlamaAttention.forward).parameters
"""Whether attention modules, and not attention functions, write to a paged cache: since Transformers 5.24."""


class BaichuanAttention(LlamaAttention):
    """Llama's self-attention, optionally with one module for the three projections, and with a penalty on distance
    instead of a rotation; `layer_idx` is its index in the stack and in the cache.
    """

    def __init__(self, config: BaichuanConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.fused_qkv:
            del self.q_proj, self.k_proj, self.v_proj
            self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend: `(batch, length, hidden)` in and out, and the attention weights if the attention function returns
        them; `position_embeddings` are cos and sin, `(batch or 1, length, head_dim)`, or a `Forward` without rotation.
        """
        cache = cache_in(kwargs)
        kwargs = {name: value for name, value in kwargs.items() if value is not cache}
        if self.config.fused_qkv:
            states = self.W_pack(hidden_states).chunk(3, dim=-1)
        else:
            states = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in states)
        implementation = self.config._attn_implementation
        if not self.config.uses_alibi:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
            score = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        elif implementation.startswith("rope_patch"):  # a mounted scheme has its own bias
            score = ALL_ATTENTION_FUNCTIONS[implementation]
        else:
            score, kwargs["shared"] = alibi_attention_forward, position_embeddings
            if cache is not None:
                start = kwargs["start"] = query_start(cache, self.layer_idx, query.shape[2])
                kwargs["positions"] = known_positions(cache, self.layer_idx, start, kwargs["position_ids"])
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if kwargs.get("positions") is not None:
                remember(cache, self.layer_idx, kwargs["positions"], in_order=True)
        elif _WRITES_PAGES and is_paged(kwargs):
            key, value = kwargs.pop("cache").update(key, value, self.layer_idx, kwargs=kwargs)
        output, weights = score(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(output.flatten(2)), weights


class BaichuanDecoderLayer(LlamaDecoderLayer):
    """Llama's layer around this attention, with the same `layer_idx`."""

    def __init__(self, config: BaichuanConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = BaichuanAttention(config, layer_idx)


class BaichuanPreTrainedModel(LlamaPreTrainedModel):
    """The settings that Transformers needs for both models, apart from the checkpoint's `config`."""

    config: BaichuanConfig
    config_class = BaichuanConfig
    _no_split_modules = ("BaichuanDecoderLayer",)
    # published files contain frequency tables, which follow from the config
    _keys_to_ignore_on_load_unexpected = (r"rotary_emb\.inv_freq",)

    def _backward_compatibility_gradient_checkpointing(self) -> None:
        # a trailing comma turned the published value into `[false]`, which Transformers would read as true
        if not isinstance(self.config.gradient_checkpointing, list | tuple):
            super()._backward_compatibility_gradient_checkpointing()


class BaichuanModel(BaichuanPreTrainedModel):
    """The stack of layers."""

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(BaichuanDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = _forward_instead_of_tables if config.uses_alibi else LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    forward = LlamaModel.forward


def _forward_instead_of_tables(hidden_states: torch.Tensor, position_ids: torch.Tensor) -> Forward:
    """Make the `Forward` that layers share in the place of rotary tables, for a stack without rotation."""
    return Forward()


class NormHead(nn.Linear):
    """A head with normalised rows: logits = h . w / |w| for every row w of the weight, which itself never changes.

    The published code normalises the weight in training, and overwrites it with the normalised weight in evaluation.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute logits: `(..., hidden)` to `(..., vocabulary)`, in the dtype of the hidden states; lengths are
        float32 or wider.
        """
        lengths = torch.linalg.vector_norm(self.weight, dim=-1, dtype=upcast(self.weight[:0]).dtype).clamp_min(1e-12)
        return (super().forward(hidden_states) / lengths).to(hidden_states.dtype)


class BaichuanForCausalLM(BaichuanPreTrainedModel, GenerationMixin):
    """The stack and the language-model head."""

    _tied_weights_keys = LlamaForCausalLM._tied_weights_keys

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.model = BaichuanModel(config)
        self.vocab_size = config.vocab_size
        head = NormHead if config.normalizes_head else nn.Linear
        self.lm_head = head(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    forward = LlamaForCausalLM.forward

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head by `new_embeddings`; a plain layer, as resizing the vocabulary creates it, is normalised."""
        if self.config.normalizes_head and type(new_embeddings) is nn.Linear:
            head = NormHead(new_embeddings.in_features, new_embeddings.out_features, bias=False, device="meta")
            head.weight = new_embeddings.weight
            new_embeddings = head
        super().set_output_embeddings(new_embeddings)

    def loss_function(self, logits: torch.Tensor, labels: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        """The loss of Transformers, cross-entropy of `logits` `(batch, length, vocabulary)` for `labels` `(batch,
        length)` with its `kwargs`, plus `z_loss_weight` times the mean squared largest logit of every predicting
        position.
        """
        loss = super().loss_function(logits=logits, labels=labels, **kwargs)
        if not self.config.z_loss_weight:
            return loss
        return loss + self.config.z_loss_weight * logits[..., :-1, :].float().amax(dim=-1).square().mean()


class BaiChuanForCausalLM(BaichuanForCausalLM):
    """The class under Baichuan-7B's spelling: its folders are saved with this name, and vLLM reads the position kind
    from it.
    """
