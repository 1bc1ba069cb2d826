"""Tables of no turn: no kernel where a module multiplies by them, plain numbers everywhere else."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.cohere import modeling_cohere
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from rope_patch.mounting.identity_table import IdentityTable

ONE, ZERO = IdentityTable.from_tensor(torch.ones(1, 7, 8), 1), IdentityTable.from_tensor(torch.zeros(1, 7, 8), 0)


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::mul", "aten::add", "aten::sub")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", [modeling_llama, modeling_cohere, modeling_gpt_neox], ids=lambda m: m.__name__[-6:])
def test_the_rotation_of_transformers_computes_no_product(family):
    query, key = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8)
    with Products() as products:
        found = family.apply_rotary_pos_emb(query, key, ONE, ZERO)
    assert products.count == 0
    for states, expected in zip(found, (query, key), strict=True):
        assert type(states) is torch.Tensor
        assert torch.equal(states, expected)


def test_what_is_not_spared_is_computed_with_the_numbers():
    x = torch.randn(2, 4, 7, 8)
    assert (x.to(torch.bfloat16) * ONE).dtype == torch.float32  # of another dtype
    assert torch.equal(x[:, :, :1] * ONE[:, None], x[:, :, :1].expand(-1, -1, 7, -1))  # of another shape
    assert torch.equal(ONE * x[0, :1], x[0, :1])  # the other way round
    assert torch.equal(x + ONE, x + 1)
    assert torch.equal(x - ZERO, x)
    assert torch.equal(torch.cat([ONE, ZERO]), torch.cat([torch.ones(1, 7, 8), torch.zeros(1, 7, 8)]))
    assert torch.equal(-ONE, -torch.ones(1, 7, 8))
    assert torch.equal(ONE.exp(), torch.ones(1, 7, 8).exp())


def test_numbers_stay_known_through_what_shapes_them():
    for made in (ONE.unsqueeze(1), ONE[..., :4], ONE.to(torch.float64), *ONE.chunk(2, dim=-1)):
        assert isinstance(made, IdentityTable)
        assert made.number == 1
