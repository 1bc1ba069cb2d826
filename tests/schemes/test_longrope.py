import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import InvalidField, LongRoPE, patch
from rope_patch.attention.executors import chunked
from rope_patch.attention.forward import Forward
from rope_patch.attention.turner import Turner
from rope_patch.models.rope_parameters import native_scheme
from rope_patch.schemes import Checkpoint
from rope_patch.schemes.slots import ALL_PAIRS
from rope_patch.schemes.tools.rotary import RotaryLayout
from rope_patch.typing import RotarySpec
from tests.definition import Definition
from tests.families import build
from tests.runs import logits, positions_of, tokens

CASES = [
    "longrope:short_factor=[1,1,1,1,1.5,1.5,2,2],long_factor=[1,1.5,2,3,4,5,6,8],factor=4",
    "longrope:short_factor=[1,1,1,1,1.5,1.5,2,2],long_factor=[1,1.5,2,3,4,5,6,8],factor=4,length=64,learned=true",
]

SHORT, LONG = (1.0, 1.0, 1.0, 1.0, 1.5, 1.5, 2.0, 2.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
SPELLED = f"longrope:short_factor={list(SHORT)},long_factor={list(LONG)},factor=4"

DEFINITIONS = {
    SPELLED: Definition(
        frequencies=lambda theta, length: theta / np.array(LONG if length > 32 else SHORT),
        temperature=math.sqrt(1 + math.log(4) / math.log(32)),
    ),
    f"{SPELLED},mixed=true": Definition(
        frequencies=lambda theta, length: theta / np.array(LONG if length > 32 else SHORT),
        temperature=math.sqrt(1 + math.log(4) / math.log(32)),
    ),
    f"{SPELLED},attention_factor=1.0,length=16": Definition(
        frequencies=lambda theta, length: theta / np.array(SHORT),
    ),
    CASES[1]: Definition(
        learned_frequencies=lambda theta, learned: theta / learned["long_factor"],
        temperature=math.sqrt(1 + math.log(4) / math.log(32)),
    ),
}


@pytest.mark.parametrize("head_dim", [16, 96, 128, 256])
@pytest.mark.parametrize("factor", [1.0, 4.0, 32.0])
@pytest.mark.parametrize("length", [1, 4096, 4097, 100000])
def test_the_frequencies_are_those_of_transformers_bit_for_bit(head_dim, factor, length):
    random = torch.Generator().manual_seed(0)
    short, long = (1 + 9 * torch.rand(2, head_dim // 2, generator=random)).tolist()
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": factor,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 4096,
    }
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=parameters)
    expected, temperature = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
    scheme = LongRoPE(tuple(short), tuple(long), factor)
    found = scheme.frequencies(RotarySpec(head_dim, 10000.0, 4096), torch.tensor([length]))
    assert torch.equal(found.inv_freq[0], expected)
    assert found.attention_scaling == temperature


def test_the_temperature_follows_the_longest_length_of_the_checkpoint():
    scheme = LongRoPE((1.0,) * 8, (2.0,) * 8)
    assert scheme.resolve(Checkpoint(4096, 32, 131072)).factor == 32
    assert scheme.resolve(Checkpoint(4096, 32, 4096)).factor == 1
    assert LongRoPE((1.0,) * 8, (2.0,) * 8, 4.0).resolve(Checkpoint(4096, 32, 131072)).factor == 4


# --- documents of a packed row ---------------------------------------------------------------------------------------

MIXED = f"{SPELLED},mixed=true"
SIZES = [(40, 5, 32, 19), (33, 63), (96,)]  # tokens of each document in three rows of 96; L = 32


def packed_rows():
    ids = tokens(96, rows=3)
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in SIZES])
    return ids, positions


def documents():
    for index, row in enumerate(SIZES):
        start = 0
        for size in row:
            yield index, slice(start, start + size)
            start += size


def total(found):
    return (found * torch.linspace(-1, 1, found.shape[-1], dtype=found.dtype)).sum()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("beside", ["", "+rerope:window=6", "+logn:training_length=8", ",learned=true"])
@pytest.mark.parametrize("mode", ["auto", "oracle", "chunked"])
def test_each_document_of_a_packed_row_is_what_it_is_alone(family, beside, mode, monkeypatch):
    """Logits and gradients, where the text alone is under the scheme that its DEFINITION defines."""
    monkeypatch.setattr(chunked, "SCORES_PER_BLOCK", 512)
    ids, positions = packed_rows()
    model, alone = (build(family).double().train() for _ in range(2))
    patch(model, MIXED + beside, attention=mode)
    patch(alone, SPELLED + beside)
    found = model(ids, position_ids=positions, use_cache=False).logits
    total(found).backward()
    for row, part in documents():
        expected = alone(ids[row : row + 1, part], use_cache=False).logits
        torch.testing.assert_close(found[row : row + 1, part], expected, rtol=1e-5, atol=1e-6)
        total(expected).backward()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:
            assert (ours.grad - theirs.grad).norm() < 1e-5 * theirs.grad.norm(), name  # tables are float32


