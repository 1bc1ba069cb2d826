"""Parts of the keys merged by log-sum-exp: by the kernel, and where there is none."""

import pytest
import torch

from rope_patch.attention import merging
from rope_patch.attention.chunk_runs import of_blocks
from tests.attention.test_fused import DEVICE, needs_triton, run

__all__ = ["run"]


def merged(rows: int, dim: int, dtype: str) -> dict[str, float]:
    """The largest errors of output and log-sum-exp where a part is folded into some rows of an output."""
    random, start = torch.Generator().manual_seed(0), 10

    def states(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.randn(2, length, 3, dim, generator=random).to(DEVICE, getattr(torch, dtype)).transpose(1, 2)
        return out, torch.randn(2, 3, length, generator=random).to(DEVICE)

    (out, lse), (part, part_lse) = states(rows + start), states(rows + 7)
    untouched, (some, of_some) = out[:, :, :start].clone(), (x[:, :, start:] for x in (out, lse))
    other, of_other = (x[:, :, :rows] for x in (part, part_lse))
    share = (of_other.double() - of_some.double()).sigmoid()[..., None]
    expected = some.double().lerp(other.double(), share), of_some.double().logaddexp(of_other.double())
    merging._fold(some, of_some, other, of_other)
    assert torch.equal(out[:, :, :start], untouched)
    names = zip(("output", "log-sum-exp"), (some, of_some), expected, strict=True)
    return {name: float((one.double() - wanted).abs().max()) for name, one, wanted in names}


@needs_triton
@pytest.mark.parametrize(("rows", "dim", "dtype"), [(70, 16, "float32"), (32, 80, "float16"), (3, 128, "float16")])
def test_a_part_is_folded_in(run, rows, dim, dtype):
    errors = run(merged, rows, dim, dtype)
    assert errors["output"] < (4e-3 if dtype == "float16" else 1e-5)
    assert errors["log-sum-exp"] < 1e-5
    assert run(merging.objection, torch.device(DEVICE), getattr(torch, dtype), dim) == ""


def merged_in_blocks(dim: int) -> float:
    """The largest error where the blocks of a text, with gaps between them, are the batch of the kernel."""
    random, (size, step, count) = torch.Generator().manual_seed(0), (10, 20, 3)
    length = (count - 1) * step + size
    out = torch.randn(1, length, 2, dim, generator=random).to(DEVICE, torch.float16).transpose(1, 2)
    lse = torch.randn(1, 2, length, generator=random).to(DEVICE)
    part = torch.randn(count, 2, size, dim, generator=random).to(DEVICE, torch.float16)
    part_lse = torch.randn(count, 2, size, generator=random).to(DEVICE)
    expected = out.double()
    for number in range(count):
        some = slice(number * step, number * step + size)
        share = (part_lse[number].double() - lse[0, :, some].double()).sigmoid()[..., None]
        expected[0, :, some] = expected[0, :, some].lerp(part[number].double(), share)
    merging._fold(*(of_blocks(x, size, step)[0] for x in (out, lse)), part, part_lse)
    return float((out.double() - expected).abs().max())


@needs_triton
def test_the_blocks_of_a_text_are_folded_in(run):
    assert run(merged_in_blocks, 16) < 4e-3


def test_a_part_is_merged_in_float32_where_there_is_no_kernel(monkeypatch):
    out, part = torch.randn(2, 1, 2, 30, 16).bfloat16()
    lse, part_lse = torch.randn(2, 1, 2, 30)
    expected = out.double().lerp(part.double(), (part_lse - lse).double().sigmoid()[..., None])
    sum_of = merging.summed(out)
    assert sum_of.dtype == torch.float32
    merging.merge(sum_of, lse, part, part_lse)
    assert (sum_of - expected).abs().max() < 1e-6
