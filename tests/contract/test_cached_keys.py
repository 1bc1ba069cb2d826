"""Positions travel with the keys of a cache, so gaps, cropping, eviction and rows in another order are right."""

import copy
import io

import pytest
import torch
from transformers import CompileConfig, DynamicCache, StaticCache

from rope_patch import CachedKeys, UnsupportedModel, UnsupportedPositions, native_scheme, patch, unpatch
from rope_patch.models.cached_keys import positions_in
from tests.cases import ALL, CASES
from tests.executors import executors_of
from tests.families import GENERIC, TRAINING_LENGTH, build, from_config
from tests.runs import assert_close, cached_logits, generated, left_padded, logits, positions_of, tokens

START, STOP = 10, 20
IDS = tokens(STOP)
SPECS = [
    spec
    for spec in ALL
    if not any(word in spec for word in ("sinusoidal", "rnn", "floater", "deberta:max_distance=12,terms"))
]
"""A state that goes from token to token, or a path that is integrated, has no keys that could be taken away."""

ONE_OF_EACH = [
    CASES[name]
    for name in ("rope", "dynamic_ntk", "rerope", "self_extend", "dca", "lm_infinite", "logn", "alibi", "t5", "yarn")
] + ["rerope:window=6+alibi"]


@torch.no_grad()
def step(model, ids, cache, **inputs):
    return model(ids, past_key_values=cache, use_cache=True, **inputs).logits


def go_on(model, cache, positions):
    """Six tokens, then one by one, `(1, STOP - START, vocabulary)`."""
    found = [step(model, IDS[:, START:16], cache, position_ids=positions[:, :6])]
    found += [
        step(model, IDS[:, place : place + 1], cache, position_ids=positions[:, place - START : place - START + 1])
        for place in range(16, STOP)
    ]
    return torch.cat(found, dim=1)


def begun(model, cache=None):
    cache = DynamicCache(config=model.config) if cache is None else cache
    step(model, IDS[:, :START], cache)
    return cache


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("mount", ["auto", "late"])
@pytest.mark.parametrize("static", [False, True])
def test_a_gap_between_cache_and_call_is_one_of_positions(llama, spec, mount, static):
    positions = torch.cat([torch.arange(START), torch.arange(STOP, STOP + 10)])[None]
    with patch(llama, spec, mount=mount):
        expected = logits(llama, IDS, position_ids=positions, attention_mask=torch.ones_like(IDS))[:, START:]
        cache = StaticCache(config=llama.config, max_cache_len=STOP + 3) if static else None
        found = go_on(llama, begun(llama, cache), positions[:, START:])
        assert_close(found, expected, 4e-5)


def without(cache, kept):
    for layer in cache.layers:
        layer.keys, layer.values = (kept(states) for states in (layer.keys, layer.values))


@pytest.mark.parametrize("spec", ["rope", "rerope:window=6", "alibi"])
@pytest.mark.parametrize("attention", ["segmented", "chunked", "oracle"])
def test_a_gap_is_one_for_every_way_to_score(llama, spec, attention):
    positions = torch.cat([torch.arange(START), torch.arange(STOP, STOP + 10)])[None]
    with patch(llama, spec, mount="late", attention=attention):
        expected = logits(llama, IDS, position_ids=positions, attention_mask=torch.ones_like(IDS))[:, START:]
        assert_close(go_on(llama, begun(llama), positions[:, START:]), expected, 4e-5)


@pytest.mark.parametrize("spec", ["rerope:window=6", "alibi"])
def test_keys_that_follow_on_are_read_by_the_fast_way_behind_pads_too(llama, spec):
    ids, mask = left_padded([tokens(15, seed=3), tokens(11, seed=4)])
    with patch(llama, spec), executors_of(llama) as taken:
        cached_logits(llama, ids, [12, 1, 1, 1], mask)
    assert sum(name in ("joined", "masked") for name in taken) == 3 * llama.config.num_hidden_layers


