"""Models whose forwards somebody wrapped, patches inside patches, two threads, and what is recorded or ignored."""

from __future__ import annotations

import copy
import pickle
import threading
import types

import pytest
import torch
from transformers import AutoConfig, BartConfig, BartModel

from rope_patch import (
    InvalidField,
    UnknownScheme,
    UnsupportedModel,
    current_scheme,
    describe,
    get_scheme,
    patch,
    unpatch,
)
from tests.families import build, from_config
from tests.runs import logits, tokens


def lambda_around(module):
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs)


def method_around(module):
    own = module.forward
    module.forward = types.MethodType(lambda self, *args, own=own, **kwargs: own(*args, **kwargs), module)


def subclass_of(module):
    def forward(self, *args, **kwargs):
        return super(type(self), self).forward(*args, **kwargs)

    module.__class__ = type("Wrapped", (type(module),), {"forward": forward})


@pytest.mark.parametrize("wrap", [lambda_around, method_around, subclass_of])
@pytest.mark.parametrize("spec", ["rerope:window=8", "dynamic_yarn", "alibi"])
@pytest.mark.parametrize("layers", [slice(1), slice(None)])
def test_a_wrapped_forward_is_still_a_layer(wrap, spec, layers):
    """A layer was left plain, without a word, because its wrapper names no `position_embeddings`."""
    plain, wrapped = build("llama"), build("llama")
    count = len(plain.model.layers)
    for layer in wrapped.model.layers[layers]:
        wrap(layer.self_attn)
    patch(plain, spec)
    patch(wrapped, spec)
    assert f"{count} attention layers" in str(describe(wrapped))
    torch.testing.assert_close(logits(wrapped, tokens()), logits(plain, tokens()), atol=0, rtol=0)


def test_the_inner_of_two_equal_blocks_leaves_the_scheme():
    model, ids = build("llama"), tokens()
    plain = logits(model, ids)
    with patch(model, "rerope:window=8") as outer:
        patched = logits(model, ids)
        with patch(model, "rerope:window=8") as inner:
            assert inner is outer
        assert torch.equal(logits(model, ids), patched)
    assert torch.equal(logits(model, ids), plain)
    assert current_scheme(model) is None


def test_a_block_that_replaces_a_scheme_gives_it_back():
    model, ids = build("llama"), tokens()
    plain = logits(model, ids)
    with patch(model, "learned_rope"):
        with torch.no_grad():
            next(parameter for name, parameter in model.named_parameters() if "rope_patch" in name).mul_(1.1)
        learned = logits(model, ids)
        with patch(model, "yarn:factor=4", replace=True):
            other = logits(model, ids)
            assert torch.equal(logits(copy.deepcopy(model), ids), other)
            assert torch.equal(logits(pickle.loads(pickle.dumps(model)), ids), other)
        assert current_scheme(model) == get_scheme("learned_rope")
        assert torch.equal(logits(model, ids), learned)
    assert torch.equal(logits(model, ids), plain)
    handle = patch(model, "rerope:window=8")
    replaced = patch(model, "yarn:factor=4", replace=True)
    replaced.remove()  # outside a block nothing returns
    assert current_scheme(model) is None
    assert "without" in repr(handle)


@pytest.mark.parametrize("spec", ["yarn:factor=4", "rerope:window=8"])
def test_threads_patch_a_model_one_after_the_other(spec):
    ids = tokens()
    plain = logits(build("llama"), ids)
    for _ in range(5):
        model, barrier, errors = build("llama"), threading.Barrier(3), []

        def work(model=model, barrier=barrier, errors=errors):
            barrier.wait()
            try:
                patch(model, spec)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert current_scheme(model) == get_scheme(spec)
        unpatch(model)
        assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_a_window_that_the_model_ignores_is_ignored(family):
    """A config that came from a Mistral may keep `sliding_window`; a Llama does not read it."""
    plain, kept = build(family), build(family)
    kept.config.sliding_window = 4
    ids = tokens()
    assert torch.equal(logits(kept, ids), logits(plain, ids))
    patch(plain, "rerope:window=8")
    patch(kept, "rerope:window=8")
    assert torch.equal(logits(kept, ids), logits(plain, ids))


@pytest.mark.parametrize("spec", ["yarn:factor=4", "rerope:window=8", "hierarchical"])
def test_a_falcon_with_alibi_is_refused(spec):
    """A Falcon with ALiBi computes rotary tables and never uses them, so a scheme changed nothing."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    model = from_config(AutoConfig.for_model("falcon", alibi=True, **sizes))
    with pytest.raises(UnsupportedModel, match=r"config\.alibi=True: it adds ALiBi to its scores"):
        patch(model, spec)


@pytest.mark.filterwarnings("ignore")  # of torch.jit, which is deprecated
def test_a_recording_by_torch_jit_is_refused_where_pieces_are_scored():
    model = build("llama")

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, use_cache=False).logits

    patch(model, "rerope:window=8", attention="merged")
    with pytest.raises(UnsupportedModel, match=r"torch\.export\.export"):
        torch.jit.trace(Logits(), tokens(), check_trace=False)


def test_a_list_with_commas_is_shown_as_it_is_written():
    with pytest.raises(UnknownScheme, match=r"joined by a plus: write 'rerope\+logn'"):
        patch(build("llama"), "rerope,logn")


@pytest.mark.parametrize("word", ["sdpa", "eager", "flash_attention_2", "flash_attention_3"])
def test_the_attention_of_the_model_is_no_executor(word):
    with pytest.raises(InvalidField, match=f"attention='{word}' is the attention of the model; leave `attention` out"):
        patch(build("llama"), "rerope:window=8", attention=word)


def test_several_stacks_are_named_by_their_paths():
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 97}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartModel(BartConfig(**sizes, **heads, encoder_ffn_dim=32, decoder_ffn_dim=32))
    with pytest.raises(UnsupportedModel, match=r"patch\(model\.encoder, SCHEME\)"):
        patch(model, "hierarchical")
    patch(model.encoder, "hierarchical")
