"""Learned parameters: they live on the patched model, train, travel with it, and go with the patch."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import rope_patch
from rope_patch import NotPatched, SlotConflict, describe, get_scheme, patch, repatch, unpatch
from rope_patch.mounting.parameters import NAME
from tests.cases import ALL, QUIET
from tests.families import GENERIC, build, from_config
from tests.runs import assert_close, gradients, logits, tokens

LEARNING = [spec for spec in ALL if get_scheme(spec).learns and "alibi" not in (spec, *spec.split("+"))]
learning = pytest.mark.parametrize("spec", LEARNING)


def learned(model):
    return {name: value for name, value in model.named_parameters() if NAME in name.split(".")}


def train_a_step(model, rate=0.1):
    """Every learned number another than at the start, so that what travels can be told from what starts anew."""
    with torch.no_grad():
        for index, value in enumerate(learned(model).values()):
            value += rate * torch.rand(value.shape, generator=torch.Generator().manual_seed(index)).to(value)


@learning
def test_they_are_parameters_of_the_model_and_go_with_the_patch(llama, spec):
    before, plain = llama.state_dict().keys(), logits(llama, tokens())
    patch(llama, spec)
    assert learned(llama)
    assert llama.state_dict().keys() - before == learned(llama).keys()
    assert all(value.requires_grad for value in learned(llama).values())
    train_a_step(llama)
    unpatch(llama)
    assert llama.state_dict().keys() == before
    assert torch.equal(logits(llama, tokens()), plain)


@learning
def test_they_start_alike_at_every_patch_and_touch_no_source_of_chance(llama, spec):
    state = torch.random.get_rng_state()
    with patch(llama, spec):
        first = logits(llama, tokens())
    with patch(llama, spec):
        assert torch.equal(logits(llama, tokens()), first)
    assert torch.equal(torch.random.get_rng_state(), state)


@learning
def test_they_follow_dtype_and_device_of_the_model(llama, spec):
    patch(llama.bfloat16(), spec)
    precise = get_scheme(spec).precise
    for name, value in learned(llama).items():
        assert value.dtype == (torch.float32 if name.rpartition(".")[2] in precise else torch.bfloat16)
    assert logits(llama, tokens()).isfinite().all()


@pytest.mark.parametrize("spec", QUIET)
def test_beside_the_rotation_a_pretrained_model_starts_as_it_was(llama, spec):
    expected = logits(llama, tokens())
    with patch(llama, spec):
        assert_close(logits(llama, tokens()), expected, QUIET[spec])


@pytest.mark.one_in(3)
@learning
@pytest.mark.parametrize("max_shard_size", ["5GB", "30KB"])
def test_trained_numbers_survive_saving_and_loading(llama, spec, max_shard_size, tmp_path):
    patch(llama, spec)
    train_a_step(llama)
    expected = logits(llama, tokens())
    llama.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert torch.equal(logits(rope_patch.from_pretrained(tmp_path), tokens()), expected)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(plain, tokens()), logits(build(), tokens()))
    repatch(plain)
    assert torch.equal(logits(plain, tokens()), expected)
    for name, value in learned(llama).items():
        assert torch.equal(learned(plain)[name], value)


@pytest.mark.one_in(3)
@learning
def test_the_stack_alone_takes_them_up(llama, spec, tmp_path):
    patch(llama, spec)
    train_a_step(llama)
    llama.save_pretrained(tmp_path)
    stack = AutoModel.from_pretrained(tmp_path)
    repatch(stack)
    with torch.no_grad():
        found, expected = (model(tokens(), use_cache=False)[0] for model in (stack, llama.model))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("cut", [False, True])
def test_a_checkpoint_without_them_or_with_shorter_ones_is_refused_by_name(llama, cut, tmp_path):
    patch(llama, "shaw:max_distance=6")
    state = llama.state_dict()
    for name in [name for name in state if NAME in name.split(".")]:
        value = state.pop(name)
        state |= {name: value[:1].clone()} if cut else {}
    llama.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(NotPatched, match=r"has no model\.layers\.0\.self_attn\.rope_patch\.\w+ of shape .* shaw"):
        rope_patch.from_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(NotPatched, match="shaw"):
        repatch(plain)
    assert torch.equal(logits(plain, tokens()), logits(build(), tokens()))


@pytest.mark.one_in(3)
@learning
def test_adapters_train_and_save_them(spec, tmp_path):
    model = build()
    patch(model, spec)
    start = {name: value.detach().clone() for name, value in learned(model).items()}
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[NAME])
    adapted = get_peft_model(model, settings).train()
    found = gradients(adapted, tokens(rows=2))
    trained = [name for name in found if f".{NAME}." in name]
    assert len(trained) == len(start)
    assert all(found[name] is not None and found[name].any() for name in trained)
    torch.optim.SGD(adapted.parameters(), lr=0.5).step()
    expected = logits(adapted.eval(), tokens())
    adapted.save_pretrained(tmp_path)

    again = build()
    patch(again, spec)
    loaded = PeftModel.from_pretrained(again, tmp_path)
    assert torch.equal(logits(loaded, tokens()), expected)
    with loaded.disable_adapter():
        fresh = build()
        patch(fresh, spec)
        assert_close(logits(loaded, tokens()), logits(fresh, tokens()))
    merged = loaded.merge_and_unload()
    assert_close(logits(merged, tokens()), expected, 1e-4)
    unpatch(merged)
    assert not learned(merged)


@learning
def test_a_copy_has_numbers_of_its_own(llama, spec):
    patch(llama, spec)
    expected = logits(llama, tokens())
    copied = copy.deepcopy(llama)
    train_a_step(copied)
    assert (logits(copied, tokens()) - expected).abs().max() > 1e-5
    assert torch.equal(logits(llama, tokens()), expected)


@learning
def test_describe_says_what_is_new_and_what_was_trained(llama, spec):
    patch(llama, spec)
    table = describe(llama)
    count = sum(value.numel() for value in learned(llama).values())
    lines = [line for line in table.splitlines() if line.startswith("learned ")]
    assert lines
    assert all("new and untrained" in line for line in lines)
    assert sum(int(line.split(": ")[1].split(" numbers")[0].replace(",", "")) for line in lines) == count
    train_a_step(llama)
    lines = [line for line in describe(llama).splitlines() if line.startswith("learned ")]
    assert all(line.endswith(", trained") for line in lines)


def test_two_parts_that_learn_under_one_name_are_refused(llama):
    plain = logits(llama, tokens())
    with pytest.raises(SlotConflict, match="called '"):
        patch(llama, "kerple:variant=log+kerple:variant=power")
    assert torch.equal(logits(llama, tokens()), plain)


@pytest.mark.parametrize("spec", ["kerple", "learned_rope"])
def test_modules_that_share_an_index_learn_numbers_of_their_own(spec):
    shape = {**GENERIC, "num_hidden_layers": 3, "num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 2}
    model = from_config(AutoConfig.for_model("hrm_text", **shape))  # runs a low and a high stack in turn
    patch(model, spec)
    model(tokens(), use_cache=False).logits.square().mean().backward()
    assert all(value.grad is not None and value.grad.any() for value in learned(model).values())
