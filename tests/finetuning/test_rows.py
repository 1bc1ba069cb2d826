from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from rope_patch import patch
from rope_patch.errors import EvaluationError
from rope_patch.finetuning.in_memory import MemoryRows
from rope_patch.finetuning.pose import PoSE
from rope_patch.finetuning.rows import NO_TARGET, Batch, RowSettings, lay_out
from rope_patch.finetuning.tokens import Encoder
from tests.evaluation.conftest import byte_tokenizer, documents, tiny_llama

PACKED = RowSettings(length=8, batch_size=3, allow_short=True)
PADDED = replace(PACKED, layout="padded")


def numbered(*sizes: int) -> list[torch.Tensor]:
    """Documents whose tokens are all different, so that every pair of neighbours names its place."""
    counter = itertools.count()
    return [torch.tensor([next(counter) for _ in range(size)]) for size in sizes]


def pairs_of(batch: Batch) -> Counter[tuple[int, int]]:
    there = batch.labels != NO_TARGET
    return Counter(zip(batch.input_ids[there].tolist(), batch.labels[there].tolist(), strict=True))


def pairs_in(found: list[torch.Tensor]) -> Counter[tuple[int, int]]:
    return Counter(pair for tokens in found for pair in itertools.pairwise(tokens.tolist()))


SIZES = (20, 3, 1, 9, 2, 17, 33)


@pytest.mark.parametrize("settings", [PACKED, PADDED], ids=["packed", "padded"])
def test_every_token_but_the_first_of_a_document_is_a_target_once_in_an_epoch(settings):
    found = numbered(*SIZES)
    rows = MemoryRows(found, replace(settings, batch_size=1))
    total = sum(size - 1 for size in SIZES)
    # over so many epochs that the rows end where an epoch ends
    epochs = 8 if settings.layout == "packed" else 1
    seen = sum((pairs_of(rows.batch(step)) for step in range(round(rows.steps_per_epoch * epochs))), Counter())
    assert seen == Counter(dict.fromkeys(pairs_in(found), epochs))
    assert seen.total() == total * epochs


def test_packed_rows_are_full_and_their_positions_start_again_with_every_document():
    found = numbered(*SIZES)
    rows = MemoryRows(found, PACKED)
    first = {tokens[0].item() for tokens in found}
    for step in range(12):
        batch = rows.batch(step)
        assert batch.attention_mask is None
        assert (batch.labels == batch.input_ids + 1).all()
        begins = torch.zeros_like(batch.input_ids, dtype=torch.bool)
        begins[:, 0] = True
        begins[:, 1:] = torch.tensor([[token in first for token in row] for row in batch.input_ids[:, 1:].tolist()])
        assert torch.equal(batch.position_ids == 0, begins)
        assert (batch.position_ids.diff(dim=-1)[~begins[:, 1:]] == 1).all()