EVICTIONS = {
    "by indices": lambda states: states[:, :, [0, 1, 2, 6, 7, 8, 9]],
    "by slices": lambda states: torch.cat([states[:, :, :3], states[:, :, 6:]], dim=2),
    "by index_select": lambda states: states.index_select(2, torch.tensor([9, 1, 2, 6, 7, 8, 0])),
    "by a mask": lambda states: states[:, :, torch.tensor([1, 1, 1, 0, 0, 0, 1, 1, 1, 1]).bool()],
}


@pytest.mark.parametrize("spec", ONE_OF_EACH)
@pytest.mark.parametrize("how", EVICTIONS)
def test_keys_taken_out_of_the_middle_are_keys_that_nobody_sees(llama, spec, how):
    seen = torch.ones(STOP, STOP).tril().bool()
    seen[START:, 3:6] = False
    with patch(llama, spec):
        expected = logits(llama, IDS, attention_mask=seen[None, None], position_ids=torch.arange(STOP)[None])
        cache = begun(llama)
        without(cache, EVICTIONS[how])
        assert_close(go_on(llama, cache, torch.arange(START, STOP)[None]), expected[:, START:], 4e-5)


def of_channels(*slots):
    """An index with the slot of each channel, `(2, 2, slots, 4)`, alike in all rows and heads."""
    return torch.tensor(slots).expand(2, 2, -1, -1)


SELECTED = {
    "slots": (lambda keys: keys[:, :, 1:3], [1, 2]),
    "slots out of order": (lambda keys: keys[:, :, [3, 0]], [3, 0]),
    "slots beyond those with a position": (lambda keys: keys[:, :, 3:], None),
    "slots from the end": (lambda keys: keys.flip(2), None),
    "one head": (lambda keys: keys[:, 0], None),
    "one row": (lambda keys: keys[0], None),
    "one channel": (lambda keys: keys[:, :, :4, 0], None),
    "some channels": (lambda keys: keys[..., 1:3], None),
    "heads": (lambda keys: keys.repeat_interleave(2, dim=1), None),
    "slots by gather": (lambda keys: keys.gather(2, of_channels([2, 2, 2, 2], [0, 0, 0, 0])), [[2, 0]] * 2),
    "slots by take_along_dim": (lambda keys: keys.take_along_dim(of_channels([2, 2, 2, 2]), dim=2), [[2]] * 2),
    "other slots in each channel": (lambda keys: keys.gather(2, of_channels([2, 0, 1, 3], [0, 0, 1, 1])), None),
    "another slot in the last channel": (lambda keys: keys.take_along_dim(of_channels([1, 1, 1, 2]), dim=2), None),
}


