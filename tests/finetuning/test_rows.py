"""What models are trained on: rows of documents, and positions that skip."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close
from transformers import default_data_collator

from rope_patch import patch
from rope_patch.attention.executors import chunked
from rope_patch.data.corpora import load_text
from rope_patch.data.pose import PoSECollator
from rope_patch.data.training_rows import cut, packed, training_rows
from rope_patch.errors import EvaluationError
from tests.evaluation.conftest import byte_tokenizer, tiny_llama
from tests.recipes import load_recipe

RECIPE = load_recipe("finetune")


def laid_out(options, documents, tokenizer, vocabulary, length):
    """As the recipe asks for them."""
    settings = {"pack": options.layout == "packed", "batch_size": options.batch_size, "seed": options.seed}
    settings |= {"shuffle_buffer": options.shuffle_buffer if options.streaming else None}
    return training_rows(documents, tokenizer, vocabulary, length, **settings, allow_short=options.allow_short)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"length": 8192}, "209,715,200 tokens: 400 steps of 64 rows of 8192"),
        ({"length": 512, "layout": "pose", "steps": 5, "batch_size": 2}, "2,560 tokens: 5 steps of 2 rows of 256"),
        ({"length": 512, "layout": "randomized", "pose_row": 64, "steps": 1}, "4,096 tokens: 1 step of 64 rows of 64"),
    ],
)
def test_a_training_says_what_it_will_cost(asked, said):
    options = RECIPE.Options(schemes=("yarn:target=auto",), **asked)
    assert RECIPE.cost_of(options, 256) == f"training reads {said} (--steps, --batch-size)"
    both = dataclasses.replace(options, schemes=("yarn:target=auto", "pi:target=auto"))
    assert "tokens for each of 2 schemes: " in RECIPE.cost_of(both, 256)


SCHEMES = [None, "yarn:factor=4", "rerope:window=8", "rerope:window=2", "alibi"]


def numbered(*sizes):
    """Documents whose tokens are all different, so that every pair of neighbours names its place."""
    counter = itertools.count(1)
    return [[next(counter) for _ in range(size)] for size in sizes]


def of_columns(columns):
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def packed_batch(documents, length):
    return default_data_collator(of_columns(packed(documents, length)))


def test_packed_rows_are_full_and_start_again_with_every_document():
    found = packed_batch(numbered(20, 3, 1, 9, 2, 17, 33), 8)
    assert found["input_ids"].tolist() == torch.arange(1, 81).view(10, 8).tolist()  # the last five of 85 fill no row
    first = {1, 21, 24, 25, 34, 36, 53, *range(1, 81, 8)}
    begins = torch.tensor([[token in first for token in row] for row in found["input_ids"].tolist()])
    assert torch.equal(found["position_ids"] == 0, begins)
    assert (found["position_ids"].diff()[~begins[:, 1:]] == 1).all()
    assert torch.equal(found["labels"], found["input_ids"].masked_fill(begins, -100))


def test_every_token_within_a_row_that_has_one_before_it_is_a_target_once():
    documents = numbered(20, 3, 1, 9, 2, 17, 33)
    found = packed_batch(documents, 8)
    there = found["labels"][:, 1:] != -100
    pairs = list(zip(found["input_ids"][:, :-1][there].tolist(), found["labels"][:, 1:][there].tolist(), strict=True))
    within = [pair for ids in documents for pair in pairwise(ids) if pair[1] <= 80 and pair[0] % 8]
    assert sorted(pairs) == sorted(within)


def test_no_documents_make_no_rows():
    assert packed([], 8) == {"input_ids": [], "labels": [], "position_ids": []}
    assert cut([], 8) == {"input_ids": []}


def test_padded_rows_hold_one_piece_each():
    rows = of_columns(cut([[5, 6, 7], list(range(10, 19))], 8))
    found = PoSECollator(8, chunks=1)(rows)
    assert found["input_ids"].tolist() == [[5, 6, 7, 0, 0, 0, 0, 0], list(range(10, 18)), [18] + [0] * 7]
    assert found["labels"][0].tolist() == [5, 6, 7] + [-100] * 5
    assert found["attention_mask"].sum(-1).tolist() == [3, 8, 1]
    assert found["position_ids"].tolist() == [[0, 1, 2] + [0] * 5, list(range(8)), [0] * 8]


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_a_piece_in_a_row_has_the_logits_that_it_has_alone(scheme, layout):
    model = tiny_llama().double().train()
    if scheme:
        patch(model, scheme)
    pieces = numbered(4, 3, 1, 6, 2)
    packed = layout == "packed"
    batch = packed_batch(pieces, 16) if packed else PoSECollator(8, chunks=1)(of_columns(cut(pieces, 8)))
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    for number, piece in enumerate(pieces):
        alone = model(torch.tensor([piece]), use_cache=False).logits[0]
        start = sum(map(len, pieces[:number])) if packed else 0
        assert_close(logits[0 if packed else number, start : start + len(piece)], alone, rtol=1e-9, atol=1e-9)


def chunks_of(positions):
    """Runs of consecutive positions."""
    found = [[positions[0].item()]]
    for before, here in pairwise(positions.tolist()):
        if here == before + 1:
            found[-1].append(here)
        else:
            found.append([here])
    return found


def drawn(length, target_length, chunks, seed):
    """Positions of a row, which is another one for every seed."""
    row = {"input_ids": list(range(seed, seed + length))}
    return PoSECollator(target_length, chunks)([row])["position_ids"][0]


@pytest.mark.parametrize("chunks", [1, 2, 3, 16])
def test_chunks_keep_their_order_and_their_own_positions(chunks):
    for seed in range(100):
        positions = drawn(16, 64, chunks, seed)
        assert positions.dtype == torch.int64
        assert positions[0] == 0
        assert (positions.diff() >= 1).all()
        assert positions[-1] < 64
        skips = positions - torch.arange(16)  # the skip u of each token never falls and never exceeds what is left
        assert (skips.diff() >= 0).all()
        assert skips.max() <= 64 - 16
        assert len(chunks_of(positions)) <= chunks


@pytest.mark.parametrize("middle", ["uniform", "gaussian"])
def test_positions_of_the_same_rows_follow_the_seed(middle):
    rows = [{"input_ids": list(range(start, start + 60))} for start in range(10)]
    one, again, other = (PoSECollator(240, seed=seed, middle=middle)(rows)["position_ids"] for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert ((one != other).any(dim=1)).sum() >= 8


def test_the_middle_of_cream_is_drawn_around_the_middle_of_the_target():
    centres, heads = [], []
    for seed in range(1000):
        row = {"input_ids": list(range(seed, seed + 60))}
        positions = PoSECollator(120, middle="gaussian")([row])["position_ids"][0]
        assert (positions.diff() >= 1).all()
        assert (positions[0], positions[-1]) == (0, 119)
        pieces = chunks_of(positions)
        assert len(pieces) <= 3
        assert all(len(piece) >= 8 for piece in pieces)
        heads.append(len(pieces[0]))
        if len(pieces) == 3 and len(pieces[0]) == 8:
            centres.append(sum(pieces[1]) / len(pieces[1]))
    assert {8, 20} < set(heads)  # 4 L_target / L and L // 3, where the middle does not continue them
    # of a in [2, 4], floored, 2 leaves the middle of 44 tokens where it is, and 3 ends it in 73 to 81
    assert (min(centres), max(centres)) == (51.5, 59.5)
    assert abs(sum(centres) / len(centres) - 55.5) < 0.5
    assert 0.4 < len(centres) / sum(length in (8, 52) for length in heads) < 0.65  # the Gaussian is symmetric around 3
    row = {"input_ids": list(range(120))}
    assert PoSECollator(120, middle="gaussian")([row])["position_ids"][0].tolist() == list(range(120))
    assert PoSECollator(64, middle="gaussian")([{"input_ids": [5]}])["position_ids"][0].tolist() == [0]


def test_every_second_row_of_mixed_ones_is_cut_to_the_training_length():
    documents = numbered(20, 3, 1, 9, 2, 17, 33)
    found, plain = (of_columns(packed(documents, 16, short)) for short in (6, None))
    for index, (row, other) in enumerate(zip(found, plain, strict=True)):
        assert (row["input_ids"] == other["input_ids"]).all()
        if index % 2 == 0:
            assert all((row[name] == other[name]).all() for name in row)
            continue
        assert row["position_ids"].max() < 6
        starts = {0, 6, 12} | {place for place in range(16) if other["position_ids"][place] == 0}
        assert {place for place in range(16) if row["position_ids"][place] == 0} == starts
        assert {place for place in range(16) if row["labels"][place] == -100} == starts


def test_every_distance_below_the_target_is_met():
    met = set()
    for seed in range(3000):
        positions = drawn(16, 64, 2, seed)
        met |= set((positions[:, None] - positions[None]).flatten().tolist())
    assert met >= set(range(64))


def test_a_target_of_the_same_length_skips_nothing():
    assert drawn(16, 16, 2, 0).tolist() == list(range(16))
    assert drawn(1, 64, 2, 0).tolist() == [0]
    with pytest.raises(EvaluationError, match="target_length=8 is not allowed; a row has 16 tokens"):
        drawn(16, 8, 2, 0)


def test_positions_follow_from_the_row_and_the_seed():
    rows = [{"input_ids": list(range(16))}, {"input_ids": list(range(1, 17))}]
    collate = PoSECollator(64)
    batch = collate(rows)["position_ids"]
    assert torch.equal(collate(rows[::-1])["position_ids"], batch.flip(0))
    assert not torch.equal(batch[0], batch[1])
    assert not torch.equal(dataclasses.replace(collate, seed=1)(rows)["position_ids"], batch)


def skipping_batch():
    random = torch.Generator().manual_seed(3)
    rows = [{"input_ids": torch.randint(257, (size,), generator=random)} for size in (16, 16, 10)]
    batch = PoSECollator(64, seed=1)(rows)
    assert all(len(chunks_of(row)) == 2 for row in batch["position_ids"][:2])
    return {name: values for name, values in batch.items() if name != "labels"} | {"use_cache": False}


@pytest.mark.parametrize("scheme", [None, "yarn:factor=4", "rerope:window=4", "rerope:window=4+logn", "alibi"])
@torch.no_grad()
def test_logits_of_skipping_rows_are_those_of_a_dense_causal_mask(scheme, monkeypatch):
    monkeypatch.setattr(chunked, "SCORES_PER_BLOCK", 64)  # blocks of four queries: the skip lies within and between
    batch, model, dense = skipping_batch(), tiny_llama().double().train(), tiny_llama().double().train()
    if scheme:
        patch(model, scheme)
        patch(dense, scheme, mount="late", attention="oracle")
    there = batch["attention_mask"].bool()
    causal = torch.ones(16, 16, dtype=torch.bool).tril()[None, None] & there[:, None, None]
    found, expected = model(**batch).logits, dense(**{**batch, "attention_mask": causal}).logits
    assert_close(found[there], expected[there], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scheme", [None, "yarn:factor=4", "rerope:window=4"])
@torch.no_grad()
def test_attention_crosses_the_skip(scheme):
    batch = {name: values[:1] if torch.is_tensor(values) else values for name, values in skipping_batch().items()}
    model = tiny_llama().double().train()
    if scheme:
        patch(model, scheme)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 0] += 1
    assert (model(**batch).logits - model(**changed).logits).abs().amax(dim=-1)[0].min() > 1e-6


def rows_of(options, **changed):
    """The rows of the recipe, without training on them."""
    chosen = {name: changed.get(name, value) for name, value in options().items() if name != "scheme"} | changed
    described = RECIPE.Options(schemes=("plain",), **{k: str(v) if "text" in k else v for k, v in chosen.items()})
    documents, _, _ = RECIPE.texts(described, byte_tokenizer())
    return laid_out(described, documents, byte_tokenizer(), 257, described.length)


def write(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_stream_has_the_rows_of_the_text_without_end(options):
    whole = {tuple(row["input_ids"]) for row in rows_of(options, layout="padded")}
    stream = rows_of(options, layout="padded", streaming=True, shuffle_buffer=3)
    found = [tuple(row["input_ids"]) for row in itertools.islice(stream, 3 * len(whole))]
    assert set(found) == whole
    assert found[: len(whole)] == found[len(whole) : 2 * len(whole)]


def test_folders_and_single_texts_are_read_whole(options, tmp_path):
    (folder := tmp_path / "folder").mkdir()
    (folder / "a.txt").write_text("one\ntwo" * 10)
    (folder / "b.md").write_text("three" * 20)
    assert {len(row["input_ids"]) for row in rows_of(options, text=folder, layout="padded", length=16)} == {16, 6, 4}
    assert len(rows_of(options, text=folder / "a.txt", length=16, batch_size=1)) == 4


def test_empty_documents_are_passed_over(options, tmp_path):
    text = write(tmp_path / "text.jsonl", "", "x" * 40, "", "y" * 40)
    assert len(rows_of(options, text=text, length=32)) == 2
    assert sum(len(row["input_ids"]) for row in rows_of(options, text=text, layout="padded", length=32)) == 80


def test_a_small_text_is_repeated_until_it_fills_a_batch(options, tmp_path):
    text = write(tmp_path / "text.jsonl", "x" * 40)
    assert len(rows_of(options, text=text, batch_size=5)) == 5


def test_texts_that_are_too_short_are_refused_with_the_reason(options, tmp_path):
    text = write(tmp_path / "text.jsonl", *["x" * 20] * 5)
    with pytest.raises(EvaluationError, match=r"no document fills a row of 32.*longest of 5 has 20.*allow_short=true"):
        rows_of(options, text=text)
    assert len(rows_of(options, text=text, allow_short=True)) == 2  # of three, as a batch has two
    with pytest.raises(EvaluationError, match="no document fills a row"):
        rows_of(options, text=write(tmp_path / "shorter.jsonl", "x"), allow_short=True)


def test_a_tokenizer_of_another_model_is_found_out(options):
    described = RECIPE.Options(schemes=("plain",), length=32)
    documents = load_text(str(options()["text"]))
    with pytest.raises(EvaluationError, match=r"token \d+ is beyond the model's 60"):
        laid_out(described, documents, byte_tokenizer(), 60, 32)


def test_documents_end_with_the_end_of_text(options):
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    described = RECIPE.Options(schemes=("plain",), length=128, layout="padded", allow_short=True)
    for row in laid_out(described, load_text(str(options()["text"])), tokenizer, 258, 128):
        assert (row["input_ids"][0], row["input_ids"][-1]) == (0, tokenizer.eos_token_id)


def pieces(texts, size=8):
    return {text[at : at + size] for text in texts for at in range(len(text) - size + 1)}


@pytest.mark.parametrize("layout", ["packed", "padded", "pose"])
@pytest.mark.parametrize("source", ["a file", "documents", "a stream of them", "a dataset", "a stream of a dataset"])
def test_nothing_that_is_measured_on_is_trained_on(source, layout, tmp_path):
    letters = random.Random(0)
    sizes = [900] if source == "a file" else [60] * 100
    texts = ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=size)) for size in sizes]
    (folder := tmp_path / "texts").mkdir()
    name = "train.txt" if source == "a file" else "train.jsonl"
    content = texts[0] if source == "a file" else "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / name).write_text(content)
    where = {"dataset": str(folder)} if "dataset" in source else {"text": str(folder / name)}
    described = RECIPE.Options(schemes=("plain",), length=32, batch_size=1, layout=layout, **where)
    described.streaming = "stream" in source
    documents, corpus, _ = RECIPE.texts(described, byte_tokenizer())
    rows = laid_out(described, documents, byte_tokenizer(), 257, 32)
    trained_on = [byte_tokenizer().decode(row["input_ids"]) for row in itertools.islice(rows, 400)]
    held_out = [document["text"] for document in corpus]
    assert len(pieces(trained_on)) > 300
    assert 60 <= sum(map(len, held_out)) <= 0.7 * sum(sizes)
    assert pieces(held_out) <= pieces(texts)
    assert not pieces(trained_on) & pieces(held_out)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("split", ["test", "validation"])
def test_a_dataset_is_measured_on_its_own_split(split, streaming, tmp_path):
    for part in ("train", split):
        write(tmp_path / f"{part}.jsonl", *(f"{part} {number}" * 10 for number in range(70)))
    described = RECIPE.Options(schemes=("plain",), length=32, dataset=str(tmp_path), streaming=streaming)
    documents, corpus, name = RECIPE.texts(described, byte_tokenizer())
    assert name == f"{tmp_path}, split {split}"
    assert len(list(documents)) == 70
    assert len(list(corpus)) == (64 if streaming else 70)
    assert all(document["text"].startswith(split) for document in corpus)
    described.split, described.eval_split = split, "train"
    _, corpus, name = RECIPE.texts(described, byte_tokenizer())
    assert name == f"{tmp_path}, split train"
    assert all(document["text"].startswith("train") for document in corpus)