def test_padded_rows_hold_one_piece_each():
    batch = lay_out([[torch.tensor([5, 6, 7])], [torch.arange(9)]], PADDED, first_row=0)
    assert batch.input_ids[0].tolist() == [5, 6, 0, 0, 0, 0, 0, 0]
    assert batch.labels[0].tolist() == [6, 7] + [NO_TARGET] * 6
    assert batch.position_ids[0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert batch.attention_mask.tolist() == [[1, 1] + [0] * 6, [1] * 8]
    assert batch.targets == 10


@pytest.mark.parametrize("settings", [PACKED, PADDED], ids=["packed", "padded"])
def test_a_batch_follows_from_the_step_and_the_seed(settings):
    found = numbered(*SIZES)
    rows = MemoryRows(found, settings)
    late = rows.batch(40).input_ids
    assert torch.equal(MemoryRows(found, settings).batch(40).input_ids, late)
    rows.batch(3)
    assert torch.equal(rows.batch(40).input_ids, late)
    assert not torch.equal(MemoryRows(found, replace(settings, seed=1)).batch(40).input_ids, late)


def test_every_epoch_has_an_order_of_its_own():
    rows = MemoryRows(numbered(*[9] * 12), replace(PACKED, batch_size=12))
    orders = [rows.batch(epoch).input_ids[:, 0].tolist() for epoch in range(4)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len(set(map(tuple, orders))) == 4


def test_the_facts_of_packed_rows_count_what_the_first_epoch_cuts():
    rows = MemoryRows(numbered(*SIZES), replace(PACKED, batch_size=1))
    pairs = sum(size - 1 for size in SIZES)
    cut = [piece for row in range(math.ceil(pairs / 8)) for piece in row_pieces(rows.batch(row))]
    # the last row reaches into the second epoch
    while sum(cut) > pairs:
        over = sum(cut) - pairs
        cut = cut[:-1] if cut[-1] <= over else [*cut[:-1], cut[-1] - over]
    assert rows.facts.pieces == len(cut)
    assert rows.facts.full_share == cut.count(8) * 8 / pairs
    assert (rows.facts.documents, rows.facts.short_documents, rows.facts.tokens) == (6, 1, 84)
    assert "6 documents of 84 tokens, the longest 33" in str(rows.facts)


def row_pieces(batch: Batch) -> list[int]:
    starts = [*(batch.position_ids[0] == 0).nonzero()[:, 0].tolist(), 8]
    return [stop - start for start, stop in itertools.pairwise(starts)]


def test_the_facts_of_padded_rows():
    facts = MemoryRows(numbered(9, 12), PADDED).facts
    assert (facts.pieces, facts.full_share) == (3, 16 / 19)


def test_texts_that_are_too_short_are_refused_and_said_why():
    strict = replace(PACKED, allow_short=False)
    with pytest.raises(
        EvaluationError, match=r"no document reaches 9 tokens.*the longest of 2 has 8.*allow_short=true"
    ):
        MemoryRows(numbered(8, 3), strict)
    assert MemoryRows(numbered(9, 3), strict).facts.longest == 9
    with pytest.raises(EvaluationError, match="none of 2 documents has two tokens"):
        MemoryRows(numbered(1, 0), PACKED)


@pytest.mark.parametrize("name", ["length", "batch_size"])
def test_settings_below_one_are_named(name):
    with pytest.raises(EvaluationError, match=f"{name}=0 is not allowed"):
        replace(PACKED, **{name: 0})


def test_an_attention_that_would_not_see_the_boundaries_is_refused():
    skipping = replace(PADDED, positions=PoSE(64))
    PACKED.check_attention("sdpa", rows=3)
    PACKED.check_attention("flash_attention_2", rows=1)
    PADDED.check_attention("flash_attention_2", rows=3)
    skipping.check_attention("sdpa", rows=1)
    with pytest.raises(EvaluationError, match=r"'flash_attention_2' with 3 packed rows at a time"):
        PACKED.check_attention("flash_attention_2", rows=3)
    with pytest.raises(EvaluationError, match=r"'flash_attention_2' with PoSE\(.*'sdpa'"):
        skipping.check_attention("flash_attention_2", rows=2)


def test_an_unknown_layout_is_named():
    with pytest.raises(EvaluationError, match=r"layout='stacked'.*packed, padded"):
        replace(PACKED, layout="stacked")


def test_a_document_carries_the_start_token_and_the_end_token_of_the_tokenizer():
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.eos_token = "</s>"
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    plain = tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert Encoder(tokenizer, None, True)(["x"], ["ab"])[0].tolist() == [0, *plain, tokenizer.eos_token_id]
    assert Encoder(tokenizer, None, False)(["x"], ["ab"])[0].tolist() == [0, *plain]
    assert len(Encoder(tokenizer, None, True)(["x"], [""])[0]) == 0
    assert Encoder(byte_tokenizer(), None, True)(["x"], ["ab"])[0].tolist() == plain


def test_a_tokenizer_of_another_model_is_found_out():
    with pytest.raises(
        EvaluationError, match=r"document 'd0' holds token \d+.*has 60 tokens.*tokenizer with 257 token"
    ):
        MemoryRows.of_texts(documents(40), byte_tokenizer(), PACKED, vocab_size=60)
    assert MemoryRows.of_texts(documents(40), byte_tokenizer(), PACKED, vocab_size=257).facts.tokens == 40


def test_parts_in_order_are_the_batch_and_so_are_micro_batches():
    batch = MemoryRows(numbered(*SIZES), replace(PADDED, batch_size=6)).batch(0)
    for shares in ([batch.part(i, 3) for i in range(3)], batch.split(4)):
        for name in ("input_ids", "labels", "position_ids", "attention_mask"):
            assert torch.equal(torch.cat([getattr(share, name) for share in shares]), getattr(batch, name))
    assert [len(share) for share in batch.split(4)] == [4, 2]
    assert MemoryRows(numbered(*SIZES), PACKED).batch(0).to("cpu").part(1, 3).attention_mask is None
    with pytest.raises(EvaluationError, match="part 0 of 4 of a batch of 6 rows"):
        batch.part(0, 4)


def test_a_state_of_other_rows_is_refused():
    rows = MemoryRows(numbered(*SIZES), PACKED)
    rows.load_state_dict(MemoryRows(numbered(*SIZES), PACKED).state_dict())
    for other in (MemoryRows(numbered(*SIZES, 4), PACKED), MemoryRows(numbered(*SIZES), replace(PACKED, seed=1))):
        with pytest.raises(EvaluationError, match="other rows"):
            rows.load_state_dict(other.state_dict())


SCHEMES = [None, "yarn:factor=4", "rerope:window=8", "rerope:window=2", "alibi"]


@pytest.mark.parametrize("settings", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_a_piece_in_a_row_has_the_logits_that_it_has_alone(scheme, settings):
    model = tiny_llama().double().train()
    if scheme:
        patch(model, scheme)
    pieces = [tokens % 257 for tokens in numbered(4, 3, 2, 3, 6, 4)]
    rows = [pieces[:4], pieces[4:]] if settings.layout == "packed" else [[piece] for piece in pieces]
    batch = lay_out(rows, settings, first_row=0)
    logits = model(**batch.arguments).logits
    for row, its_pieces in enumerate(rows):
        start = 0
        for piece in its_pieces:
            alone = model(input_ids=piece[None, :-1], use_cache=False).logits[0]
            torch.testing.assert_close(logits[row, start : start + len(piece) - 1], alone, rtol=1e-9, atol=1e-9)
            start += len(piece) - 1


@torch.no_grad()
def test_the_labels_are_shifted_once():
    model = tiny_llama()
    (tokens,) = numbered(9)
    batch = lay_out([[tokens]], PACKED, first_row=0)
    ours = cross_entropy(model(**batch.arguments).logits[0], batch.labels[0])
    theirs = model(input_ids=tokens[None], labels=tokens[None]).loss
    torch.testing.assert_close(ours, theirs)
