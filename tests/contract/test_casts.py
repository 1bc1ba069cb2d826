"""Frequencies and casts: what a scheme writes is float32 or wider, before and after a cast of the model; the
checkpoint's own are those that the model has, with a warning where a cast has rounded them.
"""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from rope_patch import PerLayer, RopePatchWarning, describe, from_pretrained, native_scheme, patch, unpatch
from rope_patch.models.find_stacks import read_stack
from tests.cases import ALL, CASES, ROUTES
from tests.families import build
from tests.releases import since
from tests.runs import assert_close, generated, logits, tokens
from tests.snapshots import snapshot

HALF = [torch.bfloat16, torch.float16]
STATIC = [
    spec
    for name, spec in CASES.items()
    if name
    in {
        "pi",
        "ntk",
        "ntk_parts",
        "ntk_mixed",
        "yarn",
        "abf",
        "llama3",
        "proportional",
        "giraffe",
        "clip",
        "resonance",
    }
]
TABLES = [*STATIC, "yarn:factor=4+logn:training_length=8", "rope+alibi"]
OWN = [
    "rerope:window=6",
    "logn:training_length=8",
    "self_extend:group_size=4,window=7",
    "window:window=7",
]
REPLACING = ["alibi", "nope", "dynamic_ntk:factor=2", "yarn:factor=4+rerope:window=6", CASES["xpos"]]
FAMILIES = ["llama", "gemma3", "gemma3_yarn", "llama_yarn", "llama_longrope", "llama_dynamic", "qwen3_5_text"]


def tables_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The frequencies by which the layers of a model rotate, by module and name."""
    return {name: value for name, value in model.named_buffers() if name.endswith("inv_freq")}


def warned(action) -> list[str]:
    """The warning for frequencies that were rounded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RopePatchWarning)
        action()
    return [str(each.message) for each in caught if "has rounded" in str(each.message)]


def exact_tables(family: str, spec) -> dict[str, torch.Tensor]:
    model = build(family)
    patch(model, spec)
    return tables_of(model)


