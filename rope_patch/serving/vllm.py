"""A vLLM plugin: stock vLLM serves a folder that was saved under a scheme, under that scheme.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). If a model's config records a
scheme, `serving.vllm_served` decides what computes it. Static frequencies and scales of queries are tables, which
vLLM's rotary modules read instead of their own tables; vLLM's attention stays unchanged. For other schemes the rotary
modules leave rotation to the plugin's attention, or rotate for the farthest region, and the attention scores each
request with the same `late_attention` as in Transformers: one request is one call, with its own positions. On a CPU, a
kernel in C++ scores most schemes (`serving.paged_attention`); on a GPU, two calls of flash attention score ReRoPE for
the whole batch (`serving.flash`). vLLM itself serves a checkpoint without a record, or with a scheme that
`rope_parameters` express.

All of this was tested on a CPU, except the two calls and `FlashImpl`, which need a GPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
    is_quantized_kv_cache,  # its home module differs between vLLM 0.32 and 0.33
)
from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from rope_patch.attention.forward import Forward
from rope_patch.errors import UnsupportedModel
from rope_patch.models.paged import Request
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.layer_state import LayerState
from rope_patch.mounting.scoring import late_attention
from rope_patch.serving import flash, paged_attention
from rope_patch.serving.paged_attention import anchor_of, factor_of
from rope_patch.serving.vllm_admission import watch
from rope_patch.serving.vllm_served import Served, Tables, served_of

if is_flash_attn_varlen_func_available():
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

R = TypeVar("R")


def register() -> None:
    """Register the backends and rotary modules of this plugin, which vLLM prefers to its own; vLLM may call this more
    than once.
    """
    watch(current_platform)
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{Backend.__name__}")
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{FlashBackend.__name__}")
    for name, member in vars(rotary_embedding).items():
        registered = name in op_registry_oot  # by this plugin, or by another that was first
        if not registered and inspect.isclass(member) and issubclass(member, RotaryEmbeddingBase):
            cast(Any, member).register_oot(type(name, (Rotary, member), {}), name=name)


class Rotary(nn.Module):
    """A rotary module of vLLM that reads the scheme's tables, or does not rotate if the attention layers will.

    Attributes:
        served: the computation that the folder needs; None if vLLM's own tables suffice, or if the module rotates the
            patches of images.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        self.served: Served | None = None
        if config.model_config.uses_mrope and not isinstance(self, MRotaryEmbedding):
            return  # an image tower, which has positions of its own
        self.served = served = served_of(config)
        if served is None:
            return
        if config.model_config.use_mla:
            raise UnsupportedModel(f"{served.scheme} in vLLM: MLA is not supported")
        served.has_rotary = True
        if served.tables is not None:
            self._read(served.tables)

    def _read(self, tables: Tables) -> None:
        """Read the scheme's tables, whose shapes are documented in `Tables`."""
        own = cast(Any, self)
        with_order = isinstance(self, MRotaryEmbedding) and type(self).__name__ != MRotaryEmbedding.__name__
        if with_order or not hasattr(own, "cos_sin_cache") or own.cos_sin_cache.shape[1] != tables.cos_sin.shape[1]:
            raise UnsupportedModel(f"a scheme in vLLM: {type(self).__name__} is not supported")
        self.register_buffer("cos_sin_cache", tables.cos_sin.to(own.cos_sin_cache), persistent=False)
        scale = None if tables.scale is None else tables.scale.to(own.cos_sin_cache)
        self.register_buffer("query_scale", scale, persistent=False)
        # on a GPU, a kernel of vLLM for hybrid models reads the table by itself, without this module's forward, unless
        # the table has another dtype than these
        own.dtype = torch.float32

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None, *more: Any) -> Any:
        """Rotate for vLLM: `positions` `(tokens,)` or `(3, tokens)`, `query` and `key` `(tokens, heads * head_dim)`.

        Raises:
            UnsupportedModel: the attention layers have a backend that would ignore the scheme.
        """
        served = self.served
        if served is None:
            return super().forward(positions, query, key, *more)
        if served.scores:
            _check_backend(str(served.scheme))
        if served.tables is None:
            return query, key
        counted = positions
        if served.rows is not None:
            positions = counted = positions + served.rows.by_token[: positions.shape[-1]]
            if served.rows.counted is not None:
                counted = served.rows.counted[: positions.shape[-1]]
        query, key = super().forward(positions, query, key, *more)
        scale = cast(torch.Tensor | None, self.query_scale)
        if scale is not None:
            by_token = scale.index_select(0, counted)[..., None]
            query = (query.unflatten(-1, (-1, cast(Any, self).head_size)) * by_token).flatten(-2)
        return query, key