@pytest.mark.parametrize("how", SELECTED)
def test_positions_go_along_where_every_selected_key_has_one(how):
    """Of a static cache with four tokens in six slots."""
    select, expected = SELECTED[how]
    keys = torch.randn(2, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    found = select(CachedKeys.of(keys, torch.arange(4)[None]))
    assert isinstance(found, CachedKeys) == (expected is not None)
    assert torch.equal(found.as_subclass(torch.Tensor), select(keys))
    if expected is not None:
        assert found.positions.tolist() == [expected] * 2


@pytest.mark.parametrize("spec", ONE_OF_EACH)
def test_every_head_of_every_layer_may_keep_keys_of_its_own(llama, spec):
    random = torch.Generator().manual_seed(0)
    with patch(llama, spec):
        cache = begun(llama)
        kept = torch.stack([torch.randperm(START, generator=random)[:7] for _ in range(2)])[None]
        without(cache, lambda states: states.gather(2, kept[..., None].expand(-1, -1, -1, states.shape[-1])))
        seen = torch.ones(1, 4, STOP, STOP).tril().bool()
        for head in range(4):
            gone = sorted(set(range(START)) - set(kept[0, head // 2].tolist()))
            seen[0, head, START:, gone] = False
        expected = logits(llama, IDS, attention_mask=seen, position_ids=torch.arange(STOP)[None])
        assert_close(go_on(llama, cache, torch.arange(START, STOP)[None]), expected[:, START:], 4e-5)


@pytest.mark.parametrize("spec", ["rope", "rerope:window=6", "self_extend:group_size=4,window=7", "alibi"])
def test_layers_may_keep_keys_of_their_own(spec):
    deep = build()
    kept = ([0, 1, 2, 6, 7, 8, 9], [1, 3, 4, 5, 6, 8, 9])
    handle = patch(deep, spec, mount="late")
    cache = begun(deep)
    for layer, places in zip(cache.layers, kept, strict=True):
        layer.keys, layer.values = layer.keys[:, :, places], layer.values[:, :, places]
    positions = torch.arange(START, STOP)[None]
    found = go_on(deep, cache, positions)
    for state in handle.layer_states:  # the same where no layer shares anything with another
        state.forwards = type(state.forwards)()
    cache = begun(deep)
    for layer, places in zip(cache.layers, kept, strict=True):
        layer.keys, layer.values = layer.keys[:, :, places], layer.values[:, :, places]
    assert_close(go_on(deep, cache, positions), found)


@pytest.mark.parametrize("start", [8, 7, 3])
def test_the_keys_that_a_window_keeps_are_the_newest(start):
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, 8, 4), torch.zeros(2, 1, 8, 4), 0)
    cache.layers[0].keys = CachedKeys.of(cache.layers[0].keys, torch.arange(10, 18) + torch.tensor([[0], [5]]))
    found = positions_in(cache, 0, start, "the first layer")
    assert found.tolist() == [list(range(18 - start, 18)), list(range(23 - start, 23))]


@pytest.mark.parametrize("spec", ["shaw:max_distance=6", "urpe:max_distance=12", "xpos:scale_base=8"])
def test_heads_with_keys_of_their_own_are_refused_where_all_heads_are_scored_alike(llama, spec):
    with patch(llama, spec):
        cache = begun(llama)
        kept = torch.tensor([[0, 1, 5], [2, 3, 4]])[None, ..., None].expand(-1, -1, -1, 16)
        without(cache, lambda states: states.gather(2, kept))
        with pytest.raises(UnsupportedPositions, match="heads keep different keys"):
            go_on(llama, cache, torch.arange(START, STOP)[None])


@pytest.mark.parametrize("spec", ONE_OF_EACH)
def test_a_cropped_cache_goes_on_where_it_was_cropped(llama, spec):
    with patch(llama, spec):
        expected = logits(llama, torch.cat([IDS[:, :7], IDS[:, START:]], dim=1))[:, 7:]
        cache = begun(llama)
        cache.crop(-3)
        assert_close(go_on(llama, cache, torch.arange(7, STOP - 3)[None]), expected, 4e-5)


ROWS = {
    "reordered": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
    "selected": (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "one of them": (lambda cache: without(cache, lambda states: states[1:2]), [1]),
}


@pytest.mark.parametrize("spec", ONE_OF_EACH)
@pytest.mark.parametrize("how", ROWS)
def test_rows_of_a_padded_batch_take_their_positions_along(llama, spec, how):
    ids, mask = left_padded([tokens(15, seed=3), tokens(11, seed=4), tokens(13, seed=5)])
    places = positions_of(mask)
    change, rows = ROWS[how]
    with patch(llama, spec):
        expected = logits(llama, ids, attention_mask=mask, position_ids=places)[rows, 12:]
        cache = DynamicCache(config=llama.config)
        step(llama, ids[:, :12], cache, attention_mask=mask[:, :12], position_ids=places[:, :12])
        change(cache)
        found = [
            step(
                llama,
                ids[rows, i : i + 1],
                cache,
                attention_mask=mask[rows, : i + 1],
                position_ids=places[rows, i : i + 1],
            )
            for i in range(12, 15)
        ]
        assert_close(torch.cat(found, dim=1), expected, 4e-5)


@pytest.mark.parametrize("spec", ["rerope:window=6", "alibi"])
def test_copies_and_pickles_of_a_cache_go_on_alike(llama, spec):
    with patch(llama, spec):
        cache = begun(llama)
        written = io.BytesIO()
        torch.save(cache, written)
        written.seek(0)
        copies = [copy.deepcopy(cache), torch.load(written, weights_only=False)]
        positions = torch.arange(START, STOP)[None] + 5
        expected = go_on(llama, cache, positions)
        for other in copies:
            assert torch.equal(go_on(llama, other, positions), expected)


def test_keys_that_lost_their_positions_are_refused_and_can_be_given_new_ones(llama):
    positions = torch.arange(START)[None]
    with patch(llama, "rerope", window=6):
        expected = go_on(llama, begun(llama), torch.arange(START, STOP)[None])
        cache = begun(llama)
        without(cache, lambda states: states * 1)
        with pytest.raises(UnsupportedPositions, match="10 keys in past_key_values have lost their positions"):
            go_on(llama, copy.deepcopy(cache), torch.arange(START, STOP)[None])
        for layer in cache.layers:
            layer.keys = CachedKeys.of(layer.keys, positions)
        assert_close(go_on(llama, cache, torch.arange(START, STOP)[None]), expected)


@pytest.mark.parametrize("spec", ["rerope:window=6", "dca:chunk_size=9,local_window=2", "alibi"])
def test_keys_that_you_add_to_a_cache_yourself_take_positions_from_you(llama, spec):
    with patch(llama, spec):
        cache, whole = begun(llama), DynamicCache(config=llama.config)
        expected = step(llama, IDS, whole)[:, 16:]
        for index, layer in enumerate(whole.layers):
            keys, _ = cache.update(*(states[:, :, START:16] for states in (layer.keys, layer.values)), index)
            cache.layers[index].keys = CachedKeys.of(keys, torch.arange(16)[None])
        assert_close(step(llama, IDS[:, 16:], cache), expected)


def test_keys_of_other_rows_than_their_positions_are_refused(llama):
    with patch(llama, "rerope", window=6):
        cache = DynamicCache(config=llama.config)
        step(llama, tokens(4, rows=2), cache, position_ids=torch.arange(4).expand(2, -1))
        for layer in cache.layers:
            layer.keys = CachedKeys.of(layer.keys.repeat(2, 1, 1, 1), layer.keys.positions)
            layer.values = layer.values.repeat(2, 1, 1, 1)
        with pytest.raises(UnsupportedPositions, match="4 rows of keys, but 2 rows of positions"):
            step(llama, tokens(1, rows=4), cache)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"yarn": {}}),
        ({"rerope:window=6": {}}, {"yarn:factor=4": {}}),
        ({"yarn:factor=4": {}}, {"yarn:factor=2": {}}),
        ({"yarn:factor=4": {}}, {"rope": {}}),
        ({"rope": {}}, {"rope": {"mount": "late"}}),
        ({"self_extend:group_size=4,window=7": {}}, {"self_extend:group_size=4,window=7": {"mount": "late"}}),
        ({"sinusoidal": {}}, {"pi:factor=4": {}}),
    ],
    ids=lambda schemes: "+".join(schemes) or "plain",
)
def test_a_cache_of_another_scheme_or_of_keys_kept_otherwise_is_refused(llama, first, then):
    then = {"yarn:factor=4" if name == "yarn" else name: options for name, options in then.items()}
    for name, options in first.items():
        patch(llama, name, **options)
    cache = begun(llama)
    if first:
        unpatch(llama)
    for name, options in then.items():
        patch(llama, name, **options)
    said = "without a patch" if not first else f"under {next(iter(first)).partition(':')[0]}"
    with pytest.raises(UnsupportedPositions, match=f"10 tokens with keys written {said}"):
        step(llama, IDS[:, START:], cache)


