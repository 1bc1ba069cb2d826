"""Continuous batching: each request gets the tokens that `generate` gives it alone, whoever else is in the batch."""

import contextlib
import inspect
import itertools

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.models.llama.modeling_llama import LlamaAttention

from rope_patch import get_scheme, patch
from tests.cases import ALL
from tests.families import TRAINING_LENGTH, build
from tests.runs import generated, tokens

NEW = 4
WRITES_IN_MODULES = "cache" in inspect.signature(LlamaAttention.forward).parameters
"""Whether attention modules write to a paged cache: since Transformers 5.24."""
PAGE = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # Transformers 5.17
LENGTHS = (5, TRAINING_LENGTH + 30, 1, TRAINING_LENGTH - 2, 2 * TRAINING_LENGTH + 6)
"""Of the prompts; the longest are read in several chunks."""

FAMILIES = [
    "baichuan",
    "baichuan_alibi",
    "cohere",
    "gemma3",
    "glm",
    "gpt_neox",
    "gpt_oss",
    "mistral",
    "phi3",
    "qwen3",
    "smollm3",
]
"""One of each layout and window that continuous batching serves."""

SPECS = [
    "rerope:window=6",
    "self_extend:group_size=4,window=7",
    "rope+alibi",
    "logn:training_length=8",
    "yarn:factor=4",
]


def prompts_of(*lengths):
    shared = tokens(lengths[-1])  # one prefix for all, so that blocks are shared
    return [shared[:, :length] if i % 2 else tokens(length, seed=i + 1) for i, length in enumerate(lengths)]


def batched(model, prompts, chunk=16, persistent_manager=False, **settings):
    """The new tokens of every request; a request that failed raises its error's text."""
    settings = {"num_blocks": 64, PAGE: 32, "max_batch_tokens": chunk, "use_cuda_graph": False, **settings}
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(
        [prompt[0].tolist() for prompt in prompts],
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        persistent_manager=persistent_manager,
        warmup=False,
    )
    errors = {output.error for output in found.values()} - {None}
    if errors:
        raise RuntimeError(errors.pop())
    return [output.generated_tokens for output in found.values()]


def one_by_one(model, prompts):
    return [generated(model, prompt, NEW, eos_token_id=-1, pad_token_id=0)[0].tolist() for prompt in prompts]


def refused(spec):
    return bool(get_scheme(spec).methods & {"running_bias"}) or get_scheme(spec).stateful


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", [spec for spec in ALL if not refused(spec) and not get_scheme(spec).length_dependent])
def test_every_request_gets_what_generate_gives_it_alone(spec):
    model, prompts = build("llama"), prompts_of(*LENGTHS)
    with patch(model, spec):
        assert batched(model, prompts) == one_by_one(model, prompts)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_of_every_layout(family, spec):
    if WRITES_IN_MODULES and family == "gpt_neox":
        pytest.skip("a GPT-NeoX of Transformers 5.24 cannot write to a paged cache, with no patch")
    model, prompts = build(family), prompts_of(*LENGTHS)
    with patch(model, spec):
        assert batched(model, prompts) == one_by_one(model, prompts)


@pytest.mark.parametrize("spec", [spec for spec in ALL if get_scheme(spec).length_dependent])
def test_frequencies_that_follow_the_length_want_whole_prompts(spec):
    model, prompts = build("llama"), prompts_of(*LENGTHS)
    with patch(model, spec):
        assert batched(model, prompts, chunk=512) == one_by_one(model, prompts)


def test_requests_that_join_a_running_batch_and_leave_it():
    model, prompts = build("llama"), prompts_of(*LENGTHS)
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=16, use_cuda_graph=False, **{PAGE: 32})
    with patch(model, "rerope:window=6+logn:training_length=8"):
        expected = one_by_one(model, prompts)
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=settings, warmup=False
        ) as manager:
            left = manager.add_request(prompts[1][0].tolist(), max_new_tokens=500, streaming=True)
            next(manager.request_id_iter(left))  # it is being answered when the others come
            names = [manager.add_request(prompt[0].tolist(), max_new_tokens=NEW) for prompt in prompts]
            manager.cancel_request(left)
            found = {}
            while len(found) < len(names):
                output = manager.get_result(timeout=60)
                if output.request_id in names:
                    found[output.request_id] = output.generated_tokens
    assert [found[name] for name in names] == expected


@pytest.mark.parametrize("spec", ["dynamic_ntk:length=128", "dynamic_yarn:length=128"])
def test_or_one_length_for_all(spec):
    model, prompts = build("llama"), prompts_of(*LENGTHS)
    with patch(model, spec):
        assert batched(model, prompts) == one_by_one(model, prompts)


@pytest.mark.parametrize("spec", ["rerope:window=6", "logn:training_length=8"])
def test_under_eager_attention(spec):
    model, prompts = build("llama", attn_implementation="eager"), prompts_of(*LENGTHS)
    with patch(model, spec):
        expected = one_by_one(model, prompts)
        assert batched(model, prompts) == expected


@pytest.mark.parametrize("spec", ["native", "rope"])
def test_of_the_alibi_kind_of_baichuan(spec):
    model, prompts = build("baichuan_alibi"), prompts_of(*LENGTHS)
    if spec != "native":
        patch(model, spec)
    assert batched(model, prompts) == one_by_one(model, prompts)


@pytest.mark.parametrize("spec", [spec for spec in ALL if refused(spec)])
def test_what_remembers_more_than_keys_is_refused(spec):
    model = build("llama")
    with patch(model, spec), pytest.raises(RuntimeError, match=r"(sums over earlier|state after each) token"):
        batched(model, prompts_of(3))


def test_another_attention_on_a_patched_module_is_refused():
    model = build("llama")
    with patch(model, "rerope:window=6"):
        model.model.layers[1].self_attn.config._attn_implementation = "sdpa"
        with pytest.raises(
            RuntimeError, match="now has attn_implementation='sdpa', which would bypass rerope:window=6"
        ):
            batched(model, prompts_of(3))


def with_table_only(self, key_states, value_states, layer_idx, kwargs):
    """As `update` writes nothing where there is a block table."""
    if kwargs.get("block_table") is None:
        pytest.fail("keys were written")
    return key_states, value_states


def test_a_block_table_is_refused(monkeypatch):
    model = build("llama")
    monkeypatch.setattr(PagedAttentionCache, "update", with_table_only)
    forward = type(model.model).forward

    def with_table(self, *args, **kwargs):
        return forward(self, *args, **{**kwargs, "block_table": torch.zeros(1, 1, 1)})

    patch(model, "rerope:window=6")
    monkeypatch.setattr(type(model.model), "forward", with_table)
    with pytest.raises(RuntimeError, match="max_blocks_per_request=0"):
        batched(model, prompts_of(3))


@pytest.mark.parametrize("specs", list(itertools.permutations([None, "rerope:window=6", "yarn:factor=4"], 2)))
def test_a_manager_that_was_kept_does_not_outlive_its_scheme(specs):
    model, prompts, found, expected = build("llama"), prompts_of(*LENGTHS), [], []
    for spec in specs:
        with contextlib.nullcontext() if spec is None else patch(model, spec):
            found.append(batched(model, prompts, persistent_manager=True))
            expected.append(one_by_one(model, prompts))
    assert found == expected
    model.destroy_cached_continuous_batching_manager()
