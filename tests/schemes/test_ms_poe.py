import dataclasses

import numpy as np
import pytest
import torch

from rope_patch import (
    AlreadyPatched,
    InvalidField,
    NotExpressible,
    PerLayer,
    UnsupportedModel,
    export_rope_parameters,
    from_pretrained,
    get_scheme,
    patch,
    plan_mounts,
    rank_heads,
    unpatch,
)
from rope_patch.attention import turner
from rope_patch.attention.executors import merged
from rope_patch.models.cached_keys import CachedKeys
from rope_patch.models.find_stacks import read_stack
from rope_patch.ranking import awareness
from rope_patch.typing import RotarySpec
from tests.definition import Definition, defined_logits
from tests.families import build
from tests.models import absolute_families, t5_families
from tests.runs import tokens

CASES = ["ms_poe", "ms_poe:min_factor=1,max_factor=4,order=[2,0,3,1]"]

LLAMA = RotarySpec(128, 10000.0, 4096)


def by_head(low, high, ranks):
    """Each head's frequencies, by its rank among the heads: equal steps from the first to the last."""
    return lambda head, theta: theta / (low + (high - low) * ranks[head] / (len(ranks) - 1))


DEFINITIONS = {
    CASES[0]: Definition(head_frequencies=by_head(1.2, 1.8, (0, 1, 2, 3))),
    # head 2 comes first, then 0, 3 and 1: so the rank of head 0 is 1, of head 1 it is 3, ...
    CASES[1]: Definition(head_frequencies=by_head(1, 4, (1, 3, 0, 2))),
    "ms_poe+logn": Definition(
        head_frequencies=by_head(1.2, 1.8, (0, 1, 2, 3)),
        query_scale=lambda m: np.maximum(1, np.log(m + 1) / np.log(32)),
    ),
    "ms_poe+rerope:window=8": Definition(
        head_frequencies=by_head(1.2, 1.8, (0, 1, 2, 3)), distance=lambda m, n: np.clip(m - n, -8, 8)
    ),
    "ms_poe+window:window=12": Definition(
        head_frequencies=by_head(1.2, 1.8, (0, 1, 2, 3)), visible=lambda m, n: m - n < 12
    ),
}


@pytest.mark.parametrize("heads", [1, 2, 12, 32])
def test_factors_ascend_with_the_rank_of_a_head_in_equal_steps(heads):
    order = np.random.default_rng(heads).permutation(heads).tolist()
    found = get_scheme("ms_poe", order=order).frequencies(LLAMA).inv_freq
    assert found.shape == (1, heads, 64)
    theta = 10000.0 ** (-np.arange(64) / 64)
    for rank, head in enumerate(order):
        factor = 1.2 + 0.6 * rank / max(1, heads - 1)
        np.testing.assert_allclose(found[0, head], theta / factor, rtol=1e-6)


def test_equal_factors_are_position_interpolation():
    alike = get_scheme("ms_poe:min_factor=3,max_factor=3,order=[1,0]").frequencies(LLAMA).inv_freq[0]
    assert torch.equal(alike, get_scheme("pi:factor=3").frequencies(LLAMA).inv_freq.expand(2, -1))


def ratios_of_the_authors(outliers, low=1.2, high=1.8):
    """`MsPoELlamaRotaryEmbedding` and `_calculate_outlier` of their file: one row of tables for each index, from low on
    in steps of a Hth, and rows taken by the sorted order of heads, as head h reads row order[h].
    """
    number = len(outliers)
    table = low + (high - low) * np.arange(number) / number
    return table[np.argsort(-np.asarray(outliers), kind="stable")]


def test_the_authors_code_takes_the_order_for_the_ranks():
    """Heads 0, 1, 2 have 5, 9 and 7 outliers, so head 1 is the most aware one; their code gives it the largest factor.
    A scheme with the inverse order and their step has their factors.
    """
    np.testing.assert_allclose(ratios_of_the_authors([5, 9, 7]), [1.4, 1.6, 1.2])
    ours = get_scheme("ms_poe:order=[1,2,0]").frequencies(LLAMA).inv_freq[0, :, 0]
    np.testing.assert_allclose(1 / ours, [1.8, 1.2, 1.5], rtol=1e-6)
    inverse = np.argsort([1, 2, 0]).tolist()
    theirs = get_scheme("ms_poe", order=inverse, max_factor=1.6).frequencies(LLAMA).inv_freq[0, :, 0]
    np.testing.assert_allclose(1 / theirs, ratios_of_the_authors([5, 9, 7]), rtol=1e-6)


def counted_outliers(query, key, scale):
    """Of the last query alone: how many weights are above four times their mean, over their number."""
    shares = []
    for row in range(len(query)):
        scores = np.exp(query[row, -1].astype(float) @ key[row].T.astype(float) * scale)
        weights = scores / scores.sum()
        shares.append(sum(weight > 4 * weights.mean() for weight in weights) / len(weights))
    return np.mean(shares)