def test_the_native_scheme_reads_on_in_a_cache_from_before_the_patch(llama):
    expected, cache = logits(llama, IDS)[:, START:], begun(llama)
    with patch(llama, native_scheme(llama)):
        assert_close(step(llama, IDS[:, START:], cache), expected)


def test_a_module_that_writes_to_several_slots_of_a_cache_is_refused():
    from transformers import AutoConfig

    model = from_config(AutoConfig.for_model("hrm_text", **GENERIC))
    with patch(model, "rerope", window=6):
        cache = DynamicCache(config=model.config)
        with pytest.raises(UnsupportedPositions, match="10 keys arrive where its cache announced 20"):
            step(model, IDS[:, :START], cache)


def test_frequencies_that_are_not_those_of_the_config_are_not_scaled():
    from transformers import AutoConfig

    sizes = {**GENERIC, "num_key_value_heads": 2, "head_dim": 16, "v_head_dim": 8}
    model = from_config(AutoConfig.for_model("mimo_v2_flash", **sizes))
    for spec in ("rope", "yarn:factor=4"):
        with pytest.raises(UnsupportedModel, match="other frequencies than its config describes"):
            patch(model, spec)
    expected = logits(model, IDS)
    with patch(model, "rerope", window=STOP):
        assert_close(logits(model, IDS), expected)


