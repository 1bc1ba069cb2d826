"""One graph without a break under every scheme: generation with a static cache, training, and export."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache

from rope_patch import get_scheme, patch
from tests.cases import ALL
from tests.families import build
from tests.runs import assert_close, assert_same_gradients, cached_logits, gradients, left_padded, logits, tokens

TRACEABLE = [spec for spec in ALL if not get_scheme(spec).breaks_graph]
"""Without schemes that ask for the values of positions, of which the table of compatibility says that they break."""

BY_CONTENT = {"content_bias", "weight_factor", "relative_values"}


@pytest.fixture
def shallow():
    """One layer: tracing takes as long as there are layers."""
    return build(num_hidden_layers=1)


def counted_graphs():
    """The graphs and the breaks since the last reset of the counters."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def generated(model, batch, mask, backend=None):
    """Ids of four tokens with a static cache, decoded by a compiled forward where a backend is named."""
    config = None
    if backend is not None:
        config = CompileConfig(backend=backend, fullgraph=False, mode=None)
        config._compile_all_devices = True  # Transformers compiles on a CPU only for tests
    return model.generate(
        batch,
        attention_mask=mask,
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        cache_implementation="static",
        disable_compile=backend is None,
        compile_config=config,
    )


def check_generation(model, spec, backend):
    batch, mask = left_padded([tokens(20), tokens(13)])
    patch(model, spec)
    expected = generated(model, batch, mask)
    counters.clear()
    assert torch.equal(generated(model, batch, mask, backend), expected)
    assert counted_graphs() == (1, 0)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("spec", TRACEABLE)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_generation_with_a_static_cache_is_one_graph(shallow, spec, backend):
    check_generation(shallow, spec, backend)


@pytest.mark.slow
@pytest.mark.one_in(40)
@pytest.mark.parametrize("spec", TRACEABLE)
def test_generated_code_of_one_graph_decodes_with_a_static_cache(shallow, spec):
    check_generation(shallow, spec, "inductor")


@pytest.mark.parametrize("static", [True, False])
def test_keys_of_eager_steps_enter_a_graph_and_come_back(shallow, static):
    """No operator of such a graph is given a subclass of tensors, which `aot_eager` of torch 2.13 refuses."""
    patch(shallow, "rerope", window=6)
    expected = logits(shallow, tokens(16))
    cache = StaticCache(config=shallow.config, max_cache_len=20) if static else DynamicCache()
    compiled = torch.compile(shallow, fullgraph=True, backend="aot_eager")
    found = [cached_logits(shallow, tokens(16)[:, :12], [12], cache=cache)]
    with torch.no_grad():
        for place, forward in ((12, compiled), (13, compiled), (14, shallow), (15, compiled)):
            found.append(forward(tokens(16)[:, place : place + 1], past_key_values=cache).logits)
    assert_close(torch.cat(found, dim=1), expected)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("spec", TRACEABLE)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_training_step_is_one_graph(shallow, spec, backend, trained_parameters):
    patch(shallow, spec)
    texts = tokens(40, rows=2)
    expected = gradients(shallow, texts)
    counters.clear()
    found = gradients(torch.compile(shallow, backend=backend), texts)
    assert counted_graphs() == (1, 0)
    assert_same_gradients({name.removeprefix("_orig_mod."): each for name, each in found.items()}, expected)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("spec", TRACEABLE)
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_gives_the_logits_of_eager_mode(shallow, spec, strict):
    batch, mask = left_padded([tokens(40), tokens(33)])
    patch(shallow, spec)
    given = {"attention_mask": mask, "use_cache": False}
    expected = logits(shallow, batch, attention_mask=mask)
    with torch.no_grad():
        program = torch.export.export(shallow, (batch,), given, strict=strict)
        found = program.module()(batch, **given).logits
    assert_close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("spec", [spec for spec in TRACEABLE if not get_scheme(spec).methods & BY_CONTENT])
def test_no_keys_of_a_whole_cache_become_wider_in_a_graph(shallow, spec):
    """As a copy that every layer would make for every token; terms by content are computed by the definition."""
    shallow.to(torch.bfloat16)
    slots, seen = 53, []

    def backend(graph, _):
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor) and slots in value.shape and shallow.config.head_dim in value.shape:
                seen.append((str(node), value.dtype))
        return graph

    patch(shallow, spec)
    cache = StaticCache(config=shallow.config, max_cache_len=slots)
    cached_logits(shallow, tokens(8), [8], cache=cache)
    compiled = torch.compile(shallow, fullgraph=True, backend=backend)
    found = cached_logits(compiled, tokens(1), [1], cache=cache)
    assert found.isfinite().all()
    assert seen
    assert {dtype for _, dtype in seen} == {torch.bfloat16}, seen
