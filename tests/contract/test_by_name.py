"""A folder that carries a scheme, loaded by plain Transformers with `attn_implementation="rope_patch"`: it computes
what `rope_patch.from_pretrained` computes, from its first call on, or it refuses with the line to write instead.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

import rope_patch
from rope_patch import UnsupportedModel, get_scheme, patch, unpatch
from tests.cases import ROUTES
from tests.families import BIASED, RUN, build
from tests.models import absolute_families, mrope_families, t5_families
from tests.runs import logits, tokens

NAME = "rope_patch"
REROPE, SELF_EXTEND = "rerope:window=6", "self_extend:group_size=4,window=8"
SPECS = [REROPE, SELF_EXTEND, "resonance", "alibi", "yarn:factor=4+rerope:window=6", "dynamic_ntk:factor=2"]


def by_name(folder, auto=AutoModelForCausalLM, **arguments):
    return auto.from_pretrained(folder, attn_implementation=NAME, **arguments)


def saved(model, spec, folder):
    """The folder of a model under a scheme, and the model that this library reads from it."""
    with patch(model, spec):
        model.save_pretrained(folder)
    return rope_patch.from_pretrained(folder)


def padded(rows=2):
    """Token ids `(rows, length)`, and a mask of seven pads before the first row."""
    ids = tokens(rows=rows)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return ids, mask


def packed(ids):
    """Positions of two documents in a row of tokens."""
    length = ids.shape[1]
    return torch.cat([torch.arange(11), torch.arange(length - 11)])[None].expand(len(ids), -1)


def generated(model, ids, mask, **settings):
    """The scores of the last of four tokens, `(rows, vocabulary)`, and the tokens."""
    settings |= {"max_new_tokens": 4, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    output = model.generate(ids, attention_mask=mask, **settings)
    return torch.cat([output.scores[-1].flatten(), output.sequences.flatten().float()])


IDS, MASK = padded()
CALLS = {
    "a text": lambda model: logits(model, IDS),
    "left pads": lambda model: logits(model, IDS, attention_mask=MASK),
    "right pads": lambda model: logits(model, IDS, attention_mask=MASK.flip(1)),
    "with positions": lambda model: logits(model, IDS, attention_mask=MASK, position_ids=MASK.cumsum(1).clamp(1) - 1),
    "a packed row": lambda model: logits(model, IDS, position_ids=packed(IDS)),
    "generate": lambda model: generated(model, IDS, MASK),
    "a static cache": lambda model: generated(model, IDS, MASK, cache_implementation="static", disable_compile=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("spec", SPECS)
def test_the_first_call_and_the_next_are_those_of_the_library(llama, spec, call, tmp_path):
    expected = call(saved(llama, spec, tmp_path))
    model = by_name(tmp_path)
    assert model.config._attn_implementation == NAME
    assert torch.equal(call(model), expected)
    assert torch.equal(call(model), expected)


@pytest.mark.parametrize("spec", ROUTES)
def test_every_kind_of_scheme_is_right_or_refused(llama, spec, tmp_path):
    reference = saved(llama, spec, tmp_path)
    model, scheme = by_name(tmp_path), get_scheme(spec)
    if scheme.learns or "embedding" in scheme.slots:
        with pytest.raises(UnsupportedModel, match=r"write rope_patch\.from_pretrained\("):
            CALLS["left pads"](model)
        assert model.config._attn_implementation == NAME
    else:
        assert torch.equal(CALLS["left pads"](model), CALLS["left pads"](reference))


@pytest.mark.parametrize("family", RUN)
@pytest.mark.parametrize("spec", [SELF_EXTEND, "resonance"])
def test_every_family_is_right(family, spec, tmp_path):
    try:
        reference = saved(build(family), spec, tmp_path)
    except UnsupportedModel:
        pytest.skip("not patched at all")
    if family in BIASED:
        refused(by_name(tmp_path), CALLS["left pads"], "replaces no rotation here")
        return
    assert torch.equal(CALLS["left pads"](by_name(tmp_path)), CALLS["left pads"](reference))


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_positions_on_several_axes(family, tmp_path):
    reference = saved(mrope_families.build(family), SELF_EXTEND, tmp_path)
    model = by_name(tmp_path, type(reference))
    assert torch.equal(CALLS["left pads"](model), CALLS["left pads"](reference))


def test_gradients_of_the_first_step(llama, tmp_path):
    reference = saved(llama, SELF_EXTEND, tmp_path)
    model = by_name(tmp_path)
    for each in (reference, model):
        each.train()
        each.gradient_checkpointing_enable({"use_reentrant": False})
        each(IDS, attention_mask=MASK, labels=IDS).loss.backward()
    for (name, one), other in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_it_is_patched_like_any_other(llama, tmp_path):
    plain = logits(llama, IDS)
    reference = saved(llama, REROPE, tmp_path)
    model = by_name(tmp_path)
    CALLS["left pads"](model)
    hooks = {name: len(module._forward_pre_hooks) for name, module in reference.named_modules()}
    logits(model, IDS)
    assert {name: len(module._forward_pre_hooks) for name, module in model.named_modules()} == hooks
    assert torch.equal(logits(copy.deepcopy(model), IDS), logits(reference, IDS))
    assert unpatch(model).scheme == get_scheme(REROPE)
    assert torch.equal(logits(model, IDS), plain)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_unpatch_after_the_first_call_leaves_nothing(llama, tmp_path):
    plain = logits(llama, IDS, attention_mask=MASK)
    saved(llama, SELF_EXTEND, tmp_path)
    model = by_name(tmp_path)
    CALLS["left pads"](model)
    unpatch(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(logits(model, IDS, attention_mask=MASK), plain)


def test_a_line_may_mount_it_before(llama, tmp_path):
    expected = logits(saved(llama, REROPE, tmp_path), IDS)
    model = by_name(tmp_path)
    rope_patch.repatch(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model, IDS), expected)
    assert torch.equal(logits(rope_patch.from_pretrained(tmp_path, attn_implementation=NAME), IDS), expected)


def test_another_scheme_may_take_its_place(llama, tmp_path):
    saved(llama, REROPE, tmp_path)
    model = by_name(tmp_path)
    with pytest.raises(rope_patch.InvalidField):
        patch(model, "self_extend", group_size=0, window=8)
    assert model.config._attn_implementation == NAME  # so that it does not compute plainly
    with patch(model, SELF_EXTEND), patch(llama, SELF_EXTEND):
        assert torch.equal(logits(model, IDS), logits(llama, IDS))


def test_the_name_on_a_patched_model_changes_nothing(llama):
    with patch(llama, REROPE):
        expected = [call(llama) for call in CALLS.values()]
        for call, value in zip(CALLS.values(), expected, strict=True):
            llama.set_attn_implementation(NAME)
            torch.testing.assert_close(call(llama), value)
            assert llama.config._attn_implementation == "sdpa"


def test_a_name_that_is_set_later_mounts_it_too(llama, tmp_path):
    reference = saved(llama, REROPE, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.set_attn_implementation(NAME)
    assert torch.equal(logits(model, IDS), logits(reference, IDS))


def test_a_backbone_alone(llama, tmp_path):
    reference = saved(llama, REROPE, tmp_path)
    backbone = by_name(tmp_path, AutoModel)
    assert torch.equal(backbone(IDS).last_hidden_state, reference.model(IDS).last_hidden_state)
    within = by_name(tmp_path)
    assert torch.equal(within.model(IDS).last_hidden_state, reference.model(IDS).last_hidden_state)
    assert torch.equal(logits(within, IDS), logits(reference, IDS))


def test_adapters_around_it(llama, tmp_path):
    reference = saved(llama, REROPE, tmp_path)
    models = [get_peft_model(each, LoraConfig(r=2, init_lora_weights=True)) for each in (reference, by_name(tmp_path))]
    assert torch.equal(*(logits(each, IDS) for each in models))


def test_a_first_call_beside_the_first(llama, tmp_path, monkeypatch):
    expected = CALLS["left pads"](saved(llama, SELF_EXTEND, tmp_path))
    model, inner = by_name(tmp_path), []
    embed = type(model.model.embed_tokens).forward

    def said():
        with pytest.raises(UnsupportedModel) as error:
            CALLS["left pads"](model)
        return str(error.value)

    def beside(module, ids):
        """In another thread, the model is called while the stack of this call has begun."""
        if not inner:
            inner.append(None)
            thread = threading.Thread(target=lambda: inner.append(said()))
            thread.start()
            thread.join()
        return embed(module, ids)

    monkeypatch.setattr(type(model.model.embed_tokens), "forward", beside)
    assert torch.equal(CALLS["left pads"](model), expected)
    assert "another thread calls it" in inner[1]
    assert torch.equal(CALLS["left pads"](model), expected)


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(model, call, why):
    """The call is refused twice with the line to write, and the model stays as it was loaded."""
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match=why) as error:
            call(model)
        assert "rope_patch.from_pretrained(" in str(error.value)
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert model.config._attn_implementation == NAME


def test_a_mask_of_the_users_own(llama, tmp_path):
    saved(llama, REROPE, tmp_path)
    length = IDS.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    refused(by_name(tmp_path), lambda model: logits(model, IDS, attention_mask=mask), "passes its own mask")


def test_what_plain_transformers_leaves_out(llama, tmp_path):
    saved(llama, "t5", tmp_path)
    refused(by_name(tmp_path), CALLS["a text"], "plain Transformers did not load the parameters that t5")


def test_vectors_instead_of_tokens(llama, tmp_path):
    saved(llama, "sinusoidal", tmp_path)
    refused(by_name(tmp_path), CALLS["a text"], "sinusoidal.* changes what enters the model")


class Early(LlamaModel):
    """Computes its tables before its mask, as a few families do."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        states, positions = self.embed_tokens(input_ids), torch.arange(input_ids.shape[1])[None]
        tables = self.rotary_emb(states, position_ids=positions)
        mask = create_causal_mask(self.config, states, attention_mask, None, position_ids=positions)
        for layer in self.layers:
            states = layer(states, attention_mask=mask, position_embeddings=tables, position_ids=positions)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(states))