@pytest.mark.parametrize("spec", ["rope", *ONE_OF_EACH])
@pytest.mark.parametrize("attention", ["auto", "chunked", "segmented"])
def test_pads_behind_a_text_see_it_as_in_transformers(llama, spec, attention):
    ids, mask = tokens(60, rows=3), torch.ones(3, 60, dtype=torch.long)
    mask[1, -17:], mask[2, -40:], mask[0, :9] = 0, 0, 0
    with patch(llama, spec, mount="late", attention="oracle"):
        expected = logits(llama, ids, attention_mask=mask)
    with patch(llama, spec, mount="late", attention=attention):
        assert_close(logits(llama, ids, attention_mask=mask), expected, 4e-5)
    if spec == "rope":  # pads before the text included, which see nothing
        assert_close(logits(llama, ids, attention_mask=mask), expected)


@pytest.mark.parametrize("spec", [*ONE_OF_EACH, CASES["shaw"]])
def test_generate_from_right_padded_prompts_is_the_same_with_any_cache(llama, spec):
    ids, mask = tokens(12, rows=2), torch.ones(2, 12, dtype=torch.long)
    mask[1, -5:] = 0
    with patch(llama, spec):
        found = generated(llama, ids, attention_mask=mask)
        assert torch.equal(generated(llama, ids, attention_mask=mask, cache_implementation="static"), found)
        assert torch.equal(generated(llama, ids, attention_mask=mask, use_cache=False), found)


@torch.no_grad()
def compiled_steps(model, ids, mask, places, cache):
    """A prompt of 12 tokens, and compiled steps after it."""
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    step(model, ids[:, :12], cache, attention_mask=mask[:, :12], position_ids=places[:, :12])
    found = [
        step(compiled, ids[:, i : i + 1], cache, attention_mask=mask[:, : i + 1], position_ids=places[:, i : i + 1])
        for i in range(12, ids.shape[1])
    ]
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("spec", ["rerope:window=6", "alibi"])
def test_a_compiled_model_goes_on_behind_pads_in_a_static_cache(spec):
    llama = build(num_hidden_layers=1)
    ids, mask = tokens(15, rows=2), torch.ones(2, 15, dtype=torch.long)
    mask[1, 7:12] = 0
    places = positions_of(mask)
    with patch(llama, spec):
        expected = logits(llama, ids, attention_mask=mask, position_ids=places)[:, 12:]
        cache = StaticCache(config=llama.config, max_cache_len=20)
        assert_close(compiled_steps(llama, ids, mask, places, cache), expected, 4e-5)
        with pytest.raises(UnsupportedPositions, match="a compiled model wrote 3 keys in past_key_values"):
            step(llama, ids[:, :1], cache, position_ids=places[:, -1:] + 1)


