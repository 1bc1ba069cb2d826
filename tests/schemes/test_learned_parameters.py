"""What holds for the learned parameters of every scheme that acts in attention."""

import pytest
import torch

from rope_patch import get_scheme
from rope_patch.schemes import scheme_from_dict
from tests.schemes.pairs import SHAPE, at_start, make_pairs, trained

SPECS = [
    "shaw:max_distance=4",
    "shaw:max_distance=4,shared_heads=False",
    "shaw:values=False",
    "xl",
    "xl:untied=True",
    "xl:clamp_len=3",
    "deberta:max_distance=4",
    "deberta:max_distance=16,buckets=8,scaled=False",
    "cope:max_positions=5",
    "urpe:max_distance=4",
    "urpe:num_buckets=8",
    "kerple",
    "kerple:variant=power,per_layer=False",
    "fire",
    "fire:per_layer=False",
    "alibi:learned=True",
    "t5:bidirectional=True",
    "t5:per_layer=True",
]


def effect(scheme, pairs, weights):
    """Output of one attention, for values that are the first dimensions of the keys."""
    scores = pairs.scores
    if "bias" in scheme.methods:
        scores = scores + scheme.bias(pairs.distance, SHAPE.num_heads, weights).transpose(0, 1)
    if "content_bias" in scheme.methods:
        scores = scores + scheme.content_bias(pairs, weights)
    attention = scores.masked_fill(~pairs.seen, -torch.inf).softmax(dim=-1)
    if "weight_factor" in scheme.methods:
        attention = attention * scheme.weight_factor(pairs.distance, SHAPE.num_heads, weights).transpose(0, 1)
    output = attention @ torch.nn.functional.pad(pairs.key, (0, 1)).to(attention.dtype).sin()
    if "relative_values" in scheme.methods:
        output = output + scheme.relative_values(attention, pairs.distance, weights)
    return output


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("start", [at_start, trained])
def test_gradients_reach_every_parameter(spec, start):
    scheme = get_scheme(spec)
    weights = start(scheme)
    effect(scheme, make_pairs(range(9), range(9)), weights).square().sum().backward()
    for name, weight in weights.items():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.any(), name


@pytest.mark.parametrize("spec", SPECS)
def test_parameters_start_as_float32_and_follow_the_seed_alone(spec):
    scheme = get_scheme(spec)
    first, again = (scheme.parameters(SHAPE, torch.Generator().manual_seed(5)) for _ in range(2))
    assert first
    assert set(scheme.shared) <= {*first, "value_table", "absolute_positions"}
    for name, value in first.items():
        assert value.dtype == torch.float32
        assert value.device.type == "cpu"
        assert torch.equal(value, again[name])
        assert not hasattr(torch.nn.Module, name)


@pytest.mark.parametrize("spec", SPECS)
def test_a_later_block_of_queries_gets_what_the_whole_gives(spec):
    scheme = get_scheme(spec)
    weights, whole = trained(scheme), make_pairs(range(9), range(9))
    for rows in (slice(4, 9), slice(8, 9)):
        block = type(whole)(
            whole.query[:, :, rows],
            whole.key,
            whole.m[:, rows],
            whole.n,
            whole.scores[:, :, rows],
            whole.seen[:, :, rows],
            whole.scaling,
        )
        torch.testing.assert_close(effect(scheme, block, weights), effect(scheme, whole, weights)[:, :, rows])


@pytest.mark.parametrize("spec", SPECS)
def test_half_precision_parameters_are_computed_with_in_float32(spec):
    scheme, pairs = get_scheme(spec), make_pairs(range(9), range(9))
    weights = {name: weight.detach().bfloat16() for name, weight in trained(scheme).items()}
    widened = {name: weight.float() for name, weight in weights.items()}
    narrow = type(pairs)(
        pairs.query.bfloat16(), pairs.key.bfloat16(), pairs.m, pairs.n, pairs.scores.float(), pairs.seen, pairs.scaling
    )
    found, expected = effect(scheme, narrow, weights), effect(scheme, narrow, widened)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("spec", SPECS)
def test_it_compiles_as_one_graph(spec):
    scheme, pairs = get_scheme(spec), make_pairs(range(9), range(9))
    weights = trained(scheme)

    def run(query, key, scores):
        return effect(scheme, type(pairs)(query, key, pairs.m, pairs.n, scores, pairs.seen, pairs.scaling), weights)

    inputs = (pairs.query, pairs.key, pairs.scores)
    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(*inputs), run(*inputs))


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_a_batch_have_positions_of_their_own(spec):
    scheme, pairs = get_scheme(spec), make_pairs(range(9), range(9))
    m, n = pairs.m + torch.tensor([0, 2])[:, None, None], pairs.n + torch.tensor([0, 1])[:, None, None]
    weights = trained(scheme)
    both = type(pairs)(pairs.query, pairs.key, m, n, pairs.scores, pairs.seen, pairs.scaling)
    for row in range(2):
        own = slice(row, row + 1)
        alone = type(pairs)(
            pairs.query[own], pairs.key[own], m[own], n[own], pairs.scores[own], pairs.seen, pairs.scaling
        )
        torch.testing.assert_close(effect(scheme, both, weights)[own], effect(scheme, alone, weights))


@pytest.mark.parametrize("spec", SPECS)
def test_it_survives_text_and_dict(spec):
    scheme = get_scheme(spec)
    assert get_scheme(str(scheme)) == scheme_from_dict(scheme.to_dict()) == scheme