@pytest.mark.parametrize("spec", [REROPE, "resonance", "yarn:factor=4"])
def test_tables_that_come_before_the_mask(llama, spec, tmp_path):
    saved(llama, spec, tmp_path)
    model = by_name(tmp_path)
    model.model.__class__ = Early
    refused(model, CALLS["a text"], "its tables of positions were computed before")


class Computing(LlamaModel):
    """Reads positions itself, behind its mask."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        states, position_ids = self.embed_tokens(input_ids), torch.arange(input_ids.shape[1])[None]
        mask = create_causal_mask(self.config, states, attention_mask, None, position_ids=position_ids)
        states = states * scales_of(position_ids)
        tables = self.rotary_emb(states, position_ids=position_ids)
        for layer in self.layers:
            states = layer(states, attention_mask=mask, position_embeddings=tables, position_ids=position_ids)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(states))


def scales_of(position_ids):
    return 1 + position_ids[..., None] / 100


def test_a_stack_that_computes_with_positions(llama, tmp_path):
    saved(llama, REROPE, tmp_path)
    model = by_name(tmp_path)
    model.model.__class__ = Computing
    refused(model, CALLS["left pads"], "so the model counts pads as positions")
    logits(model, IDS)


def test_positions_that_are_no_rotation(tmp_path):
    with patch(absolute_families.build("bert"), "hierarchical") as handle:
        handle.model.save_pretrained(tmp_path / "bert")
    ids = torch.randint(1, absolute_families.VOCABULARY, (2, 4))
    refused(by_name(tmp_path / "bert", AutoModel), lambda model: model(ids), "replaces no rotation here")
    t5 = t5_families.build()
    with patch(t5, "t5:interpolation=2"):
        t5.save_pretrained(tmp_path / "t5")
    model = by_name(tmp_path / "t5", AutoModelForSeq2SeqLM)
    refused(model, lambda each: each(input_ids=ids, decoder_input_ids=ids), "replaces no rotation here")


def test_a_checkpoint_without_a_scheme(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    refused(by_name(tmp_path), CALLS["a text"], r"records no scheme: .* rope_patch\.patch\(model, SCHEME\)")


def test_adapters_that_transformers_loaded(llama, tmp_path):
    saved(llama, REROPE, tmp_path / "base")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(r=2))
    adapted.save_pretrained(tmp_path / "adapters")
    refused(by_name(tmp_path / "adapters"), CALLS["a text"], "adapters were loaded into it")


def test_a_call_past_the_hooks(llama, tmp_path):
    saved(llama, REROPE, tmp_path)
    refused(by_name(tmp_path), lambda model: model.model.forward(IDS), "without the hooks of the model")


def test_a_compiled_call_is_refused(llama, tmp_path):
    saved(llama, REROPE, tmp_path)
    model = by_name(tmp_path)
    with pytest.raises(Exception, match="rope_patch"):
        torch.compile(model, backend="eager", fullgraph=True)(IDS)
    with pytest.raises(Exception, match="rope_patch"):
        torch.compile(model, backend="eager")(IDS)
    assert model.config._attn_implementation == NAME


# --- without the name, and without the library ------------------------------------------------------------------------


def test_without_the_name_the_folder_is_read_plainly(llama, tmp_path):
    plain = logits(llama, IDS)
    saved(llama, REROPE, tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), IDS), plain)


SCRIPT = """
import sys
{first}
from transformers import AutoModelForCausalLM
{then}
AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="rope_patch")
print("loaded")
"""


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ("", "", '"rope_patch"` is not supported'),
        ("import rope_patch", "", "loaded"),
        ("", "import rope_patch", "loaded"),
        ("import transformers.modeling_utils", "import rope_patch", "loaded"),
    ],
    ids=["without", "before", "after", "long after"],
)
def test_an_import_of_the_library_is_what_it_takes(first, then, said, llama, tmp_path):
    saved(llama, REROPE, tmp_path)
    script = SCRIPT.format(first=first, then=then)
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, cwd=root)
    assert said in done.stdout + done.stderr
