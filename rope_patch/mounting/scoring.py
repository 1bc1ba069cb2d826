"""The attention function of patched modules: scales queries, then delegates or scores by region."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.attention import engine
from rope_patch.attention.masks import documents_of, holds_groups, keys_seen, read_mask, shows_later_keys
from rope_patch.attention.problem import AttentionMode, Problem, TokenPlan
from rope_patch.attention.rotation import EVERY
from rope_patch.attention.terms import Content
from rope_patch.attention.turner import Turner
from rope_patch.errors import UnsupportedModel, UnsupportedPositions
from rope_patch.graphs import require
from rope_patch.models.base import is_causal
from rope_patch.models.cached_keys import CachedKeys
from rope_patch.models.paged import split_by_request
from rope_patch.mounting.forward_call import ForwardCall, Rows, some_rows
from rope_patch.mounting.registration import IMPLEMENTATION
from rope_patch.mounting.running_bias import running_sums
from rope_patch.mounting.running_stack import is_linked
from rope_patch.mounting.step import Scored, keep_step
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.slots import ALL_PAIRS
from rope_patch.typing import NO_WEIGHTS, Weights


def late_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    rope_patch: ForwardCall | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Score a patched module: Transformers calls this function instead of `sdpa_attention_forward` and similar ones.

    If the scheme has only one region and no bias, this function delegates to the model's own attention.

    Args:
        attention_mask: a mask as Transformers builds it, or segment ids.
        scaling: factor on the products; default head_dim^-0.5.
        rope_patch: the call object from the hook of this layer.

    Shape:
        query `(batch, heads, q_len, head_dim)`, key and value `(batch, kv_heads, kv_len, head_dim)`, in the rotation
        that the hook requested; returns `(batch, q_len, heads, head_dim)`, and the weights under eager attention.

    Raises:
        UnsupportedModel: the model passes an argument that the scheme's attention does not support.
        UnsupportedPositions: the number of keys differs from the cache's announcement, or the mask has an unknown form.
    """
    if rope_patch is not None and rope_patch.step is not None and not dropout:
        arguments = (query, key, value), attention_mask, scaling, kwargs
        if (scored := rope_patch.step.attend(rope_patch, module, *arguments)) is not None:
            return scored
    if rope_patch is None and not is_linked(module):  # the model asked for its scheme by name
        by_name = ALL_ATTENTION_FUNCTIONS._global_mapping[IMPLEMENTATION]
        return by_name(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    call = _checked(module, rope_patch, kwargs)
    if call.is_paged:
        return _attend_by_request(module, query, key, value, call, scaling, dropout, kwargs)
    key = _arrived(module, call, query, key)
    state, scheme, learned = call.state, call.state.scheme, call.state.weights(module)
    if state.by_head and (shared := query.shape[1] // key.shape[1]) > 1:  # heads that share a key turn it differently
        key, value = (states.repeat_interleave(shared, dim=1) for states in (key, value))
    factors = query_factors(call, query, learned)
    scaled = query if factors is None else query * factors
    keep = functools.partial(keep_step, call, module, (query, key, value), attention_mask, scaling, factors)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = _scores(call, attention_mask, query)
    readable = attention_mask is None or isinstance(attention_mask, torch.Tensor)  # another form is left alone
    looks = readable and query.shape[2] > 1 and (scores or scheme.causal_only)
    mask = groups = None
    if scores or looks or (readable and scheme.length_dependent):
        mask, groups = _read(call, attention_mask, query.shape[2], key.shape[2])
    if scheme.regions_by_length:
        lengths = call.rows_by_length()
        if len(lengths) > 1:
            batches = tuple(lengths.values())
            return _attend_by_length(module, query, key, value, attention_mask, call, batches, scaling, dropout, kwargs)
        (call.length,) = lengths
    if (scores or scheme.length_dependent) and not call.forward.traced:
        _refuse_part_of_a_row(scheme, state.config._attn_implementation)
    if looks:
        call.looks_ahead = _looks_ahead(call, mask, is_causal(module, kwargs.get("is_causal")))
    if not scores:
        delegate = _delegate(module, call, call.turner(key.shape[2], learned), scaling, dropout)
        if not learned and not dropout:
            keep(state.config._attn_implementation, delegate)
        return delegate(module, scaled, key, value, attention_mask, kwargs)
    problem = _problem(call, query, scaled, key, value, learned, (mask, groups), scaling, dropout, kwargs)
    output, weights = engine.score(problem)
    if state.watch is not None:
        state.watch(problem.taken, problem)
    if problem.plan is not None and not (learned or dropout or state.by_head):
        keep(problem.taken, functools.partial(_planned, problem.plan))
    return output.transpose(1, 2).contiguous(), None if weights is None else weights.to(problem.value.dtype)


def _scores(call: ForwardCall, mask: Any, query: torch.Tensor) -> bool:
    """Whether this library scores a call, instead of the attention function that the model had before; `mask` is the
    mask as it arrived, `query` `(batch, heads, q_len, head_dim)`.
    """
    state = call.state
    if state.scores or call.is_request or holds_groups(mask):
        return True
    # if every step rotates the keys of a whole cache, they are rotated and scored a few at a time
    return state.scheme.length_dependent and query.shape[2] == 1 and state.config._attn_implementation == "sdpa"


def _read(
    call: ForwardCall, mask: torch.Tensor | None, q_length: int, kv_length: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Read the mask of a call: return a materialised mask and segment ids as `read_mask` does. If the scheme depends on
    the length of the text, note in the call which keys are tokens, and the documents of a row that is whole.
    """
    scheme, shared, positions = call.state.scheme, call.forward.shared, call.position_ids
    sizes = q_length, kv_length, call.start, call.state.config._attn_implementation
    materialised, groups = shared(read_mask)(mask, positions, *sizes)
    if scheme.length_dependent:
        call.tokens = shared(keys_seen)(materialised, groups)
        if scheme.by_document and call.query_start is None and q_length == kv_length > 1:
            call.documents = shared(documents_of)(materialised, groups, positions)
    return materialised, groups


def _delegate(
    module: nn.Module, call: ForwardCall, turner: Turner, scaling: float, dropout: float
) -> Callable[..., Scored]:
    """The attention function that a module had before, behind the rotations of this call; see `_delegated`."""
    implementation = call.state.config._attn_implementation
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if implementation == "eager" and eager is None:
        raise UnsupportedModel(f"{type(module).__module__} has no eager_attention_forward")
    previous = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    if call.state.watch is not None:
        call.state.watch(implementation, None)
    return functools.partial(_delegated, previous, turner, scaling, dropout)


def _problem(
    call: ForwardCall,
    projected: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    learned: Weights,
    seen: tuple[torch.Tensor | None, torch.Tensor | None],
    scaling: float,
    dropout: float,
    kwargs: dict[str, Any],
) -> Problem:
    """Describe a call to the executors: `projected` are the queries before their scale, each `(batch, heads, q_len,
    head_dim)`, and `seen` are the materialised mask and the segment ids.
    """
    query, key, value, projected = _as_autocast(query, key, value, projected)
    turner = call.turner(key.shape[2], learned)
    is_eager = call.state.config._attn_implementation in ("eager", "paged|eager")
    mode: AttentionMode = "oracle" if is_eager else call.state.attention
    mask, groups = seen
    return Problem(
        branches=(),
        value=value,
        query_positions=call.position_ids,
        key_positions=turner.key_positions,
        mask=mask,
        groups=groups,
        # one query without a mask is a decoding step and sees every key
        causal=query.shape[2] > 1 and not call.looks_ahead,
        query_start=call.start,
        scattered=call.scattered,
        scaling=scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=dropout,
        mode=mode,
        query=query,
        key=key,
        turner=turner,
        decay=call.decay(learned),
        compiling=call.forward.traced,
        **_terms(call, projected, query, key, learned, mask, groups),
    )


def _delegated(
    previous: Callable[..., Scored],
    turner: Turner,
    scaling: float,
    dropout: float,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> Scored:
    """Call the attention function that the model had before, with states `(batch, heads or kv_heads, length,
    head_dim)`, which are rotated first unless the module has rotated them.
    """
    states = turner.turn(query, ALL_PAIRS, "query"), turner.turn(key, ALL_PAIRS, "key"), value
    return previous(module, *states, mask, scaling=scaling, dropout=dropout, **kwargs)


def _planned(
    plan: TokenPlan,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> Scored | None:
    """Score one query, `(batch, heads, 1, head_dim)`, by the plan of another layer; None if the module uses a softcap
    or sinks, which plans do not support.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        return None
    return plan.attend(*_as_autocast(query, key, value)).transpose(1, 2).contiguous(), None


def _as_autocast(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast queries, keys and values of any shape to the dtype that `scaled_dot_product_attention` has under
    autocast.
    """
    device = states[0].device.type
    if not torch.is_autocast_enabled(device):
        return states
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in states)


def _checked(module: nn.Module, call: ForwardCall | None, kwargs: dict[str, Any]) -> ForwardCall:
    """Return the call object of these arguments. A call without the object, or with a foreign argument, is refused."""
    if call is None:
        raise UnsupportedModel(f"{type(module).__name__} does not pass its keyword arguments to its attention")
    for name in ("position_bias",) if call.is_paged else ("position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"{type(module).__name__} passes {name!r}, which patched attention does not support")
    return call


def _attend_by_request(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: ForwardCall,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Attention of a row of continuous batching: each request is a separate call."""
    arguments = {**kwargs, "position_ids": call.position_ids, "forward": call.forward}
    row = split_by_request(module, query, key, value, **arguments)
    for request, q, k, v in row.parts:
        mask, part = request.mask(call.state.layer.sliding_window), call.of_request(request)
        output = late_attention(module, q, k, v, mask, scaling, dropout, part, **row.others)[0]
        row.output[:, request.queries] = output
    return row.output, None


def _attend_by_length(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    call: ForwardCall,
    batches: Sequence[Rows],
    scaling: float,
    dropout: float,
    kwargs: dict[str, Any],
) -> Scored:
    """Attention of texts of several lengths, under a scheme whose regions depend on the length: the rows of each
    length, one of the `batches`, are a separate call. Return the output, and the weights under eager attention.
    """
    outputs, weights = [], []
    for rows in batches:
        q, k, v = (states[list(rows)] for states in (query, key, value))
        part, seen = call.of_rows(rows, key.shape[2]), call.forward.shared(some_rows)(mask, rows)
        output, weight = late_attention(module, q, k, v, seen, scaling, dropout, part, **kwargs)
        outputs.append(output)
        weights += [] if weight is None else [weight]
    order = torch.tensor([row for rows in batches for row in rows]).argsort()
    return torch.cat(outputs)[order], torch.cat(weights)[order] if weights else None


def _arrived(module: nn.Module, call: ForwardCall, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Check that as many keys arrive as the cache announced, store their positions in the cache, and return the keys as
    a plain tensor.
    """
    expected = query.shape[2] if call.kv_length is None else call.kv_length
    if key.shape[2] != expected:
        raise UnsupportedPositions(
            f"{call.state.layer.name}: {key.shape[2]} keys arrive where its cache announced {expected}; the way in "
            f"which {type(module).__name__} keeps keys is not supported: call the model with use_cache=False"
        )
    call.remember()
    return key.plain() if isinstance(key, CachedKeys) else key  # keys of a static cache are plain already


def query_factors(call: ForwardCall, query: torch.Tensor, learned: Weights) -> torch.Tensor | None:
    """The scheme's scale of each position, `(batch or 1, heads or 1, q_len, 1)`, which multiplies the queries `(batch,
    heads, q_len, head_dim)`; None without a scale.
    """
    if not call.state.scales:
        return None
    heads = None if call.heads is None else (call.heads.start, call.heads.stop)
    arguments = call.state.scheme.query_scale, call.position_ids, call.num_heads(query), heads, query.dtype
    return _query_factors(*arguments, learned) if learned else call.forward.shared(_query_factors)(*arguments)


def _query_factors(
    scale: Callable[..., torch.Tensor],
    position_ids: torch.Tensor,
    num_heads: int,
    heads: tuple[int, int] | None,
    dtype: torch.dtype,
    learned: Weights = NO_WEIGHTS,
) -> torch.Tensor:
    """The scheme's scale of each position, `(batch or 1, heads or 1, q_len, 1)`, for some of the `num_heads`."""
    factors = scale(position_ids.clamp(min=0), num_heads, learned)
    if heads is not None and len(factors) > 1:
        factors = factors[slice(*heads)]
    return factors.transpose(0, 1)[..., None].to(dtype)


def _looks_ahead(call: ForwardCall, mask: torch.Tensor | None, causal: bool) -> bool:
    """Whether some query of a call may see keys after it: by a materialised mask or, without one, unless it is
    `causal`. A compiled graph assumes that a causal model has no such query, and asserts this where it matters. A
    scheme that has no meaning for such keys is refused.
    """
    state = call.state
    if mask is None or (call.forward.traced and not causal):
        ahead = not causal
    elif call.forward.traced:
        if state.both_ways != state.regions or state.scheme.causal_only:
            hidden = ~shows_later_keys(mask, call.start)
            require(hidden, UnsupportedPositions, "the mask shows keys after the query; run eagerly")
        return False
    else:
        ahead = call.forward.shared(_shows_later_keys)(mask, call.start)
    if ahead and state.scheme.causal_only:
        raise UnsupportedPositions(
            f"{state.scheme} is undefined for keys after the query, which this call shows; pass a causal mask"
        )
    return ahead


def _shows_later_keys(mask: torch.Tensor, start: int | torch.Tensor) -> bool:
    return bool(shows_later_keys(mask, start))


def _terms(
    call: ForwardCall,
    projected: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    learned: Weights,
    mask: torch.Tensor | None,
    groups: torch.Tensor | None,
) -> dict[str, Any]:
    """The terms that the scheme adds to scores and values; `projected` are the queries before their scale."""
    scheme, methods = call.state.scheme, call.state.methods
    terms: dict[str, Any] = {}
    if call.added is not None:
        tokens = call.forward.shared(keys_seen)(mask, groups)
        terms["running_bias"] = running_sums(call.added, tokens)[:, call.heads or EVERY]
    if "bias" in methods:
        terms["bias"] = call.forward.bias(scheme, query, learned, call.num_heads(query), call.heads)
    if methods & {"content_bias", "weight_factor", "relative_values"}:
        terms["content"] = Content(scheme, learned, call.states, projected, key)
    return terms


def _refuse_part_of_a_row(scheme: Scheme, implementation: str) -> None:
    """Refuse context parallelism of torch and sequence parallelism of DeepSpeed, which replace one of two functions to
    fetch the keys of other processes.
    """
    for function in (nn.functional.scaled_dot_product_attention, ALL_ATTENTION_FUNCTIONS.get(implementation)):
        if str(getattr(function, "__module__", "")).startswith(("torch.distributed.", "deepspeed.")):
            raise UnsupportedPositions(
                f"context parallelism is not supported: the attention of {scheme} sees only this process's part of the "
                "row; use rope_patch.training.context_parallel, or a scheme of static frequencies (pi, yarn)"
            )