def assert_exact(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, table in tables_of(model).items():
        assert table.dtype == torch.float32, name
        assert torch.equal(table, expected[name]), name


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("spec", TABLES)
def test_cast_then_patch_writes_exact_frequencies(spec, dtype):
    expected, model = exact_tables("llama", spec), build().to(dtype)
    assert tables_of(model)["model.rotary_emb.inv_freq"].dtype == dtype
    assert not warned(lambda: patch(model, spec))
    assert_exact(model, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_every_kind_of_rotary_module(family):
    expected, model = exact_tables(family, "abf:base=777"), build(family).to(torch.bfloat16)
    patch(model, "abf:base=777")
    written = [name for name in expected if not torch.equal(expected[name], tables_of(build(family))[name])]
    assert written
    for name in written:
        assert torch.equal(tables_of(model)[name], expected[name])
    model = build(family)
    patch(model, "abf:base=777")
    model.to(torch.bfloat16)
    for name in written:
        assert torch.equal(tables_of(model)[name], expected[name])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("spec", TABLES)
@pytest.mark.parametrize("how", ["to", "half", "in place", "twice"])
def test_patch_then_cast_keeps_them(spec, dtype, how):
    """As `Module.to`, DeepSpeed and `bf16_full_eval` cast, and as FSDP casts buffers."""
    expected, model = exact_tables("llama", spec), build()
    patch(model, spec)

    def cast() -> None:
        if how == "in place":
            for table in tables_of(model).values():
                table.data = table.to(dtype)
        elif how == "half":
            model.half() if dtype == torch.float16 else model.bfloat16()
        else:
            model.to(dtype)
        if how == "twice":
            model.float().to(dtype)
        logits(model, tokens())

    assert not warned(cast)
    assert_exact(model, expected)


@pytest.mark.parametrize("spec", [*TABLES, *REPLACING])
def test_angles_at_a_far_position(spec):
    """The rotation of a model that was cast before or after is that of one that was loaded in half precision."""
    loaded, before, after = (build() for _ in range(3))
    table = loaded.model.rotary_emb.inv_freq
    loaded.to(torch.bfloat16)
    loaded.model.rotary_emb.inv_freq = table  # `from_pretrained` keeps it
    loaded.model.rotary_emb.original_inv_freq = table.clone()
    patch(loaded, spec)
    patch(before.to(torch.bfloat16), spec)
    patch(after, spec)
    after.to(torch.bfloat16)
    far = torch.arange(1000, 1000 + 40)[None]
    expected = logits(loaded, tokens(), position_ids=far)
    assert torch.equal(logits(before, tokens(), position_ids=far), expected)
    assert torch.equal(logits(after, tokens(), position_ids=far), expected)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("spec", OWN)
def test_the_checkpoints_own_stay_and_a_warning_says_so(spec, dtype):
    model = build().to(dtype)
    before, table = snapshot(model), model.model.rotary_emb.inv_freq
    (said,) = warned(lambda: patch(model, spec))
    exact = build().model.rotary_emb.inv_freq
    wrong = float((table.float() - exact).abs().max()) * 32
    assert f"rounded the model's own frequencies to {str(dtype)[6:]}" in said
    assert f"wrong by up to {wrong:.2g} rad at position 32" in said
    assert f"from_pretrained(..., dtype={dtype})" in said
    assert said.partition(": load")[0] in str(describe(model))
    assert model.model.rotary_emb.inv_freq is table
    assert not warned(lambda: logits(model, tokens()))
    unpatch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("spec", OWN)
def test_a_cast_later_warns_once(spec):
    model = build()
    assert not warned(lambda: patch(model, spec))
    (said,) = warned(lambda: model.to(torch.bfloat16))
    assert "instead of .to(torch.bfloat16)" in said
    assert not warned(lambda: (logits(model, tokens()), model.float(), model.half(), generated(model, tokens(), 3)))
    other = build()
    patch(other, spec)
    other.model.rotary_emb.inv_freq.data = other.model.rotary_emb.inv_freq.to(torch.bfloat16)
    assert len(warned(lambda: [logits(other, tokens()) for _ in range(3)])) == 1


def test_no_warning_where_nothing_was_rounded():
    for dtype in (torch.float32, torch.float64):
        for spec in (*OWN, *TABLES, *REPLACING):
            model = build().to(dtype)
            assert not warned(lambda model=model, spec=spec: (patch(model, spec), logits(model, tokens())))
    for spec in REPLACING:  # these do not read the model's tables
        model = build().to(torch.bfloat16)
        assert not warned(lambda model=model, spec=spec: (patch(model, spec), logits(model, tokens())))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama_longrope", "llama_dynamic")])
@pytest.mark.parametrize("dtype", [*HALF, torch.float64])
def test_the_native_scheme_is_a_no_op_bit_for_bit_on_a_cast_model(family, dtype):
    plain, model = build(family).to(dtype), build(family).to(dtype)
    expected = logits(plain, tokens(30))
    with patch(model, native_scheme(model)):
        assert torch.equal(logits(model, tokens(30)), expected)
    model = build(family)
    with patch(model, native_scheme(model)):
        assert torch.equal(logits(model.to(dtype), tokens(30)), expected)
    assert torch.equal(logits(model, tokens(30)), expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", [*ROUTES, *STATIC])
@pytest.mark.parametrize("dtype", [*HALF, torch.float64])
@pytest.mark.parametrize("runs", [True, False])
def test_unpatch_after_a_cast_gives_the_plain_model_of_that_dtype(spec, dtype, runs):
    model, plain = build(), build().to(dtype)
    patch(model, spec)
    model.to(dtype)
    if runs:
        logits(model, tokens())
    unpatch(model)
    assert torch.equal(logits(model, tokens()), logits(plain, tokens()))
    for name, table in tables_of(plain).items():
        assert table.dtype == tables_of(model)[name].dtype
        assert torch.equal(table, tables_of(model)[name])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("spec", ALL)
def test_a_model_that_was_cast_before_is_restored_bit_for_bit(spec):
    model = build().to(torch.bfloat16)
    before = snapshot(model)
    patch(model, spec)
    logits(model, tokens(24))
    unpatch(model)
    assert snapshot(model) == before


def test_a_table_that_was_rounded_and_widened_again():
    """A rounded table is known by its values, and not refused as foreign."""
    for dtype in HALF:
        model = build().to(dtype).float()
        assert read_stack(model).rotary[0].as_declared
        assert warned(lambda model=model: patch(model, "logn:training_length=8"))
        unpatch(model)
        patch(model, "yarn:factor=4")
        assert_exact(model, exact_tables("llama", "yarn:factor=4"))


@pytest.mark.parametrize("dtype", HALF)
def test_layers_with_tables_of_their_own(dtype):
    scheme = PerLayer({"0": "yarn:factor=4", "rest": "abf:base=500"})
    loaded, before, after = build(), build(), build()
    table = loaded.model.rotary_emb.inv_freq
    loaded.to(dtype)
    loaded.model.rotary_emb.inv_freq = table
    patch(loaded, scheme)
    patch(before.to(dtype), scheme)
    patch(after, scheme)
    after.to(dtype)
    far = torch.arange(1000, 1040)[None]
    expected = logits(loaded, tokens(), position_ids=far)
    assert torch.equal(logits(before, tokens(), position_ids=far), expected)
    assert torch.equal(logits(after, tokens(), position_ids=far), expected)


def test_a_learned_frequency_that_a_cast_rounds_is_said_once():
    model = build()
    patch(model, CASES["learned_rope"])
    model.to(torch.bfloat16)
    assert len(warned(lambda: [logits(model, tokens()) for _ in range(2)])) == 1
    model = build().to(torch.bfloat16)
    patch(model, CASES["learned_rope"])
    assert not warned(lambda: logits(model, tokens()))


def test_copies_and_saved_models(tmp_path):
    model = build()
    patch(model, "yarn:factor=4")
    model.to(torch.bfloat16)
    expected, exact = logits(model, tokens()), exact_tables("llama", "yarn:factor=4")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.half().bfloat16()
        assert_exact(twin, exact)
        unpatch(twin)
        assert tables_of(twin)["model.rotary_emb.inv_freq"].dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(logits(loaded, tokens()), expected)


@since(torch, "2.12", "does not notice that a compiled model was cast, if some of its tensors stay in float32")
def test_a_compiled_model():
    for backend in ("eager", "aot_eager"):
        model = build(num_hidden_layers=1)
        patch(model, "yarn:factor=4")
        run = torch.compile(model, backend=backend, fullgraph=True)
        assert_close(logits(run, tokens()), logits(model, tokens()))
        model.to(torch.bfloat16)
        expected = logits(model, tokens())
        assert_close(logits(run, tokens()), expected, 1e-2)
        assert_exact(model, exact_tables("llama", "yarn:factor=4"))
