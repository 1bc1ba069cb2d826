"""What cuDNN computes, from its documented arguments, in plain products: torch's operators and those of
`nvidia-cudnn-frontend` 1.32.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import torch

BY_CUDNN, BY_FLASH = 3, 1
"""What `torch._fused_sdp_choice` returns."""


def scores_of(q, k, scale, seen):
    """`(batch, heads, q_len, kv_len)`, -inf where a pair is not seen."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q.double() @ k.mT * scale).masked_fill(~seen, -math.inf)


def attention(q, k, v, scale, seen):
    """Output, zeros where nothing is seen, and log-sum-exp `(batch, heads, q_len)`, -inf there."""
    scores = scores_of(q, k, scale, seen)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.clamp(min=-1e30)[..., None]).exp()
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return (weights @ v).to(q.dtype), lse.float()


def gradients(grad, q, k, v, out, lse, scale, seen):
    """Gradients of queries, keys and values by the given output and log-sum-exp, whichever keys these are of."""
    shared = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(shared, dim=1) for x in (k, v))
    weights = (scores_of(q, k, scale, seen) - lse.double().clamp(min=-1e30)[..., None]).exp()
    delta = (grad.double() * out.double()).sum(-1, keepdim=True)
    inner = weights * (grad.double() @ values.mT - delta) * scale
    of_k, of_v = inner.mT @ q.double(), weights.mT @ grad.double()
    of_k, of_v = (x.unflatten(1, (-1, shared)).sum(dim=2) for x in (of_k, of_v))
    return (inner @ keys).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


def diagonals(q, k):
    """Index of the key minus that of the query, `(q_len, kv_len)`."""
    return torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]


class Torch:
    """`aten._scaled_dot_product_cudnn_attention` and its backward, which know causality alone; `calls` has shapes."""

    def __init__(self):
        self.calls = []

    def seen(self, q, k, causal):
        assert not causal or q.shape[2] == k.shape[2]
        assert q.shape[3] == k.shape[3]
        self.calls.append((tuple(q.shape), tuple(k.shape), causal))
        return diagonals(q, k) <= 0 if causal else torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)

    def forward(self, q, k, v, bias, with_lse, dropout, causal, *, scale):
        assert with_lse
        out, lse = attention(q, k, v, scale, self.seen(q, k, causal))
        return out, lse[..., None], None, None, q.shape[2], k.shape[2], None, None, None

    def backward(
        self, grad, q, k, v, out, lse, _seed, _offset, bias, _q, _k, longest_q, longest_k, _, causal, *, scale
    ):
        assert (longest_q, longest_k) == (q.shape[2], k.shape[2])
        assert lse.is_contiguous()
        return gradients(grad, q, k, v, out, lse[..., 0], scale, self.seen(q, k, causal))

    def put(self, monkeypatch):
        """In the place of torch's operators, where SDPA would take them."""
        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", self.forward)
        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", self.backward)
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, **options: BY_CUDNN)
        return self


