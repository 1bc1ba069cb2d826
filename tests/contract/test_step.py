"""A decoded token is looked at by one layer, and layers that see the same repeat its plan bit for bit."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

from rope_patch import CachedKeys, patch
from rope_patch.attention.executors import joined, masked
from rope_patch.mounting.hooks import LayerHook
from rope_patch.mounting.step import Step
from tests.families import build
from tests.runs import assert_close, cached_logits, left_padded, tokens

SPECS = ["rerope:window=6", "dca:chunk_size=9,local_window=2", "alibi", "xpos:scale_base=8", "dynamic_ntk:factor=2"]
SPECS += [
    "logn:training_length=8",
    "rerope:window=6+logn:training_length=8",
    "dynamic_ntk:factor=2+dca:chunk_size=9,local_window=2",
]
SIZES = [40, 1, 1, 1]


@pytest.fixture
def plans(monkeypatch):
    """One entry for each plan that is made."""
    made = []
    for executor in (joined, masked):
        plan = executor._plan
        monkeypatch.setattr(executor, "_plan", lambda problem, plan=plan: made.append(1) or plan(problem))
    return made


def decoded(model, lengths):
    batch, mask = left_padded([tokens(length, seed=length) for length in lengths])
    return cached_logits(model, batch, SIZES, mask if len(lengths) > 1 else None)


@pytest.mark.parametrize("lengths", [(43,), (43, 30)], ids=str)
@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_layers_repeat_the_first_bit_for_bit(spec, lengths, monkeypatch):
    model, look, looks = build("llama"), LayerHook._look, []
    monkeypatch.setattr(LayerHook, "_look", lambda *args: looks.append(1) or look(*args))
    layers = model.config.num_hidden_layers
    with patch(model, spec):
        found = decoded(model, lengths)
        assert len(looks) == layers + 3
        monkeypatch.setattr(Step, "followed_by", lambda *_: None)
        assert torch.equal(found, decoded(model, lengths))
    assert len(looks) == layers + 3 + 4 * layers


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_layers_repeat_a_plan_under_autocast(spec, monkeypatch):
    model, found = build("llama"), []
    with patch(model, spec):
        for _ in range(2):
            cache, logits = DynamicCache(), []
            for step in range(10):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step in (3, 4, 7)):
                    text = tokens(20 if step == 0 else 1, rows=2, seed=step)
                    logits.append(model(text, past_key_values=cache).logits.float())
            found.append(torch.cat(logits, dim=1))
            monkeypatch.setattr(Step, "followed_by", lambda *_: None)
    assert torch.equal(*found)


def crop(cache):
    cache.crop(-3)


def reorder(cache):
    cache.reorder_cache(torch.tensor([1, 0]))


def select(cache):
    cache.batch_select_indices(torch.tensor([1]))


def repeat(cache):
    cache.batch_repeat_interleave(2)


def shift(cache):
    """All tokens one position later."""
    for layer in cache.layers:
        layer.keys = CachedKeys.of(layer.keys.plain(), layer.keys.positions + 1)


def swap(cache):
    """Other keys at the same positions."""
    for layer in cache.layers:
        layer.keys = CachedKeys.of(layer.keys.plain().flip(0), layer.keys.positions)
        layer.values = layer.values.flip(0)


@pytest.mark.parametrize("change", [crop, reorder, select, repeat, shift, swap])
@pytest.mark.parametrize("spec", ["rerope:window=6", "dca:chunk_size=9,local_window=2", "alibi"])
@torch.no_grad()
def test_a_token_after_a_changed_cache_is_scored_by_what_the_cache_holds(spec, change):
    found = []
    for attention in ("auto", "oracle"):
        model, cache = build("llama"), DynamicCache()
        with patch(model, spec, attention=attention):
            for step in range(9):
                if step == 5:
                    change(cache)
                rows = 2 if step < 5 else len(cache.layers[0].keys)
                text = tokens(20 if step == 0 else 1, rows=rows, seed=step)
                logits = model(text, past_key_values=cache).logits
        found.append(logits)
    assert_close(*found)


@pytest.mark.parametrize("spec", ["rerope:window=6", "alibi"])
@torch.no_grad()
def test_two_texts_in_turn_have_steps_of_their_own(spec):
    found = []
    for attention in ("auto", "oracle"):
        model, caches, logits = build("llama"), [DynamicCache(), DynamicCache()], []
        with patch(model, spec, attention=attention):
            for step in range(4):
                for text, cache in enumerate(caches):
                    length = 20 + text if step == 0 else 1
                    logits.append(model(tokens(length, seed=2 * step + text), past_key_values=cache).logits[:, -1])
        found.append(torch.stack(logits))
    assert_close(*found)


@pytest.mark.parametrize("spec", ["rerope:window=6", "alibi"])
@torch.no_grad()
def test_a_token_with_another_mask_or_attention_looks_for_itself(spec):
    found = []
    for attention in ("auto", "oracle"):
        model, cache, logits = build("llama"), DynamicCache(), []
        with patch(model, spec, attention=attention):
            for step in range(8):
                length = 20 if step == 0 else 1
                seen = torch.ones(1, cache.get_seq_length() + length, dtype=torch.long)
                seen[:, 4] = step not in (3, 4)
                places = torch.arange(seen.shape[1])[None, -length:]
                model.set_attn_implementation("eager" if step == 6 else "sdpa")
                out = model(
                    tokens(length, seed=step),
                    past_key_values=cache,
                    attention_mask=seen,
                    position_ids=places,
                    output_attentions=step == 6,
                )
                logits.append(out.logits[:, -1])
                assert step != 6 or out.attentions[0] is not None
            model.set_attn_implementation("sdpa")
        found.append(torch.stack(logits))
    assert_close(*found)


@torch.no_grad()
def test_a_token_under_another_attention_implementation_returns_its_weights():
    model, cache = build("qwen3"), DynamicCache()
    with patch(model, "rerope:window=6"):
        for step in range(4):
            model.set_attn_implementation("eager" if step == 3 else "sdpa")
            out = model(
                tokens(20 if step == 0 else 1, seed=step),
                past_key_values=cache,
                attention_mask=None if step == 0 else {"full_attention": None},  # also under eager
                output_attentions=step == 3,
            )
        assert len(out.attentions) == model.config.num_hidden_layers


@torch.no_grad()
def test_a_text_without_a_cache_does_not_go_on_from_a_cache_that_is_gone():
    model = build("llama")
    with patch(model, "rerope:window=6"):
        expected = model(tokens(1), use_cache=False).logits
        cache = DynamicCache()
        for length in (20, 1):
            model(tokens(length), past_key_values=cache)
        del cache
        gc.collect()
        assert torch.equal(model(tokens(1), use_cache=False).logits, expected)


@pytest.mark.parametrize("spec", ["rerope:window=6", "alibi"])
def test_a_token_with_a_gradient_after_tokens_of_inference_mode(spec):
    found = []
    for attention in ("auto", "oracle"):
        model, cache = build("llama").double(), DynamicCache()
        with patch(model, spec, attention=attention):
            with torch.no_grad():
                for size in (20, 1, 1):
                    model(tokens(size), past_key_values=cache)
            logits = model(tokens(1, seed=1), past_key_values=cache).logits
            logits.square().sum().backward()
        found.append([logits, *(weight.grad for weight in model.parameters() if weight.grad is not None)])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, 1e-10)


@pytest.mark.parametrize("spec", ["fox", "t5:per_layer=true"])
@torch.no_grad()
def test_a_layer_with_sums_or_biases_of_its_own_makes_its_own_plan(spec, plans):
    model = build("llama")
    with patch(model, spec):
        decoded(model, (43,))
    assert len(plans) == 3 * model.config.num_hidden_layers


@pytest.mark.parametrize("spec", ["rerope:window=6", "alibi"])
@torch.no_grad()
def test_a_layer_that_keeps_other_keys_looks_for_itself(spec):
    found = []
    for attention in ("auto", "oracle"):
        model, cache = build("llama"), DynamicCache()
        with patch(model, spec, attention=attention):
            model(tokens(20), past_key_values=cache)
            second = cache.layers[1].keys
            positions = second.positions.clone()
            positions[:, :10] -= 3
            cache.layers[1].keys = CachedKeys.of(second.plain(), positions)
            found.append(model(tokens(1), past_key_values=cache).logits)
    assert_close(*found)


@torch.no_grad()
def test_a_model_does_not_keep_the_cache_of_its_last_forward():
    model, cache = build("llama"), DynamicCache()
    with patch(model, "rerope:window=6"):
        for length in (20, 1):
            model(tokens(length), past_key_values=cache)
        kept = [weakref.ref(cache), *(weakref.ref(layer.values) for layer in cache.layers)]
        del cache
        gc.collect()
        assert not any(reference() is not None for reference in kept)


@pytest.mark.parametrize("places", [[20, 21, 22, 26, 27], [26, 27]], ids=str)
@pytest.mark.parametrize("spec", ["rerope:window=6", "dca:chunk_size=9,local_window=2"])
@torch.no_grad()
def test_a_token_behind_a_gap_is_noticed_after_tokens_that_went_on(spec, places):
    found = []
    for attention in ("auto", "oracle"):
        model, cache = build("llama"), DynamicCache()
        with patch(model, spec, attention=attention):
            for step, position in enumerate([None, *places]):
                given = {} if position is None else {"position_ids": torch.tensor([[position]])}
                text = tokens(20 if position is None else 1, seed=step)
                logits = model(text, past_key_values=cache, **given).logits
            found.append(logits)
    assert_close(*found)


ROWS_APART = {
    "one row skips": (0, [[20, 20], [21, 21], [22, 26], [23, 27], [24, 28]]),
    "rows begin elsewhere": (5, [[20, 25], [21, 26], [22, 27], [23, 28]]),
}


@pytest.mark.parametrize("how", ROWS_APART)
@pytest.mark.parametrize("spec", ["rerope:window=6", "dca:chunk_size=9,local_window=2", "alibi"])
@torch.no_grad()
def test_rows_at_different_positions_are_those_of_one_forward(spec, how):
    later, steps = ROWS_APART[how]
    positions = torch.cat([torch.arange(20) + torch.tensor([[0], [later]]), torch.tensor(steps).T], dim=1)
    ids, model, cache = tokens(positions.shape[1], rows=2), build("llama"), DynamicCache()
    with patch(model, spec):
        one_text = torch.ones_like(ids)  # and no packed documents
        expected = model(ids, attention_mask=one_text, position_ids=positions, use_cache=False).logits
        found = [
            model(ids[:, part], past_key_values=cache, position_ids=positions[:, part]).logits
            for part in (slice(0, 20), *(slice(n, n + 1) for n in range(20, ids.shape[1])))
        ]
    assert_close(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("kept", [slice(3, None), slice(17)], ids=["the newest", "the oldest"])
@pytest.mark.parametrize("evicting", [0, 1], ids=["the first", "the second"])
@pytest.mark.parametrize("spec", ["rerope:window=6", "alibi"])
@torch.no_grad()
def test_a_layer_that_keeps_fewer_keys_than_another_looks_for_itself(spec, evicting, kept):
    found = []
    for attention in ("auto", "oracle"):
        model, cache, logits = build("llama"), DynamicCache(), []
        with patch(model, spec, attention=attention):
            model(tokens(20), past_key_values=cache)
            layer = cache.layers[evicting]
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
            for step in range(3):
                places = torch.tensor([[20 + step]])
                logits.append(model(tokens(1, seed=step), past_key_values=cache, position_ids=places).logits)
        found.append(torch.cat(logits))
    assert_close(*found)


@pytest.mark.parametrize("spec", ["rerope:window=6", "alibi"])
@torch.no_grad()
def test_a_layer_with_a_scale_of_its_own_is_scored_under_it(spec):
    found = []
    for attention in ("auto", "oracle"):
        model, cache, logits = build("llama"), DynamicCache(), []
        model.model.layers[1].self_attn.scaling *= 3
        with patch(model, spec, attention=attention):
            for step in range(3):
                logits.append(model(tokens(20 if step == 0 else 1, seed=step), past_key_values=cache).logits[:, -1])
        found.append(torch.stack(logits))
    assert_close(*found)


@pytest.mark.parametrize("spec", ["rerope:window=6", "logn:training_length=8"])
@torch.no_grad()
def test_a_step_is_for_states_of_one_form_and_for_one_mask(spec):
    """Modules may still change the mask between their hook and their attention."""
    model, cache = build("llama"), DynamicCache()
    with patch(model, spec) as handle:
        for length in (20, 1):
            model(tokens(length, rows=2), past_key_values=cache)
        state = handle.layer_states[0]
        (step,) = state.forwards._forward.steps.values()
        call, module = step.call.repeated(cache=cache), state.layer.module
        dtype, *shapes, _ = step.form
        query, key, value = (torch.randn(shape, dtype=dtype) for shape in shapes)

        def attend(mask, kwargs, *states):
            return step.attend(call, module, states, mask, step.scaling, kwargs)

        assert attend(None, {}, query, key, value)[0].shape == (2, 1, query.shape[1], value.shape[-1])
        for mask, kwargs, states in (
            (torch.ones(2, 1, 1, 21, dtype=torch.bool), {}, (query, key, value)),
            (None, {"position_bias": torch.zeros(1)}, (query, key, value)),
            (None, {}, (query.double(), key.double(), value.double())),
            (None, {}, (query[:1], key[:1], value[:1])),
            (None, {}, (query, key[:, :, 1:], value[:, :, 1:])),
            (None, {}, (query, key[:, :1], value[:, :1])),
            (None, {}, (query, key, value[..., :8])),
        ):
            assert attend(mask, kwargs, *states) is None
        by_plan = "rerope" in spec  # the attention that was there before has these
        for asked in ({"softcap": 5.0}, {"s_aux": torch.zeros(4)}):
            assert not by_plan or attend(None, asked, query, key, value) is None
        with torch.enable_grad():
            assert attend(None, {}, query, key, value) is None


def test_tables_from_inference_mode_serve_tokens_with_gradients():
    model, found = build("llama"), []
    with patch(model, "rerope:window=6"):
        for mode in (torch.inference_mode, torch.enable_grad):
            cache = DynamicCache()
            with mode():
                found.append([model(tokens(size), past_key_values=cache).logits.detach() for size in SIZES])
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_values_alone_behind_a_cache(dtype, size, projection):
    """As with LoRA on values alone: no query of the first layer has a gradient."""
    found = []
    for attention in ("auto", "oracle"):
        model, cache = build("llama").to(dtype), DynamicCache()
        weight = getattr(model.requires_grad_(False).model.layers[0].self_attn, projection).weight.requires_grad_()
        with patch(model, "rerope:window=6", attention=attention):
            with torch.no_grad():
                model(tokens(20), past_key_values=cache)
            model(tokens(size, seed=1), past_key_values=cache).logits.square().sum().backward()
        found.append(weight.grad.float())
    assert_close(*found, tolerance=(2e-5 if dtype == torch.float32 else 0.05) * float(found[1].abs().max()))


@torch.no_grad()
def test_a_module_with_another_attention_looks_for_itself(monkeypatch):
    model, found = build("llama"), []
    with patch(model, "rerope:window=6"):
        attention = model.model.layers[1].self_attn
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = "eager"
        for _ in range(2):
            cache = DynamicCache()
            for step in range(3):
                out = model(tokens(20 if step == 0 else 1, seed=step), past_key_values=cache)
            found.append(out.logits)
            monkeypatch.setattr(Step, "followed_by", lambda *_: None)
    assert torch.equal(*found)