@pytest.mark.parametrize("pads", [0, 3])
def test_generate_compiles_one_step_for_all(pads):
    llama = build(num_hidden_layers=1)
    ids, mask = tokens(12, rows=2), torch.ones(2, 12, dtype=torch.long)
    mask[0, 12 - pads :] = 0
    with patch(llama, "rerope", window=6):
        expected = generated(llama, ids, attention_mask=mask)
        settings = CompileConfig(backend="eager")
        settings._compile_all_devices = True
        options = {"cache_implementation": "static", "compile_config": settings}
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(generated(llama, ids, attention_mask=mask, **options), expected)


def test_a_compiled_model_goes_on_in_a_static_cache_that_slides():
    model = build("mistral", sliding_window=13, max_position_embeddings=12, num_hidden_layers=1)
    mask = torch.ones(1, 18, dtype=torch.long)
    ids, places = tokens(18), torch.arange(18)[None]
    with patch(model, "rerope", window=6):
        cache = StaticCache(config=model.config, max_cache_len=20)
        assert_close(compiled_steps(model, ids, mask, places, cache), logits(model, ids)[:, 12:])


def test_a_compiled_model_goes_on_behind_pads_in_a_window_that_is_not_full():
    model = build("mistral", sliding_window=40, num_hidden_layers=1)
    ids, mask = tokens(15, rows=2), torch.ones(2, 15, dtype=torch.long)
    mask[1, 7:12] = 0
    places = positions_of(mask)
    with patch(model, "rerope", window=6):
        expected = logits(model, ids, attention_mask=mask, position_ids=places)[:, 12:]
        cache = StaticCache(config=model.config, max_cache_len=20)
        assert_close(compiled_steps(model, ids, mask, places, cache), expected, 4e-5)


@pytest.mark.parametrize("static", [False, True])
def test_a_compiled_step_after_a_gap_stops(static):
    llama = build(num_hidden_layers=1)
    ids, mask, places = tokens(14), torch.ones(1, 14, dtype=torch.long), torch.arange(14)[None]
    places[:, 12:] += 5
    with patch(llama, "rerope", window=6):
        cache = StaticCache(config=llama.config, max_cache_len=20) if static else DynamicCache()
        with pytest.raises(RuntimeError, match=r"rope_patch: .* run"):
            compiled_steps(llama, ids, mask, places, cache)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": TRAINING_LENGTH},
    **{"short_factor": [1.0] * 8, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]},
}


def state(model):
    module = model.model.rotary_emb
    named = {**vars(module), **module._buffers}
    return {
        name: copy.deepcopy(value) for name, value in named.items() if not name.startswith("_") and name != "config"
    }


@pytest.mark.parametrize("parameters", [DYNAMIC, LONGROPE], ids=lambda parameters: parameters["rope_type"])
@pytest.mark.parametrize(
    "spec", ["rerope:window=6", "window:window=7", "logn:training_length=8", "yarn:factor=4", "alibi"]
)
@pytest.mark.parametrize("before", [20, 36])
def test_what_a_rotary_module_remembers_is_as_it_was(parameters, spec, before):
    model = build(rope_parameters=parameters, max_position_embeddings=TRAINING_LENGTH * (1 + (parameters is LONGROPE)))
    expected = logits(model, tokens(before))
    remembered = state(model)
    native_scheme(model)  # reading changes nothing either
    assert_same_state(state(model), remembered)
    with patch(model, spec):
        logits(model, tokens(40))
        logits(model, tokens(80))
    assert_same_state(state(model), remembered)
    assert torch.equal(logits(model, tokens(before)), expected)


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name
