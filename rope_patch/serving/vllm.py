"""A vLLM plugin: stock vLLM serves a folder that was saved under a scheme, under that scheme.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). If a model's config records a
scheme, its rotary modules no longer rotate queries and keys, and the cache keeps unrotated keys. The plugin's attention
scores each request with the same `late_attention` as in Transformers: one request is one call, with its own positions.
On a GPU, two calls of flash attention score ReRoPE for the whole batch (`serving.flash`). The scheme's facts about each
layer come from the same model in Transformers, on the meta device. vLLM itself serves a checkpoint without a record, or
with a scheme that `rope_parameters` express.

All of this was tested on a CPU, except the two calls and `FlashImpl`, which need a GPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from rope_patch.attention.forward_cache import ForwardCache
from rope_patch.errors import UnsupportedModel
from rope_patch.models.base import RotaryTables
from rope_patch.models.paged import Request
from rope_patch.mounting.forward_call import ForwardCall
from rope_patch.mounting.layer_state import LayerState
from rope_patch.mounting.scoring import late_attention
from rope_patch.patching import patch
from rope_patch.saving.readers import refused_by_vllm
from rope_patch.schemes.registry import scheme_from_dict
from rope_patch.serving import flash

if is_flash_attn_varlen_func_available():
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

R = TypeVar("R")

_UNROTATED = "rope_patch_unrotated"
"""Attribute of a forward's context if vLLM's rotary modules did not rotate queries and keys."""


def register() -> None:
    """Register these backends and rotary modules, which vLLM prefers to its own; vLLM may call this more than once."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{Backend.__name__}")
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{FlashBackend.__name__}")
    for name, member in vars(rotary_embedding).items():
        registered = name in op_registry_oot  # by this plugin, or by another that was first
        if not registered and inspect.isclass(member) and issubclass(member, RotaryEmbeddingBase):
            cast(Any, member).register_oot(type(name, (Unrotated, member), {}), name=name)


