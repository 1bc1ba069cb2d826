"""Load the model for `rope-patch serve` and `rope-patch demo-chat`, and set up its batches."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import psutil
import torch

from rope_patch.errors import EvaluationError
from rope_patch.mounting.handle import PatchHandle
from rope_patch.saving.loading import load_model, load_tokenizer, quiet_transformers
from rope_patch.serving.batch import PAGE
from rope_patch.serving.one_by_one import needs_turns


def load_served(checkpoint: str, dtype: str, device: str) -> tuple[Any, Any]:
    """Load the model of a checkpoint, patched again if it was saved under a scheme, and its tokenizer.

    Raises:
        NoCheckpoint: there is no checkpoint, or it cannot be loaded.
        EvaluationError: Transformers has no continuous batching for such a model, or the model has an encoder.
    """
    with quiet_transformers():
        model: Any = load_model(checkpoint, dtype=dtype, device=device)
        tokenizer = load_tokenizer(checkpoint)
    if not hasattr(model, "init_continuous_batching"):
        raise EvaluationError(f"{type(model).__name__} is not served by continuous batching of Transformers")
    if model.config.is_encoder_decoder:
        raise EvaluationError(f"{type(model).__name__} is not served: it has an encoder; pass a decoder, such as Llama")
    return model, tokenizer


def check_paged(handle: PatchHandle | None) -> None:
    """Refuse a scheme that sums over earlier tokens.

    Raises:
        EvaluationError: the scheme sums over earlier tokens.
    """
    if handle and (handle.scheme.stateful or "running_bias" in handle.scheme.methods):
        reason = "a paged cache cannot keep its sums over earlier tokens"
        raise EvaluationError(f"{handle.scheme} is not served: {reason}")


def check_memory(model: Any, tokens: int) -> None:
    """Refuse a cache that cannot fit, which Transformers would refuse in a traceback.

    Args:
        tokens: number of tokens that the cache holds. Layers of two kinds may share pages, so only the rarer kind is
            counted, which never overestimates.

    Raises:
        EvaluationError: keys and values of so many tokens need more than the free memory.
    """
    config = model.config.get_text_config()
    if needs_turns(config):
        return
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wanted = tokens * min(Counter(kinds).values()) * 2 * heads * width * model.dtype.itemsize
    on_cuda = model.device.type == "cuda"
    free = torch.cuda.mem_get_info(model.device)[0] if on_cuda else psutil.virtual_memory().available
    if wanted > free:
        sizes = f"{wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        raise EvaluationError(f"the cache for {tokens} tokens takes {sizes}; pass a lower --max-length")


def batch_settings(longest: int, requests: int, step: int) -> dict[str, Any]:
    """Settings of a `Batch` under a scheme.

    Args:
        longest: number of tokens of the longest request with its answer.
        requests: number of such requests that the cache holds.
        step: number of tokens in one step, over all requests.
    """
    return {
        "num_blocks": requests * math.ceil(longest / PAGE),
        "max_batch_tokens": step,
        "auto_switch_to_flash": False,  # it would bypass the scheme
        "max_blocks_per_request": 0,  # block tables, likewise
    }