@pytest.mark.parametrize("slots", [slice(3, 70), torch.tensor([2, 41, 50])], ids=str)
def test_some_slots_are_turned_as_among_all(slots):
    """Kernels turn a run of keys, or some of them: each by the frequencies of its own document."""
    _, positions = packed_rows()
    lengths = torch.tensor([[size for size in row for _ in range(size)] for row in SIZES])
    own = LongRoPE(SHORT, LONG, 4.0).frequencies(RotarySpec(16, 10000.0, 32), lengths)
    layout = RotaryLayout(tuple(range(8)), tuple(range(8, 16)))
    turner = Turner(Forward(), positions, positions, (ALL_PAIRS,), layout, own)
    keys = torch.randn(3, 2, 96, 16, generator=torch.Generator().manual_seed(0))
    whole = turner.turn(keys, ALL_PAIRS, "key")[:, :, slots]
    torch.testing.assert_close(turner.turn(keys[:, :, slots], ALL_PAIRS, "key", slots), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("beside", ["", "+rerope:window=6"])
def test_compiled_models_choose_by_document_too(beside):
    ids, positions = packed_rows()
    patch(model := build("llama").train(), MIXED + beside)
    call = {"position_ids": positions, "use_cache": False}
    expected = model(ids, **call).logits
    found = torch.compile(model, backend="eager", fullgraph=True)(ids, **call).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_without_it_the_longest_document_chooses_for_its_row(llama):
    ids, positions = packed_rows()
    mixed, whole = build("llama").eval(), build("llama").eval()
    patch(mixed, MIXED)
    patch(whole, SPELLED)
    found, expected = (m(ids, position_ids=positions, use_cache=False).logits for m in (mixed, whole))
    apart = [(found[row, part] - expected[row, part]).abs().max() for row, part in documents()]
    assert [bool(each > 1e-3) for each in apart] == [False, True, True, True, False, False, False]


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_count_for_no_document(side, llama):
    texts = [tokens(40), tokens(20), tokens(32)]
    pads = [torch.zeros(1, 40 - text.shape[1], dtype=torch.long) for text in texts]
    both = [(pad, text) if side == "left" else (text, pad) for pad, text in zip(pads, texts, strict=True)]
    ids = torch.cat([torch.cat(pair, dim=1) for pair in both])
    mask = torch.cat(
        [
            torch.cat([torch.full_like(x, int(x is not pad)) for x in pair], 1)
            for pad, pair in zip(pads, both, strict=True)
        ]
    )
    patch(llama, MIXED)
    found = llama(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False).logits
    for row, text in enumerate(texts):
        torch.testing.assert_close(found[row][mask[row].bool()], llama(text).logits[0], rtol=1e-4, atol=1e-5)


def test_one_text_is_the_same_to_the_bit_with_and_without_it(llama):
    other, ids = build("llama").eval(), tokens(40)
    patch(llama, MIXED)
    patch(other, SPELLED)
    other.load_state_dict(llama.state_dict())
    assert torch.equal(logits(llama, ids), logits(other, ids))
    assert torch.equal(
        llama.generate(ids, max_new_tokens=4, do_sample=False), other.generate(ids, max_new_tokens=4, do_sample=False)
    )


def test_mixed_is_written_for_no_other_program(llama):
    written = LongRoPE(SHORT, LONG, 4.0, mixed=True).rope_parameters(RotarySpec(16, 10000.0, 32))
    assert written == LongRoPE(SHORT, LONG, 4.0).rope_parameters(RotarySpec(16, 10000.0, 32))


def test_lists_of_the_wrong_length_are_named():
    with pytest.raises(InvalidField, match="short_factor has 1 numbers, long_factor 2"):
        LongRoPE((1.0,), (1.0, 2.0))
    with pytest.raises(InvalidField, match="short_factor has 2 numbers; this checkpoint has 8 pairs"):
        LongRoPE((1.0, 1.0), (1.0, 2.0)).frequencies(RotarySpec(16, 10000.0, 32))


def test_a_damaged_config_is_named():
    model = build("llama")
    told = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 7}
    model.config.rope_parameters = told
    with pytest.raises(InvalidField, match="long_factor has 7 numbers; this checkpoint has 8 pairs"):
        native_scheme(model).frequencies(RotarySpec(16, 10000.0, 32))
    with pytest.raises(InvalidField, match="long_factor has 7 numbers"):
        patch(model, "rerope", window=6)