class Unrotated(nn.Module):
    """A rotary module of vLLM that does not rotate if the attention layers will.

    Attributes:
        scheme: the checkpoint's recorded scheme; None if vLLM's own attention suffices.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        self.scheme = next((state.scheme for state in states_of(config).values()), None)
        if self.scheme is not None and config.model_config.use_mla:
            raise UnsupportedModel(f"{self.scheme} in vLLM: MLA is not supported")

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None, *more: Any) -> Any:
        """Called by vLLM with `query` and `key` `(tokens, heads * head_dim)`.

        Raises:
            UnsupportedModel: the attention layers have a backend that would ignore the scheme.
        """
        if self.scheme is None:
            return super().forward(positions, query, key, *more)
        context = get_forward_context()
        if not any(
            getattr(getattr(layer, "impl", None), "states", None) for layer in context.no_compile_layers.values()
        ):
            raise UnsupportedModel(
                f"{self.scheme} in vLLM: this attention backend is not supported; start it with --attention-backend "
                "FLASH_ATTN, or on a CPU"
            )
        setattr(context, _UNROTATED, True)
        return query, key


class Scored:
    """A mixin of the attention layers of vLLM's backends.

    Attributes:
        states: the scheme's state of each layer, by its index; empty if vLLM's own attention suffices.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        self.states = states_of(config)
        if self.states:
            self._check(config)

    def _check(self, config: VllmConfig) -> None:
        own = cast(Any, self)
        refused = {
            "an fp8 cache": is_quantized_kv_cache(own.kv_cache_dtype),
            "speculative decoding": config.speculative_config is not None,
            "attention that is not causal": own.attn_type != AttentionType.DECODER,
            "layers that share keys": own.kv_sharing_target_layer_name is not None,
            "a sliding window": own.sliding_window not in (-1, (-1, -1)),
            "compilation (start it with --enforce-eager)": not config.model_config.enforce_eager,
        }
        for what, holds in refused.items():
            if holds:
                raise UnsupportedModel(f"{next(iter(self.states.values())).scheme} in vLLM: {what} is not supported")

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
        """Called by vLLM with query and output `(tokens, heads, head_dim)`, and the cache, which already contains the
        new keys, `(blocks, kv_heads, block_size, 2 head_dim)`.

        Raises:
            UnsupportedModel: queries and keys were not rotated by a rotary module of vLLM.
        """
        if not self.states or attn_metadata is None:
            attend = cast(Any, super()).forward
            return attend(layer, query, key, value, kv_cache, attn_metadata, output, *more, **named)
        state = self.states[extract_layer_index(layer.layer_name)]
        if not hasattr(get_forward_context(), _UNROTATED):
            raise UnsupportedModel(f"{state.scheme} in vLLM: {layer.layer_name} has no rotary module of vLLM")
        self._score(state, query, kv_cache, attn_metadata, output)
        return output

    def _score(
        self, state: LayerState, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> None:
        own = cast(Any, self)
        softcap, sinks = own.logits_soft_cap or None, own.sinks
        for request, blocks in once(metadata, state, lambda: requests_of(metadata, kv_cache.shape[2])):
            held = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[None, :, : request.kv_length]
            keys, values = held.chunk(2, dim=-1)
            queries = query[request.queries].transpose(0, 1)[None]
            call = ForwardCall(
                state,
                request.forward_cache,
                states=queries,  # no scheme that is served here reads the module's input
                position_ids=request.position_ids,
                query_start=request.start,
                kv_length=request.kv_length,
                is_request=True,
            )
            arguments = {"softcap": softcap, "s_aux": sinks, "rope_patch": call, "scaling": own.scale}
            output[request.queries] = late_attention(_CAUSAL, queries, keys, values, None, **arguments)[0][0]

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the new keys and values, `(tokens, kv_heads, head_dim)`, side by side."""
        if not self.states:
            cast(Any, super()).do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        size, new = kv_cache.shape[2], len(slot_mapping)
        written = torch.cat([key[:new], value[:new]], dim=-1).to(kv_cache.dtype)
        kv_cache[slot_mapping // size, :, slot_mapping % size] = written


class Impl(Scored, CPUAttentionBackendImpl):
    """Attention on a CPU."""


class FlashImpl(Scored, FlashAttentionImpl):
    """Attention on a GPU."""

    def _score(
        self, state: LayerState, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> None:
        if self.sinks is not None or not flash.applies(state):
            super()._score(state, query, kv_cache, metadata, output)
            return
        window, block_size = int(state.regions[0].stop), kv_cache.shape[2]
        batch = once(metadata, state, lambda: flash.Batch.of(metadata, window, block_size))
        kernel = functools.partial(flash_attn_varlen_func, fa_version=self.vllm_flash_attn_version)
        queries, softcap = query[: metadata.num_actual_tokens], self.logits_soft_cap
        result = flash.attend(state, queries, kv_cache, metadata, batch, kernel, self.scale, softcap)
        output[: len(result)] = result


class Backend(CPUAttentionBackend):
    """vLLM's backend for CPUs, with this attention."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """`Impl`."""
        return Impl


class FlashBackend(FlashAttentionBackend):
    """vLLM's backend for flash attention, with this attention."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """`FlashImpl`."""
        return FlashImpl


class _Causal(nn.Module):
    is_causal: ClassVar[bool] = True


_CAUSAL = _Causal()


def once(metadata: Any, state: LayerState, compute: Callable[[], R]) -> R:
    """What the layers under one scheme share in a forward; with a scheme by layer, each group of layers has its own."""
    shared = vars(metadata).setdefault("rope_patch", {})
    if state.forward_cache not in shared:
        shared[state.forward_cache] = compute()
    return cast(R, shared[state.forward_cache])


def requests_of(metadata: Any, block_size: int) -> list[tuple[Request, torch.Tensor]]:
    """The requests of a batch and the blocks of each, `(blocks of the request,)`."""
    requests, begins = [], metadata.query_start_loc.tolist()
    for row, length in enumerate(metadata.seq_lens.tolist()):
        queries = slice(begins[row], begins[row + 1])
        start = length - (queries.stop - queries.start)
        positions = torch.arange(start, length, device=metadata.seq_lens.device)[None]
        request = Request(queries, slice(0, length), positions, ForwardCache())
        if queries.start < queries.stop:
            requests.append((request, metadata.block_table[row, : -(-length // block_size)].long()))
    return requests


def states_of(config: VllmConfig) -> dict[int, LayerState]:
    """The checkpoint's recorded scheme as state of each layer; empty if vLLM's own attention suffices.

    Raises:
        UnsupportedModel: the scheme needs more than queries, keys and positions, or does not change all layers.
    """
    if getattr(config.model_config.hf_config, "rope_patch", None) is None:
        return {}  # models without a record must not be read again
    return _states_of(config.model_config.model, config.model_config.revision)


@functools.cache
def _states_of(path: str, revision: str | None) -> dict[int, LayerState]:
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    record = getattr(config, "rope_patch", None)
    if record is None:
        return {}
    del config.rope_patch
    if "rope_parameters" in record:
        written, config.rope_parameters = config.rope_parameters, record["rope_parameters"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    scheme = scheme_from_dict(record["scheme"])
    if what := refused_by_vllm(scheme):
        raise UnsupportedModel(f"{scheme} in vLLM: {what} are not supported")
    handle = patch(model, scheme)
    if "rope_parameters" in record and written != record["rope_parameters"]:
        return {}  # rope_parameters express the scheme, and vLLM reads them itself
    handle.remove()
    handle = patch(model, scheme, mount="late")
    states = {state.layer.index: state for state in handle.layer_states}
    for state in states.values():  # the model was read on the meta device, but these modules compute
        cast(RotaryTables, state.layer.rotary).module.to(current_platform.device_type)
    if missing := [layer.name for layer in handle.stack.layers if layer.index not in states]:
        raise UnsupportedModel(f"{scheme} in vLLM: it does not change {', '.join(missing)}, which is not supported")
    return states
