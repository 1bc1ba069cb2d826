from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from rope_patch.errors import CorpusError, EvaluationError
from rope_patch.evaluation.corpora import read_documents
from rope_patch.evaluation.documents import from_rows
from rope_patch.finetuning.pose import PoSE
from rope_patch.finetuning.rows import RowSettings
from rope_patch.finetuning.stream import StreamedRows
from tests.evaluation.conftest import byte_tokenizer, documents

from .test_rows import pairs_of

SETTINGS = RowSettings(length=8, batch_size=2, allow_short=True, end_of_text=False)
SIZES = (20, 3, 1, 9, 2, 17, 33, 12, 5)
TOKENIZER = byte_tokenizer()


class Watched(byte_tokenizer().__class__):
    """A tokenizer that counts the texts it reads."""

    texts = 0

    def __call__(self, texts, **settings):
        if isinstance(texts, list):
            type(self).texts += len(texts)
        return super().__call__(texts, **settings)


def stream(source=None, settings=SETTINGS, buffer=4, tokenizer=TOKENIZER) -> StreamedRows:
    return StreamedRows(
        from_rows("texts", documents(*SIZES)) if source is None else source, tokenizer, settings, shuffle_buffer=buffer
    )


def same(left, right) -> bool:
    names = ("input_ids", "labels", "position_ids")
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_every_pass_sees_every_target_once(layout):
    settings = replace(SETTINGS, layout=layout, batch_size=1)
    expected = Counter()
    for document in documents(*SIZES):
        expected += Counter(itertools.pairwise(TOKENIZER(document["text"])["input_ids"]))
    # as many rows as fill whole passes: 93 pairs in 8 passes of packed rows, or 17 pieces
    pairs = [size - 1 for size in SIZES]
    rows, passes = (sum(pairs), 8) if layout == "packed" else (sum(-(-n // 8) for n in pairs), 1)
    found = stream(settings=settings)
    seen = sum((pairs_of(found.batch(step)) for step in range(rows)), Counter())
    assert seen == Counter({pair: count * passes for pair, count in expected.items()})


@pytest.mark.parametrize("source", ["memory", "jsonl", "parquet", "datasets"])
@pytest.mark.parametrize("stop", [1, 3, 6, 11, 17])
def test_a_restored_stream_goes_on_with_the_same_batches(source, stop, tmp_path):
    texts = documents(*SIZES)
    if source == "memory":
        opened = from_rows("texts", texts)
    else:
        folder = tmp_path / "data"
        folder.mkdir()
        if source == "jsonl":
            (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts[:4]))
            (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in texts[4:]))
        else:
            Dataset.from_list(texts).to_parquet(folder / "train.parquet")
        streamed = {"split": "train", "streaming": True} if source == "datasets" else {}
        opened = read_documents(str(folder), **streamed)
    settings = replace(SETTINGS, layout="padded", positions=PoSE(32)) if stop == 3 else SETTINGS
    whole = stream(opened, settings)
    batches, facts, state = [], [], None
    for step in range(stop + 8):
        if step == stop:
            state = json.loads(json.dumps(whole.state_dict()))
        batches.append(whole.batch(step))
        facts.append(whole.facts)
    again = stream(opened, settings)
    again.load_state_dict(state)
    for step in range(stop, stop + 8):
        assert same(again.batch(step), batches[step])
        assert again.facts == facts[step]


def test_a_restored_stream_reads_little_again():
    tokenizer = Watched(tokenizer_object=TOKENIZER.backend_tokenizer, bos_token="<s>")
    source = from_rows("texts", documents(*[12] * 400))
    first = stream(source, buffer=8, tokenizer=tokenizer)
    for step in range(150):
        first.batch(step)
    again = stream(source, buffer=8, tokenizer=tokenizer)
    again.load_state_dict(first.state_dict())
    Watched.texts = 0
    again.batch(150)
    assert Watched.texts <= 16
    assert len(json.dumps(first.state_dict())) < 1000


def test_passes_differ_and_the_seed_decides():
    settings = replace(SETTINGS, layout="padded", batch_size=9)
    texts = from_rows("texts", documents(*[9] * 9))
    found = [stream(texts, settings, buffer=9) for _ in range(2)]
    first, second = ([rows.batch(step) for step in range(2)] for rows in found)
    assert all(map(same, first, second))
    assert not same(first[0], first[1])
    other = stream(texts, replace(settings, seed=1), buffer=9).batch(0)
    assert not same(other, first[0])
    kept = stream(texts, settings, buffer=1)
    assert same(kept.batch(0), kept.batch(1))


def test_the_facts_tell_when_the_whole_text_was_seen():
    found = stream()
    found.batch(0)
    assert not found.facts.complete
    assert "so far" in str(found.facts)
    for step in range(1, 8):
        found.batch(step)
    facts = found.facts
    assert facts.complete
    assert (facts.documents, facts.short_documents, facts.tokens, facts.longest) == (8, 1, 101, 33)


def test_steps_come_one_after_another():
    found = stream()
    found.batch(0)
    for step in (0, 2):
        with pytest.raises(EvaluationError, match=f"step {step} of a stream that is at step 1"):
            found.batch(step)


def test_short_texts_are_refused_after_the_first_pass():
    strict = replace(SETTINGS, allow_short=False, length=40)
    found = stream(settings=strict)
    found.batch(0)
    with pytest.raises(EvaluationError, match="the longest of 8 has 33"):
        found.batch(1)


def test_a_stream_of_texts_without_a_target_ends():
    with pytest.raises(EvaluationError, match="none of 3 documents has two tokens"):
        stream(from_rows("texts", documents(1, 1, 1))).batch(0)


def test_an_empty_stream_is_said_so():
    with pytest.raises(CorpusError, match="there is no text in 'texts'"):
        stream(from_rows("texts", [])).batch(0)


def test_a_state_of_other_rows_is_refused():
    state = stream().state_dict()
    for other in (stream(buffer=5), stream(settings=replace(SETTINGS, seed=1))):
        with pytest.raises(EvaluationError, match="other rows"):
            other.load_state_dict(state)


def test_a_buffer_below_one_is_refused():
    with pytest.raises(EvaluationError, match="shuffle_buffer=0"):
        stream(buffer=0)