@torch.compiler.assume_constant_result
def _check_backend(scheme: str) -> bool:
    """Check that the attention layers have a backend of this plugin, once for a compiled graph.

    Raises:
        UnsupportedModel: a layer has another backend.
    """
    layers = get_forward_context().no_compile_layers.values()
    if any(getattr(getattr(layer, "impl", None), "served", None) for layer in layers):
        return True
    raise UnsupportedModel(
        f"{scheme} in vLLM: this attention backend is not supported; start it with --attention-backend FLASH_ATTN, or "
        "on a CPU"
    )


class Scored:
    """A mixin for the attention layers of vLLM's backends, which scores them under a scheme.

    Attributes:
        served: the computation that the attention layers take over; None if vLLM's own attention suffices.
        states: states of this layer by factor, from its first forward on.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        served = served_of(config)
        self.served = served if served is not None and served.scores else None
        self.is_anchored = self.served is not None and self.served.anchored
        self.states: list[LayerState] = []
        if self.served is not None:
            self._check(config)

    def _check(self, config: VllmConfig) -> None:
        own = cast(Any, self)
        refused = {
            "an fp8 cache": is_quantized_kv_cache(own.kv_cache_dtype),
            "speculative decoding": config.speculative_config is not None,
            "attention that is not causal": own.attn_type != AttentionType.DECODER,
            "layers that share keys": own.kv_sharing_target_layer_name is not None,
            "a sliding window": own.sliding_window not in (-1, (-1, -1)),
        }
        for what, holds in refused.items():
            if holds:
                raise UnsupportedModel(f"{own.served.scheme} in vLLM: {what} is not supported")

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *more: Any,
        **named: Any,
    ) -> torch.Tensor:
        """Score a layer for vLLM: query and output are `(tokens, heads, head_dim)`, and the cache, which already
        contains the new keys, is `(blocks, kv_heads, block_size, 2 head_dim)`.
        """
        if self.served is None or attn_metadata is None:
            attend = cast(Any, super()).forward
            return attend(layer, query, key, value, kv_cache, attn_metadata, output, *more, **named)
        if not self.states:
            index = extract_layer_index(layer.layer_name)
            self.states = [by_layer[index] for by_layer in self.served.states]
        self._score(query, kv_cache, attn_metadata, output)
        return output

    def _score(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor) -> None:
        """Fill the output, request by request."""
        own = cast(Any, self)
        softcap, sinks = own.logits_soft_cap or None, own.sinks
        by_request = [0] * len(metadata.seq_lens)
        if own.served.rows is not None:
            by_request = own.served.rows.by_request[: len(metadata.seq_lens)].tolist()
        for row, request, blocks in once(metadata, self.states[0], lambda: requests_of(metadata, kv_cache.shape[2])):
            keys, values = self._held(kv_cache, blocks, request.kv_length)
            queries = query[request.queries].transpose(0, 1)[None]
            state = self.states[by_request[row]]
            call = ForwardCall(
                state,
                request.forward,
                states=queries,  # no scheme that is served here reads the module's input
                position_ids=request.position_ids,
                query_start=request.start,
                kv_length=request.kv_length,
                is_request=True,
                anchor=anchor_of(state) if own.is_anchored and state.rotates and factor_of(state) == 1 else None,
            )
            arguments = {"softcap": softcap, "s_aux": sinks, "rope_patch": call, "scaling": own.scale}
            output[request.queries] = late_attention(_CAUSAL, queries, keys, values, None, **arguments)[0][0]

    def _held(self, kv_cache: torch.Tensor, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
        """Gather keys and values of a request from the cache, each `(1, kv_heads, length, head_dim)`."""
        return kv_cache[blocks].transpose(0, 1).flatten(1, 2)[None, :, :length].chunk(2, dim=-1)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the new keys and values, `(tokens, kv_heads, head_dim)`, side by side."""
        if self.served is None:
            cast(Any, super()).do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        size, new = kv_cache.shape[2], len(slot_mapping)
        written = torch.cat([key[:new], value[:new]], dim=-1).to(kv_cache.dtype)
        kv_cache[slot_mapping // size, :, slot_mapping % size] = written


class Impl(Scored, CPUAttentionBackendImpl):
    """Attention on a CPU: the new tokens of all requests at once.

    Attributes:
        has_kernel: whether there is a kernel for this scheme; without it requests are scored one by one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_kernel = self.is_anchored and paged_attention.kernel() is not None

    def _score(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor) -> None:
        if not self.has_kernel:
            super()._score(query, kv_cache, metadata, output)
            return
        cache, batch = _halves(kv_cache), once(metadata, None, lambda: self._batch(metadata))
        for factor, state in enumerate(self.states):
            self._attention(state, cache).attend(batch, query, cache, output, self.sinks, factor)

    def _batch(self, metadata: Any) -> paged_attention.Batch:
        rows, count = cast(Served, self.served).rows, len(metadata.seq_lens)
        factors = None if rows is None else rows.by_request[:count]
        return paged_attention.Batch(metadata.query_start_loc, metadata.seq_lens, metadata.block_table, factors)

    def _attention(self, state: LayerState, cache: torch.Tensor) -> paged_attention.Attention:
        """The `Attention` of a layer; layers with the same computation share one."""
        softcap, sizes = self.logits_soft_cap or 0.0, (cache.shape[1], *cache.shape[3:])
        key = (state.forwards, state.tables, self.num_heads, sizes, self.scale, softcap)
        known = cast(Served, self.served).attention
        if key not in known:
            known[key] = paged_attention.Attention(state, self.num_heads, sizes, self.scale, softcap)
        return known[key]

    def _held(self, kv_cache: torch.Tensor, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
        return paged_attention.held(_halves(kv_cache), blocks, length)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the new keys and values, `(tokens, kv_heads, head_dim)`, in the layout of `paged_attention`."""
        if self.served is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        else:
            paged_attention.written(_halves(kv_cache), key, value, slot_mapping)


def _halves(kv_cache: torch.Tensor) -> torch.Tensor:
    """View a cache with keys before values in each block, `(blocks, kv_heads, 2, block_size, head_dim)`."""
    blocks, kv_heads, size, both = kv_cache.shape
    return kv_cache.view(blocks, kv_heads, 2, size, both // 2)


class FlashImpl(Scored, FlashAttentionImpl):
    """Attention on a GPU: by two calls of flash attention if they apply, else request by request."""

    def _score(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor) -> None:
        state = self.states[0]
        if self.sinks is not None or len(self.states) > 1 or not flash.applies(state):
            super()._score(query, kv_cache, metadata, output)
            return
        window, block_size = int(state.regions[0].stop), kv_cache.shape[2]
        batch = once(metadata, state, lambda: flash.Batch.of(metadata, window, block_size))
        kernel = functools.partial(flash_attn_varlen_func, fa_version=self.vllm_flash_attn_version)
        queries, softcap = query[: metadata.num_actual_tokens], self.logits_soft_cap
        result = flash.attend(state, queries, kv_cache, metadata, batch, kernel, self.scale, softcap)
        output[: len(result)] = result


class Built:
    """A mixin for the builders of vLLM's metadata, which run before each step."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Build the metadata of a step for vLLM, from the metadata that all backends share.

        Raises:
            UnsupportedModel: no rotary module of vLLM would compute the scheme.
        """
        served = served_of(cast(Any, self).vllm_config)
        if served is not None and not served.has_rotary:
            raise UnsupportedModel(f"{served.scheme} in vLLM: the model has no rotary module of vLLM that reads it")
        if served is not None and served.rows is not None:
            served.rows.lay_out(common_attn_metadata.query_start_loc_cpu, common_attn_metadata.seq_lens)
        return cast(Any, super()).build(common_prefix_len, common_attn_metadata, fast_build)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Refuse CUDA graphs of this attention if it scores, because it reads values of the metadata. vLLM still
        captures graphs of the code around it.
        """
        served = served_of(vllm_config)
        if served is not None and served.scores:
            return AttentionCGSupport.NEVER
        return cast(AttentionCGSupport, cast(Any, super()).get_cudagraph_support(vllm_config, kv_cache_spec))


class Builder(Built, CPUAttentionMetadataBuilder):
    """The builder for CPUs."""


class FlashBuilder(Built, FlashAttentionMetadataBuilder):
    """The builder for flash attention."""


class Backend(CPUAttentionBackend):
    """The CPU backend of vLLM, with this attention."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Return the class of the attention layers."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Return the class of the metadata builder."""
        return Builder


class FlashBackend(FlashAttentionBackend):
    """The flash-attention backend of vLLM, with this attention."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """Return the class of the attention layers."""
        return FlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """Return the class of the metadata builder."""
        return FlashBuilder


class _Causal(nn.Module):
    is_causal: ClassVar[bool] = True


_CAUSAL = _Causal()


def once(metadata: Any, state: LayerState | None, compute: Callable[[], R]) -> R:
    """Compute once in a forward: without a `state` for all layers, else for the layers of the state's group under one
    scheme.
    """
    shared, key = vars(metadata).setdefault("rope_patch", {}), state and state.forwards
    if key not in shared:
        shared[key] = compute()
    return cast(R, shared[key])


def requests_of(metadata: Any, block_size: int) -> list[tuple[int, Request, torch.Tensor]]:
    """The requests of a batch, with their places in it, and the blocks of each, `(blocks of the request,)`."""
    requests, begins = [], metadata.query_start_loc.tolist()
    for row, length in enumerate(metadata.seq_lens.tolist()):
        queries = slice(begins[row], begins[row + 1])
        start = length - (queries.stop - queries.start)
        positions = torch.arange(start, length, device=metadata.seq_lens.device)[None]
        request = Request(queries, slice(0, length), positions, Forward())
        requests.append((row, request, metadata.block_table[row, : -(-length // block_size)].long()))
    return requests
