"""Another implementation of flash, activated by the user through torch's own registry. The one here runs on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention

from rope_patch import RopePatchWarning
from rope_patch.attention import kernels
from rope_patch.attention.cudnn_kernels import CuDNN, FlashWithoutWindows
from rope_patch.attention.pieces import Tile
from rope_patch.attention.tile_kernels import Dense, FlashCUDA, Merged, Work
from rope_patch.attention.trials import Trial

NAME, DIM = "of_a_test", 16


class Flash:
    """Its kernels, from their definition, with what they were asked for.

    Args:
        windows: whether it has gradients of a window, as FlashAttention-4 has in torch 2.13 and not in 2.11.
    """

    def __init__(self, windows: bool) -> None:
        self.windows = windows
        self.asked: list[tuple[int | None, int | None]] = []

    def register(self):
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("_flash_attention_forward", self.forward, "CPU")
        self.library.impl("_flash_attention_backward", self.backward, "CPU")
        return self

    def remove(self):
        self.library._destroy()

    def weights(self, q, k, causal, scale, left, right):
        """The scores `(batch, heads, q_len, kv_len)`."""
        k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
        beyond = torch.arange(k.shape[1])[None] - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
        seen = torch.ones_like(beyond, dtype=torch.bool)
        if causal or (right is not None and right >= 0):
            seen &= beyond <= (right or 0)
        if left is not None and left >= 0:
            seen &= beyond >= -left
        return scores.masked_fill(~seen, -torch.inf)

    def forward(self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, **options):
        scores = self.weights(q, k, causal, scale, options.get("window_size_left"), options.get("window_size_right"))
        lse = scores.logsumexp(dim=-1)
        v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        out = torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v.float()).to(q.dtype)
        nothing = torch.zeros((), dtype=torch.uint64)
        return out, lse, torch.zeros(2, dtype=torch.uint64), nothing, torch.empty(0)

    def backward(
        self, grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, state, unused, *, scale, **options
    ):
        left, right = options.get("window_size_left"), options.get("window_size_right")
        self.asked.append((left, right))
        if not self.windows and (left is not None or right is not None):
            raise RuntimeError("backward unsupported: windowed attention not supported")
        share = q.shape[2] // k.shape[2]
        wide_k, wide_v = (x.float().repeat_interleave(share, dim=2) for x in (k, v))
        weights = (self.weights(q, k, causal, scale, left, right) - lse[..., None]).exp()
        delta = (grad.float() * out.float()).sum(dim=-1).transpose(1, 2)[..., None]
        inner = weights * (torch.einsum("bqhd,bkhd->bhqk", grad.float(), wide_v) - delta) * scale
        of_k = torch.einsum("bhqk,bqhd->bkhd", inner, q.float()).unflatten(2, (-1, share)).sum(dim=3)
        of_v = torch.einsum("bhqk,bqhd->bkhd", weights, grad.float()).unflatten(2, (-1, share)).sum(dim=3)
        return torch.einsum("bhqk,bkhd->bqhd", inner, wide_k).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


@pytest.fixture
def activated(monkeypatch):
    """Activates such an implementation."""

    def activate(windows):
        flash = Flash(windows)
        monkeypatch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, NAME, flash.register)
        attention.activate_flash_attention_impl(NAME)
        return flash

    yield activate
    if attention.current_flash_attention_impl() == NAME:
        attention.restore_flash_attention_impl()


@pytest.fixture
def chosen(monkeypatch):
    """The kernel for a call on a GPU, whose trial is on the CPU."""

    def compare(kernel, device, *case):
        return kernels._compared(kernel, torch.device("cpu"), *case)

    monkeypatch.setattr(kernels, "objection", Trial("A kernel of tiles", compare, 0.03))
    monkeypatch.setattr(kernels, "_of_cudnn", lambda: ())
    states = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 4, 24, DIM))
    return lambda: kernels.kernel_for(states, states, masked=False)


def test_one_that_has_windows_is_used_as_torchs_own(activated, chosen):
    flash = activated(windows=True)
    assert chosen() == FlashCUDA(NAME)
    assert any(window != (None, None) for window in flash.asked)


def test_one_without_gradients_of_windows_is_never_asked_for_them(activated, chosen):
    flash = activated(windows=False)
    with pytest.warns(RopePatchWarning, match="not used .*of_a_test.*windowed attention not supported"):
        assert chosen() == FlashWithoutWindows(NAME)
    flash.asked.clear()
    assert chosen() == FlashWithoutWindows(NAME)
    assert flash.asked == []  # tried once


def test_each_implementation_has_a_trial_of_its_own(activated, chosen):
    """An activation after the first call, and one that was taken back."""
    activated(windows=True)
    assert chosen() == FlashCUDA(NAME)
    attention.restore_flash_attention_impl()
    with pytest.warns(RopePatchWarning, match=r"FlashCUDA\(implementation=None\)"):  # torch's own needs a GPU
        assert isinstance(chosen(), Dense)


def test_cudnn_before_it_knows_which_flash_is_active(activated, chosen, monkeypatch):
    activated(windows=True)
    monkeypatch.setattr(kernels, "_of_cudnn", lambda: (CuDNN,))
    monkeypatch.setattr(CuDNN, "_takes", lambda self, work: False)
    assert chosen() == CuDNN(NAME)


@pytest.mark.parametrize(
    "tile",
    [
        Tile(0, 24, 0, 24),
        Tile(0, 24, 0, 24, "causal"),
        Tile(0, 24, 0, 24, "band", 0, 7),
        Tile(8, 24, 1, 24, "band", 0, 8, distance=7),
        Tile(0, 16, 0, 24, "band", 0, 24, distance=8),
        Tile(4, 20, 0, 16, "band", 3, 9, distance=4),
    ],
)
def test_its_gradients_are_the_definition(activated, tile):
    activated(windows=False)
    q, grad = (torch.randn(2, 4, tile.q1 - tile.q0, DIM) for _ in range(2))
    k, v = (torch.randn(2, 2, tile.k1 - tile.k0, DIM) for _ in range(2))
    work = Work(q, k, v, tile, 0.3)
    out, lse = Dense().forward(work)
    given = Merged(out, lse, grad)
    for one, other in zip(FlashWithoutWindows().backward(work, given), Dense().backward(work, given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