def test_awareness_is_the_share_of_outliers_of_the_last_query():
    random = np.random.default_rng(0)
    query, key = random.normal(size=(3, 4, 7, 8)) * 3, random.normal(size=(3, 2, 50, 8))
    found = awareness(torch.tensor(query), torch.tensor(key), 0.3)
    expected = [counted_outliers(query[:, head], key[:, head // 2], 0.3) for head in range(4)]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert len(set(expected)) > 2


def projected(model, ids):
    """Queries and keys of each layer before their rotation, from the projections alone."""
    found = {}

    def keep(name, index):
        def hook(module, args, output):
            found[index, name] = output.unflatten(-1, (-1, model.config.head_dim)).transpose(1, 2).detach().numpy()

        return hook

    hooks = [
        getattr(layer.self_attn, f"{name}_proj").register_forward_hook(keep(name, index))
        for index, layer in enumerate(model.model.layers)
        for name in "qk"
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


def test_heads_are_ranked_by_what_the_checkpoint_projects():
    model, ids = build("llama", num_hidden_layers=4), tokens(90, rows=3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(torch.linspace(1, 30, 4).repeat_interleave(16)[:, None])
    before, plain = projected(model, ids), model(ids).logits
    model.train()
    ranked = rank_heads(model, ids, max_factor=2.5)
    assert model.training
    assert not hasattr(model.config, "rope_patch")
    assert torch.equal(model.eval()(ids).logits, plain)
    kinds = dict.fromkeys(range(4), "full_attention")
    by_layer = ranked.of_layers(kinds, 4)
    assert by_layer[0] is by_layer[1] is None
    for index in (2, 3):
        q, k = before[index, "q"], before[index, "k"]
        shares = [counted_outliers(q[:, head], k[:, head // 2], 16**-0.5) for head in range(4)]
        order = sorted(range(4), key=lambda head: -shares[head])
        assert by_layer[index] == get_scheme("ms_poe", max_factor=2.5, order=order)
        assert len(set(shares)) > 1


def test_a_layer_with_a_window_is_ranked_by_what_its_last_token_sees():
    model, ids = build("mistral", sliding_window=40, num_hidden_layers=3), tokens(90)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(8)
    before, number = projected(model, ids), model.config.num_attention_heads
    shared, scale = number // model.config.num_key_value_heads, model.config.head_dim**-0.5
    q, k = before[2, "q"], before[2, "k"][:, :, -40:]
    shares = [counted_outliers(q[:, head], k[:, head // shared], scale) for head in range(number)]
    order = sorted(range(number), key=lambda head: -shares[head])
    assert len(set(shares)) > 1
    found = rank_heads(model, ids).of_layers(dict.fromkeys(range(3), "sliding_attention"), 3)
    assert list(found[2].order) == order


def test_a_ranking_is_data_that_reloads(tmp_path):
    model, ids = build("llama", num_hidden_layers=3), tokens(60, rows=2)
    ranked = rank_heads(model, ids, first=1)
    assert get_scheme(str(ranked)) == ranked
    patch(model, ranked)
    with torch.no_grad():
        expected = model(ids).logits
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path)(ids).logits, expected)


@pytest.mark.parametrize(("families", "family"), [(t5_families, "t5"), (absolute_families, "gpt2")])
def test_what_rotates_no_heads_is_refused(families, family):
    with pytest.raises(UnsupportedModel, match="heads are ranked in one stack that rotates queries and keys"):
        rank_heads(families.build(family), tokens(8))


def test_a_ranking_needs_a_free_model_a_text_and_a_layer():
    model, ids = build("llama"), tokens(20, rows=1)
    with pytest.raises(InvalidField, match=r"first=2 is not allowed; layers 0, 1 rotate"):
        rank_heads(model, ids)
    for wrong in (ids[0], ids[:, :0]):
        with pytest.raises(InvalidField, match=r"input_ids of shape .* is not allowed; \(batch, length\) is"):
            rank_heads(model, wrong)
    with patch(model, "pi:factor=2"), pytest.raises(AlreadyPatched, match="carries pi"):
        rank_heads(model, ids, first=0)


def test_an_order_of_other_heads_is_refused():
    model = build("llama")
    with pytest.raises(InvalidField, match="ms_poe: order has 3 heads; this checkpoint has 4"):
        patch(model, "ms_poe:order=[2,0,1]")
    with pytest.raises(InvalidField, match="order must be the number of each head once, from 0 on"):
        get_scheme("ms_poe:order=[1,2,3,4]")


def test_layers_with_other_numbers_of_heads_are_refused():
    stack = read_stack(build("llama"))
    last = stack.layers[-1]
    fewer = dataclasses.replace(last, heads=last.heads._replace(num=2))
    stack = dataclasses.replace(stack, layers=(*stack.layers[:-1], fewer))
    with pytest.raises(UnsupportedModel, match=r"layers.1.self_attn has 2 heads, but ms_poe.* has factors for 4"):
        plan_mounts(get_scheme("ms_poe"), stack)
    assert plan_mounts(get_scheme("pi:factor=2"), stack).rotary


def test_transformers_has_no_words_for_it():
    with patch(build("llama"), "ms_poe") as handle, pytest.raises(NotExpressible, match="ms_poe fills frequencies"):
        export_rope_parameters(handle.scheme, handle.model.config)


COMPOSED = ["ms_poe", "ms_poe+rerope:window=8", "ms_poe+self_extend:window=8,group_size=3+alibi"]


def padded(rows, length):
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :9], mask[2, :30] = 0, 0
    return mask


@pytest.mark.parametrize("attention", ["auto", "chunked", "segmented", "merged"])
@pytest.mark.parametrize("spec", COMPOSED)
def test_every_executor_turns_each_head_by_its_own_factor(spec, attention):
    """Padded rows, and their gradients, against the dense oracle."""
    model, ids, mask = build("llama"), tokens(70, rows=3), padded(3, 70)
    found = []
    for executor in (attention, "oracle"):
        model.zero_grad()
        with patch(model, *spec.split("+"), attention=executor):
            logits = model(ids, attention_mask=mask).logits[mask.bool()]
            logits.square().mean().backward()
        found.append((logits.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()))
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


def test_heads_that_are_scored_in_groups_keep_their_factors(monkeypatch):
    model, ids = build("llama"), tokens(70, rows=2)
    found = []
    for attention, large in (("merged", 1), ("oracle", 1 << 30)):
        monkeypatch.setattr(merged, "LARGE", large)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        with patch(model, "ms_poe", "rerope:window=8", attention=attention), torch.no_grad():
            found.append(model(ids).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["auto", "oracle", "joined"])
@pytest.mark.parametrize("spec", COMPOSED)
def test_tokens_behind_a_cache(spec, attention):
    model, ids, mask = build("llama"), tokens(70, rows=3), padded(3, 70)
    prefill = "auto" if attention == "joined" else attention
    with torch.no_grad():
        with patch(model, *spec.split("+"), attention="oracle"):
            right = model(ids, attention_mask=mask).logits[:, 66:]
        with patch(model, *spec.split("+"), attention=prefill) as handle:
            cache = model(ids[:, :66], attention_mask=mask[:, :66], use_cache=True).past_key_values
            for state in handle.layer_states:
                state.attention = attention
            steps = [
                model(ids[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=cache).logits
                for end in range(67, 71)
            ]
    torch.testing.assert_close(torch.cat(steps, dim=1), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [0, 1])
def test_heads_that_keep_different_keys_after_eviction(group):
    """Each head of keys has dropped other slots, as libraries that compress a cache do. The output has one of them."""
    model, ids = build("llama", num_hidden_layers=1), tokens(30)
    kept = torch.tensor([[[0, 3, 5, 9, 19], [1, 2, 8, 18, 19]]])
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, 32 * (1 - group) : 32 * (2 - group)] = 0
        with patch(model, CASES[1]):
            cache = model(ids[:, :20], use_cache=True).past_key_values
            layer, places = cache.layers[0], kept[..., None].expand(-1, -1, -1, 16)
            layer.keys = CachedKeys.of(layer.keys.plain().gather(2, places), kept)
            layer.values = layer.values.gather(2, places)
            found = model(ids[:, 20:], past_key_values=cache, position_ids=torch.arange(20, 30)[None]).logits
    seen = np.tril(np.ones((30, 30), bool))
    seen[20:, [slot for slot in range(20) if slot not in kept[0, group]]] = False
    expected = defined_logits(model, ids, DEFINITIONS[CASES[1]], seen=seen)[:, 20:]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_tables_of_all_heads_do_not_outlive_their_layer():
    """Neither for other layers nor in the plan of a step."""
    model, ids = build("llama"), tokens(40)
    with patch(model, "ms_poe") as handle, torch.no_grad():
        cache = model(ids[:, :39], use_cache=True).past_key_values
        model(ids[:, 39:], past_key_values=cache)
        (forward,) = {state.forwards._forward for state in handle.layer_states}
        assert turner._tables not in forward._functions
        assert not forward.steps
    with patch(model, "rerope:window=8") as handle, torch.no_grad():  # where both are kept
        cache = model(ids[:, :39], use_cache=True).past_key_values
        model(ids[:, 39:], past_key_values=cache)
        assert handle.layer_states[0].forwards._forward.steps


def test_unpatch_gives_back_every_bit():
    model, ids = build("llama"), tokens(40, rows=2)
    with torch.no_grad():
        before = model(ids).logits
        patch(model, "ms_poe")
        assert not torch.allclose(model(ids).logits, before)
        unpatch(model)
        assert torch.equal(model(ids).logits, before)


def test_layers_of_a_mixture_have_orders_of_their_own():
    model, ids = build("llama"), tokens(50, rows=1)
    mixed = PerLayer({"0": get_scheme("ms_poe:order=[3,2,1,0]"), "1": get_scheme("ms_poe")})
    with patch(model, mixed), torch.no_grad():
        full = model(ids).logits
        cache, parts = None, []
        for start, stop in [(0, 40), *((end, end + 1) for end in range(40, 50))]:
            output = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
            cache, parts = output.past_key_values, [*parts, output.logits]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=1e-4, atol=1e-5)
    with patch(model, "ms_poe"), torch.no_grad():
        assert not torch.allclose(model(ids).logits, full, atol=1e-3)
