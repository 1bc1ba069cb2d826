"""The rule of the released code, pair by pair, its curve, and rows of several lengths."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import StaticCache

from rope_patch import InvalidField, LaMPE, UnsupportedPositions, get_scheme, patch
from rope_patch.schemes import Checkpoint
from tests.definition import Definition
from tests.runs import (
    assert_close,
    assert_same_gradients,
    cached_logits,
    generated,
    gradients,
    left_padded,
    logits,
    positions_of,
    tokens,
)
from tests.schemes.regions import rotated_distances

CASES = [
    "lampe:window=7,head_keys=5,mapping_length=20,length=40",
    "lampe:window=17,head_keys=4,mapping_length=18",  # plain up to 33 tokens, one more than the training length here
]
UNDRAWN = ["a", "b", "c", "curve_from"]
"""Fields that are given together or not at all."""
FIXED, FOLLOWING = CASES


def mapped(positions, window, head_keys, length=None):
    """The distance that rotates a pair, in whole numbers, for the text of which m are all positions."""

    def distance(m, n):
        l = length or int(m.max()) + 1  # noqa: E741
        if l < 2 * window:
            return m - n
        phi = np.arange(l) * positions // (l - 1)
        edge = min(np.flatnonzero(phi == phi[head_keys])[-1], l - window)
        middle = (m * positions // (l - 1) + window - phi[window] - 1) - n * positions // (l - 1)
        behind = (l - 1 - edge) - phi[l - 1 - edge] - (window - phi[window] - 1)
        return np.where(m - n < window, m - n, np.where(m - n < l - edge, middle, m - behind - n))

    return distance


DEFINITIONS = {
    FIXED: Definition(distance=mapped(20, 7, 5, 40)),
    FOLLOWING: Definition(distance=mapped(18, 17, 4)),
    "lampe:mapping_length=9,window=6,head_keys=0,length=50+logn:training_length=8": Definition(
        distance=mapped(9, 6, 0, 50), query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(8))
    ),
    "lampe:mapping_length=90,window=6,head_keys=6,length=40": Definition(distance=mapped(90, 6, 6, 40)),
    "lampe:a=0.05,b=-1,c=30,window=6,head_keys=3,length=40": Definition(
        distance=mapped(int(30 / (1 + np.exp(-(0.05 * 40 - 1)))), 6, 3, 40)
    ),
}


# --- the released code, llama_cache1.py of scar-on/LaMPE at 34331cf --------------------------------------------------


def released_map(length, use_length, dtype=torch.float32):
    """`map_ids` of 0, 1, ..., which divides in float32."""
    return torch.floor(torch.tensor(float(use_length), dtype=dtype) / (length - 1) * torch.arange(length)).long()


def released_edge(phi, tail):
    """`find_chunk_last_index`."""
    while tail + 1 < len(phi) and phi[tail] == phi[tail + 1]:
        tail += 1
    return tail


def released_prefill(length, use_length, head, tail, dtype):
    """What the prefill scores: for each of its three calls of attention, which pairs and at what distance."""
    phi = released_map(length, use_length, dtype)
    edge = released_edge(phi, tail)
    bias_1 = head - (phi[head] + 1)
    bias_2 = (length - 1 - edge) - phi[length - 1 - edge] - bias_1
    m, n = torch.arange(length)[:, None], torch.arange(length)[None]
    front = length - head
    i = m - head  # number of the query among the last `front`
    return {
        "near": ((m - n >= 0) & (m - n <= head), m - n),  # window_size=[head, 0]
        "middle": (
            (i >= 0) & (n < front) & (n <= i) & (i - n <= front - edge),  # window_size=[front - re_size_2, 0]
            phi[:, None] + bias_1 - phi[None],
        ),
        "tail": ((m >= length - edge) & (n < edge) & (n <= m - (length - edge)), m - bias_2 - n),
    }


def released_curve(name, length):
    """`remap_uselen`."""
    if name != "llama3.1" and length < 8192:
        return 1536
    a, b, c = {
        "llama2": (8.673006440952035e-05, -0.648012322406978, 2489.1055552214357),
        "llama3": (0.00010493097327094324, -2.466638011138158, 6204.409324666837),
        "llama3.1": (4.505261149632588e-05, -2.788576860718702, 82358.52413056031),
    }[name]
    return int(c / (1 + np.exp(-(a * length + b))))


@pytest.mark.parametrize(("length", "use_length"), [(1024, 300), (1500, 1536), (1777, 400), (1999, 1000)])
def test_every_pair_is_that_of_the_released_prefill_which_counts_two_distances_twice(length, use_length):
    head, tail = 512, 200
    scheme = LaMPE(mapping_length=use_length, window=head, head_keys=tail)
    m, n, found = rotated_distances(scheme, length)
    calls = released_prefill(length, use_length, head, tail, torch.float64)
    times = sum(inside.int() for inside, _ in calls.values())
    edge = released_edge(released_map(length, use_length, torch.float64), tail)
    twice = ((m - n == head) | (m - n == length - edge)) & (m >= n)
    assert torch.equal(times, torch.where(twice, 2, (m >= n).int()))
    expected = torch.full_like(found, torch.nan)
    for inside, distance in calls.values():  # of the two, the call for more distant keys
        expected = torch.where(inside, distance.double(), expected)
    assert torch.equal(found[m >= n], expected[m >= n])


@pytest.mark.parametrize(("length", "positions", "moved"), [(16385, 1536, 0), (16385, 1993, 1), (131072, 1993, 9)])
def test_float32_of_the_released_map_moves_few_tokens_by_one_position(length, positions, moved):
    exact = np.arange(length) * positions // (length - 1)
    ahead = released_map(length, positions).numpy() - exact
    assert np.bincount(ahead).tolist() == [length - moved, *([moved] if moved else [])]


@pytest.mark.parametrize("new", [1, 2, 100, 512])
def test_decoding_is_that_of_the_released_code_but_for_the_query_of_the_middle(new):
    prompt, use_length, head, tail = 2000, 700, 512, 200
    scheme = LaMPE(mapping_length=use_length, window=head, head_keys=tail, length=prompt)
    near, middle, far = scheme.segments()
    m, n = torch.tensor([prompt + new - 1]), torch.arange(prompt + new)
    phi = released_map(prompt, use_length, torch.float64)
    edge = released_edge(phi, tail)
    bias_1 = head - (phi[head] + 1)
    bias_2 = (prompt - 1 - edge) - phi[prompt - 1 - edge] - bias_1
    # slices of the cache: the last `head` keys, `map_len` keys from re_size_2 + decode_len on, and those before
    slots = {near: n[-head:], middle: n[edge + new : edge + new + prompt - head - edge], far: n[: edge + new]}
    for region, keys in slots.items():
        assert torch.equal(region.contains(m, n).nonzero()[:, 0], keys)
    assert torch.equal(near.rotated_distance(m, slots[near]), m - slots[near])
    assert torch.equal(far.rotated_distance(m, slots[far]), (m - bias_2 - slots[far]).float())
    held = phi[-1] + bias_1 - phi[slots[middle]]  # the query stays at the prompt's last position
    ahead = middle.rotated_distance(m, slots[middle]) - held
    assert ahead.unique().tolist() == [new * use_length // (prompt - 1)]


@pytest.mark.parametrize("name", ["llama2", "llama3", "llama3.1"])
def test_the_curves_of_the_released_code(name):
    given_below = {} if name == "llama3.1" else {"mapping_length": 1536, "curve_from": 8192}
    a, b, c = {
        "llama2": (8.673006440952035e-05, -0.648012322406978, 2489.1055552214357),
        "llama3": (0.00010493097327094324, -2.466638011138158, 6204.409324666837),
        "llama3.1": (4.505261149632588e-05, -2.788576860718702, 82358.52413056031),
    }[name]
    scheme = LaMPE(a=a, b=b, c=c, **given_below)
    lengths = [1024, 8191, 8192, 8193, 16384, 32768, 65536, 131072, 10**9]
    assert [scheme.positions_of(length) for length in lengths] == [released_curve(name, length) for length in lengths]


def test_a_curve_is_found_again_from_its_values():
    a, b, c = 0.00010493097327094324, -2.466638011138158, 6204.409324666837
    found = LaMPE.fit({length: c / (1 + np.exp(-(a * length + b))) for length in (8192, 16384, 32768, 65536, 131072)})
    assert found == pytest.approx({"a": a, "b": b, "c": c}, rel=1e-4)


def test_a_curve_between_points_has_the_least_squares():
    best = {256: 64, 512: 100, 1024: 128, 2048: 120}
    found = LaMPE.fit(best)

    def squares(a, b, c):
        return sum((c / (1 + np.exp(-(a * length + b))) - value) ** 2 for length, value in best.items())

    least = squares(**found)
    near = [
        {name: found[name] * (1 + step) for name, step in zip("abc", steps, strict=True)}
        for steps in itertools.product((-0.1, -0.02, 0, 0.02, 0.1), repeat=3)
        if any(steps)
    ]
    assert all(squares(**other) > least for other in near)


@pytest.mark.parametrize(
    "best", [{}, {512: 96, 1024: 128}, {256: 96, 512: 96, 1024: 96}, {256: 128, 512: 96, 1024: 64}]
)
def test_there_is_no_curve_through_two_lengths_or_where_fewer_positions_are_better(best):
    assert LaMPE.fit(best) == {}


# --- the scheme -------------------------------------------------------------------------------------------------------


@given(
    length=st.integers(2, 90),
    positions=st.integers(1, 120),
    window=st.integers(1, 40),
    head_keys=st.integers(0, 40),
)
def test_distances_are_defined_for_all_fields(length, positions, window, head_keys):
    head_keys = min(head_keys, window)
    m, n, found = rotated_distances(LaMPE(positions, window=window, head_keys=head_keys), length)
    expected = mapped(positions, window, head_keys)(m.numpy(), n.numpy())
    assert np.array_equal(found[m >= n].numpy(), expected[(m >= n).numpy()])


def test_open_fields_follow_from_the_checkpoint():
    assert LaMPE().resolve(Checkpoint(8192, 32, 8192)) == LaMPE(3072, window=512, head_keys=200)
    assert LaMPE(a=1, b=0, c=9).resolve(Checkpoint(256, 4, 256)) == LaMPE(a=1, b=0, c=9, window=64, head_keys=25)
    assert LaMPE(3, window=9, head_keys=0).resolve(Checkpoint(256, 4, 256)) == LaMPE(3, window=9, head_keys=0)


def test_only_an_open_length_follows_the_text():
    assert LaMPE().length_dependent
    assert LaMPE().regions_by_length
    fixed = LaMPE(length=50)
    assert not fixed.length_dependent
    assert not fixed.regions_by_length
    assert fixed.at_length(9) is fixed
    composed = get_scheme(f"{FOLLOWING}+yarn:factor=2")
    assert composed.regions_by_length
    assert not composed.at_length(60).regions_by_length
    assert not get_scheme("dynamic_yarn+rerope:window=9").regions_by_length


@pytest.mark.parametrize("attention", ["auto", "oracle", "chunked", "segmented", "merged"])
def test_a_text_is_read_as_one_of_its_length(llama, attention):
    with patch(llama, FOLLOWING + ",length=90", attention=attention):
        expected, wanted = logits(llama, tokens(90)), gradients(llama, tokens(90))
    with patch(llama, FOLLOWING, attention=attention):
        assert_close(logits(llama, tokens(90)), expected)
        assert_same_gradients(gradients(llama, tokens(90)), wanted)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("attention", ["auto", "oracle", "segmented"])
def test_rows_of_several_lengths_are_read_as_they_are_alone(llama, attention, implementation):
    rows = [tokens(length, seed=length) for length in (61, 90, 12, 61)]
    batch, mask = left_padded(rows)
    llama.set_attn_implementation(implementation)
    with patch(llama, FOLLOWING, attention=attention):
        found = logits(llama, batch, attention_mask=mask, position_ids=positions_of(mask))
        by_itself = logits(llama, batch, attention_mask=mask)  # positions are counted for it
        for place, row in enumerate(rows):
            for batched in (found, by_itself):
                assert_close(batched[place, mask[place].bool()][None], logits(llama, row))
        labels = batch.where(positions_of(mask) > 0, -100)  # no pad predicts a first token
        llama(batch, attention_mask=mask, labels=labels).loss.backward()
        joint = [weight.grad for weight in llama.parameters()]
        llama.zero_grad(set_to_none=True)
        sizes = sum(row.shape[1] - 1 for row in rows)
        for row in rows:
            (llama(row, labels=row).loss * (row.shape[1] - 1) / sizes).backward()
        for found, weight in zip(joint, llama.parameters(), strict=True):
            torch.testing.assert_close(found, weight.grad, atol=1e-5, rtol=1e-3)


def test_weights_of_eager_attention_come_back_in_the_order_of_the_rows(llama):
    rows = [tokens(length, seed=length) for length in (90, 61, 90)]
    batch, mask = left_padded(rows)
    llama.set_attn_implementation("eager")
    with patch(llama, FOLLOWING), torch.no_grad():
        found = llama(batch, attention_mask=mask, position_ids=positions_of(mask), output_attentions=True).attentions
        for place, row in enumerate(rows):
            alone = llama(row, output_attentions=True).attentions
            for of_batch, of_row in zip(found, alone, strict=True):
                start = 90 - row.shape[1]
                assert_close(of_batch[place, :, start:, start:], of_row[0])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_fixed_length_decodes_as_the_whole_text(llama, cache):
    ids, spec = tokens(60, rows=3), FOLLOWING + ",length=60"
    with patch(llama, spec):
        kept = StaticCache(config=llama.config, max_cache_len=64) if cache == "static" else None
        assert_close(cached_logits(llama, ids, [40, 7, *[1] * 13], cache=kept), logits(llama, ids))


def test_every_decoded_token_of_a_batch_reads_the_text_so_far(llama):
    rows = [tokens(length, seed=length) for length in (52, 33, 60)]
    batch, mask = left_padded(rows)
    with patch(llama, FOLLOWING):
        found = generated(llama, batch, 6, attention_mask=mask)
        for place, row in enumerate(rows):
            assert torch.equal(found[place : place + 1], generated(llama, row, 6))


def test_packed_rows_are_refused_unless_the_length_is_fixed(llama):
    ids = tokens(50)
    positions = torch.cat([torch.arange(30), torch.arange(20)])[None]
    with (
        patch(llama, FOLLOWING),
        pytest.raises(UnsupportedPositions, match=r"packs several texts.*set length=\.\.\."),
    ):
        logits(llama, ids, position_ids=positions)
    with patch(llama, FOLLOWING + ",length=50"):
        apart = torch.cat([logits(llama, ids[:, :30]), logits(llama, ids[:, 30:])], dim=1)
        assert_close(logits(llama, ids, position_ids=positions), apart)


def test_a_compiled_graph_is_refused_unless_the_length_is_fixed(llama):
    with patch(llama, FOLLOWING):
        compiled = torch.compile(llama, backend="eager")
        with pytest.raises(UnsupportedPositions, match=r"follow the length of the text.*set length=\.\.\."):
            logits(compiled, tokens(60))
    torch._dynamo.reset()
    with patch(llama, FOLLOWING + ",length=60"):
        expected = logits(llama, tokens(60))
        assert_close(logits(torch.compile(llama, fullgraph=True, backend="eager"), tokens(60)), expected)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mapping_length": 0}, "mapping_length=0"),
        ({"window": 0}, "window=0"),
        ({"window": 4, "head_keys": 5}, "head_keys must be at most window=4"),
        ({"length": 1}, "length=1"),
        ({"a": 0, "b": 1, "c": 1}, "a=0"),
        ({"a": 1, "b": 101, "c": 1}, "b=101"),
        ({"a": 1, "c": 1}, "the curve needs a, b and c; b missing"),
        ({"c": 1}, "a and b missing"),
        ({"mapping_length": 5, "a": 1, "b": 1, "c": 1}, "curve_from=None"),
        ({"curve_from": 5, "a": 1, "b": 1, "c": 1}, "curve_from=5"),
        ({"curve_from": 5, "mapping_length": 1}, "curve_from=5"),
    ],
)
def test_wrong_fields_are_named(fields, named):
    with pytest.raises(InvalidField, match=named):
        LaMPE(**fields)
