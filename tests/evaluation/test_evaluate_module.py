from __future__ import annotations

import evaluate
import pytest

from rope_patch import patch
from rope_patch.evaluation import perplexity_vs_length

from .conftest import documents, measure

CORPUS = documents(70, 80, 20)
TEXTS = [document["text"] for document in CORPUS]


@pytest.fixture
def metric(tmp_path, monkeypatch):
    """Loaded as a user without a network would."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("evaluate.config.HF_EVALUATE_OFFLINE", True)
    return evaluate.load(perplexity_vs_length.PATH, cache_dir=str(tmp_path))


def test_the_module_gives_the_figures_of_run(metric, model, tokenizer):
    schemes, settings = ["plain", "pi:target=auto"], {"protocol": "sliding", "stride": 8}
    expected = measure(model, tokenizer, CORPUS, schemes, [16, 32], **settings)
    found = metric.compute(
        predictions=TEXTS, model=model, tokenizer=tokenizer, lengths=[16, 32], schemes=schemes, **settings
    )
    assert set(found) == {"perplexities", "nll", "rows"}
    assert len(found["rows"]) == 4
    for row, said in zip(expected, found["rows"], strict=True):
        assert found["perplexities"][row.line][row.length] == row.perplexity
        assert found["nll"][row.line][row.length] == row.nll == said["nll"]
        assert said["short_documents"] == row.short_documents == 1


def test_a_checkpoint_folder_is_loaded_with_its_tokenizer(metric, model, tokenizer, checkpoint):
    found = metric.compute(predictions=TEXTS, model=str(checkpoint), lengths=[16, 64], targets=8)
    expected = measure(model, tokenizer, CORPUS, ["plain", "window"], [16, 64], targets=8)
    assert [row["nll"] for row in found["rows"]] == pytest.approx([row.nll for row in expected], rel=1e-6)


def test_a_model_without_its_tokenizer_is_refused(metric, model):
    with pytest.raises(ValueError, match="a loaded model needs its tokenizer"):
        metric.compute(predictions=TEXTS, model=model, lengths=[16])


def test_the_module_says_what_it_is(metric):
    assert "predictions" in metric.inputs_description
    assert "2306.15595" in metric.citation
    assert metric.name == "perplexity_vs_length"


def test_a_patched_model_is_measured_as_it_is(metric, model, tokenizer):
    expected = measure(model, tokenizer, CORPUS, ["rerope:window=8"], [32], targets=8)
    with patch(model, "rerope", window=8):
        found = metric.compute(
            predictions=TEXTS, model=model, tokenizer=tokenizer, lengths=[32], targets=8, schemes=["rerope:window=8"]
        )
    assert found["nll"]["rerope:window=8"][32] == expected[0].nll
