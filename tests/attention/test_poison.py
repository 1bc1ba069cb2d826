"""Memory that nobody wrote is full of NaN in these tests, so that none of it enters a result unseen."""

import pytest
import torch

from tests.poison import ALLOCATIONS

SOME = torch.ones(3, 2)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda dtype: torch.empty(3, 2, dtype=dtype),
        lambda dtype: torch.empty_like(SOME, dtype=dtype),
        lambda dtype: torch.empty_strided((3, 2), (2, 1), dtype=dtype),
        lambda dtype: SOME.new_empty(3, 2, dtype=dtype),
        lambda dtype: SOME.new_empty_strided((3, 2), (2, 1), dtype=dtype),
    ],
    ids=[name for _, name in ALLOCATIONS],
)
def test_what_nobody_wrote_is_no_number(allocate):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert allocate(dtype).isnan().all()
    for dtype in (torch.int32, torch.int64, torch.uint8):
        assert (allocate(dtype) == torch.iinfo(dtype).max).all()