class Frontend:
    """`torch.ops.cudnn.sdpa_fwd` and `sdpa_bwd`; `calls` has what decides which plan serves a call, `batches` the batch
    of each, and `stairs` the lengths of keys of those that have them.
    """

    def __init__(self):
        self.calls, self.batches, self.stairs = [], [], []

    def seen(self, q, k, is_causal, causal_bottom_right, window_left, window_right):
        rows, keys = q.shape[2], k.shape[2]
        if causal_bottom_right and not (is_causal or window_left >= 0 or window_right >= 0):
            raise ValueError("causal_bottom_right only re-anchors an active diagonal band")
        if is_causal and window_right > 0:
            raise ValueError("is_causal masks every future column")
        if (causal_bottom_right or window_left >= 0) and rows > keys:
            raise RuntimeError("max_s_q > max_s_kv")
        if window_left == 0:
            raise RuntimeError("the left bound has to be greater than zero")
        strides = tuple(x.stride()[1:] for x in (q, k))
        self.batches.append(len(q))
        self.calls.append(((rows, keys), (is_causal, causal_bottom_right, window_left, window_right), strides))
        beyond = diagonals(q, k) - (keys - rows if causal_bottom_right else 0)
        right = window_right if window_right >= 0 else (0 if is_causal else keys)
        return (beyond <= right) & (beyond > -(window_left if window_left >= 0 else rows + keys))

    def sdpa_fwd(
        self,
        q,
        k,
        v,
        attn_scale,
        is_causal=False,
        causal_bottom_right=False,
        window_left=-1,
        window_right=-1,
        seq_len_q=None,
        seq_len_kv=None,
        return_lse=True,
    ):
        assert return_lse
        assert isinstance(attn_scale, float)
        seen = self.seen(q, k, is_causal, causal_bottom_right, window_left, window_right)
        if seq_len_kv is not None:
            assert seq_len_q.dtype == seq_len_kv.dtype == torch.int32
            assert seq_len_q.shape == seq_len_kv.shape == (len(q),)
            assert k.stride(0) == v.stride(0) == 0 or len(q) == 1, "copies of the keys"
            self.stairs.append(seq_len_kv.tolist())
            seen = seen & (torch.arange(k.shape[2]) < seq_len_kv.view(-1, 1, 1, 1))
        out, lse = attention(q, k, v, attn_scale, seen)
        if seq_len_q is not None:  # nobody may read the rows behind the end
            behind = torch.arange(q.shape[2]) >= seq_len_q.view(-1, 1, 1)
            out, lse = out.masked_fill(behind[..., None], math.nan), lse.masked_fill(behind, math.nan)
        return out, lse[..., None]

    def sdpa_bwd(
        self,
        grad_out,
        q,
        k,
        v,
        o,
        lse,
        attn_scale,
        is_causal=False,
        causal_bottom_right=False,
        window_left=-1,
        window_right=-1,
        is_deterministic=False,
    ):
        assert (lse.dtype, lse.shape) == (torch.float32, (*q.shape[:3], 1))
        assert grad_out.dtype == o.dtype == q.dtype
        seen = self.seen(q, k, is_causal, causal_bottom_right, window_left, window_right)
        return gradients(grad_out, q, k, v, o, lse[..., 0], attn_scale, seen)

    def put(self, monkeypatch):
        """In the place of the package, which registers its operators when it is imported."""
        for name in ("cudnn", "cudnn.sdpa", "cudnn.sdpa.fwd", "cudnn.sdpa.fwd.torch_op"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(torch.ops, "cudnn", self, raising=False)
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, **options: BY_CUDNN)
        return self


class Flex:
    """`cudnn.flex_attention`: `create_mask_plan`, `flex_attn_func`, and the backward behind it."""

    def __init__(self):
        self.plans, self.calls = 0, 0

    def create_mask_plan(self, mask_func, q, k, v, *, build_backward):
        assert q.ndim == k.ndim == v.ndim == 4
        (batch, q_length, heads), kv_length = q.shape[:3], k.shape[1]
        assert mask_func.dtype == torch.int32
        assert mask_func.is_contiguous()
        assert mask_func.shape[0] in (1, heads)
        assert mask_func.shape[1] % 2 == 1
        assert mask_func.shape[2] == batch * q_length
        self.plans += 1
        slots, ends = torch.arange(kv_length), mask_func[0].view(-1, batch, q_length)[..., None]
        seen = slots < ends[0]
        for start, stop in zip(ends[1::2], ends[2::2], strict=True):
            seen = seen | ((slots >= start) & (slots < stop))
        shapes = [tuple(x.shape) for x in (q, k, v)]
        return SimpleNamespace(seen=seen[:, None], backward=build_backward, shapes=shapes)

    def _heads_first(self, plan, q, k, v, *others):
        assert plan.shapes == [tuple(x.shape) for x in (q, k, v)]
        assert all(x.stride(-1) == 1 for x in (q, k, v, *others))
        self.calls += 1
        return [x.transpose(1, 2) for x in (q, k, v, *others)]

    def flex_attn_func(self, q, k, v, *, mask_plan, softmax_scale, return_lse):
        assert return_lse
        out, lse = attention(*self._heads_first(mask_plan, q, k, v), softmax_scale, mask_plan.seen)
        return out.transpose(1, 2), lse

    def backward(self, q, k, v, o, do, lse, *, mask_plan, softmax_scale, deterministic):
        assert mask_plan.backward
        assert (lse.dtype, lse.shape) == (torch.float32, (q.shape[0], q.shape[2], q.shape[1]))
        q, k, v, o, do = self._heads_first(mask_plan, q, k, v, o, do)
        found = gradients(do, q, k, v, o, lse, softmax_scale, mask_plan.seen)
        return tuple(x.transpose(1, 2) for x in found)

    def put(self, monkeypatch):
        """In the place of the package."""
        module, execution = ModuleType("cudnn.flex_attention"), ModuleType("cudnn.flex_attention.execution")
        module.create_mask_plan, module.flex_attn_func = self.create_mask_plan, self.flex_attn_func
        execution._flex_attention_backward = self.backward
        for each in (ModuleType("cudnn"), module, execution):
            monkeypatch.setitem(sys.modules, each.__name__, each)
        return self
