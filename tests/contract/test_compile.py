"""`torch.compile` in one graph, patched before or after."""

import copy

import accelerate
import pytest
import torch
from transformers import DynamicCache, StaticCache

from rope_patch import Scheme, get_scheme, patch, unpatch
from rope_patch.mounting.parameters import learned_parameters
from tests.cases import CASES, COMPOSITIONS, ROUTES
from tests.families import build
from tests.runs import (
    assert_close,
    assert_same_gradients,
    cached_logits,
    gradients,
    left_padded,
    logits,
    positions_of,
    tokens,
)


@pytest.fixture
def model(family):
    """One layer: tracing takes as long as there are layers."""
    return build(family, num_hidden_layers=1)


@pytest.fixture
def shallow():
    return build(num_hidden_layers=1)


def _traceable(scheme: Scheme) -> bool:
    """Whether it learns or joins at the input, and asks for the value of no position."""
    return (scheme.learns or "embedding" in scheme.slots) and not scheme.breaks_graph


@pytest.mark.one_in(7)
@pytest.mark.parametrize("spec", [*ROUTES, CASES["self_extend"], CASES["window"]])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_graph_gives_the_logits_of_eager_mode(model, spec):
    with patch(model, spec):
        expected = logits(model, tokens())
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert_close(logits(compiled, tokens()), expected)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("spec", [spec for spec in CASES.values() if _traceable(get_scheme(spec))])
def test_encodings_of_the_literature_compile_to_one_graph_too(shallow, spec):
    batch, mask = left_padded([tokens(), tokens(33)])
    with patch(shallow, spec):
        expected = logits(shallow, batch, attention_mask=mask)
        compiled = torch.compile(shallow, fullgraph=True, backend="eager")
        assert_close(logits(compiled, batch, attention_mask=mask)[mask.bool()], expected[mask.bool()])


def test_a_scheme_that_makes_another_one_in_its_frequencies_compiles_to_one_graph(shallow):
    patch(shallow, "ntk_by_parts:factor=4", mount="late")
    expected = logits(shallow, tokens())
    assert_close(logits(torch.compile(shallow, fullgraph=True, backend="eager"), tokens()), expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", ROUTES)
def test_patching_after_compiling_takes_effect_and_goes_away(shallow, spec):
    plain = logits(shallow, tokens())
    with patch(copy.deepcopy(shallow), spec) as handle:
        expected = logits(handle.model, tokens())
    compiled = torch.compile(shallow, fullgraph=True, backend="eager")
    assert_close(logits(compiled, tokens()), plain)
    patch(compiled, spec)
    assert_close(logits(compiled, tokens()), expected)
    unpatch(compiled)
    assert_close(logits(compiled, tokens()), plain)


@pytest.mark.parametrize(("spec", "parts"), [("sinusoidal", "model"), ("floater", "model"), ("floater", "layers")])
def test_positions_at_the_input_enter_a_model_that_is_compiled_already(shallow, spec, parts):
    llama = shallow
    with patch(copy.deepcopy(llama), spec) as handle:
        train(handle.model)
        expected = logits(handle.model, tokens())
    plain = logits(llama, tokens())
    for module in {"model": [llama], "layers": llama.model.layers}[parts]:
        module.compile(backend="eager")
    assert_close(logits(llama, tokens()), plain)
    patch(llama, spec)
    train(llama)
    assert_close(logits(llama, tokens()), expected)
    unpatch(llama)
    assert_close(logits(llama, tokens()), plain)


def train(model):
    """Learned positions that start where they change little get other values."""
    for value in learned_parameters(model).values():
        value.data += 0.3


def test_a_forward_that_others_set_later_stays(llama):
    plain = logits(llama, tokens())
    patch(llama, "sinusoidal")
    copied = copy.deepcopy(llama)
    accelerate.cpu_offload(llama.model, execution_device="cpu")
    unpatch(llama)
    assert torch.equal(logits(llama, tokens()), plain)
    accelerate.hooks.remove_hook_from_submodules(llama)
    assert torch.equal(logits(llama, tokens()), plain)
    unpatch(copied)
    assert "forward" not in vars(copied.model)


def test_one_graph_serves_texts_of_different_lengths(shallow):
    with patch(shallow, "rerope:window=6+logn:training_length=8"):
        compiled = torch.compile(shallow, fullgraph=True, dynamic=True, backend="eager")
        for length in (40, 33, 57):
            assert_close(logits(compiled, tokens(length)), logits(shallow, tokens(length)))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["rerope:window=64", "xpos:scale_base=64"])
def test_a_compiled_prefill_is_as_eager_mode_forward_and_backward_without_more_graphs(shallow, spec):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    patch(shallow, spec)
    compiled = torch.compile(shallow, fullgraph=True, backend=backend)
    for length in (600, 40, 700):
        texts = tokens(length, rows=2)
        found = {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients(compiled, texts).items()}
        assert_same_gradients(found, gradients(shallow, texts))
    assert len(graphs) == 2  # one, and one for any length, as without a patch
    masks = [node.args[1] for graph in graphs for node in graph.graph.nodes if "rope_patch.spans" in str(node.target)]
    assert masks == [None, None], "groups are read, not a mask of all pairs"


@pytest.mark.nightly
@pytest.mark.parametrize("spec", [CASES["rerope"], COMPOSITIONS[2]])
def test_generated_code_gives_the_logits_of_eager_mode(shallow, spec):
    with patch(shallow, spec):
        expected = logits(shallow, tokens())
        compiled = torch.compile(shallow, fullgraph=True)
        assert_close(logits(compiled, tokens()), expected, 1e-4)


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "spec", [CASES[name] for name in ("yarn", "rerope", "dca", "alibi", "shaw", "cope", "sinusoidal")]
)
@pytest.mark.parametrize("static", [True, False])
def test_decoding_with_a_compiled_model_equals_the_full_forward(shallow, spec, static):
    batch, mask = left_padded([tokens(), tokens(33)])
    cache = StaticCache(config=shallow.config, max_cache_len=45) if static else DynamicCache()
    with patch(shallow, spec):
        expected = logits(shallow, batch, attention_mask=mask, position_ids=positions_of(mask))
        compiled = torch.compile(shallow, fullgraph=True, backend="eager")
        found = cached_logits(compiled, batch, [37, 1, 1, 1], mask, cache)
        assert_close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.nightly
def test_generated_code_decodes_as_eager_mode_does(shallow):
    with patch(shallow, "rerope", window=6):
        expected = logits(shallow, tokens(16))
        cache = StaticCache(config=shallow.config, max_cache_len=20)
        start = cached_logits(shallow, tokens(16)[:, :13], [13], cache=cache)
        compiled = torch.compile(shallow, fullgraph=True)
        with torch.no_grad():
            steps = [compiled(tokens(16)[:, place : place + 1], past_key_values=cache).logits for place in (13, 14, 15)]
        assert_close(torch.cat([start, *steps], dim=1), expected, 1e-4)
