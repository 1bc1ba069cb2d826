"""`far`: which tokens count, by a search through the text, and the numbers of a row."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from rope_patch import patch
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.protocols.chosen import Chosen, repeats_far
from rope_patch.evaluation.protocols.protocol import Context
from rope_patch.evaluation.row import Rows
from tests.evaluation.conftest import TRAINING_LENGTH, measure

LENGTHS, TARGETS = (16, 32, 64), 16


def corpus(*lengths):
    """Texts of three letters, where threes repeat at all distances."""
    texts = {length: torch.randint(3, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths}
    return [{"name": f"d{n}", "text": "".join("abc"[letter] for letter in text)} for n, text in texts.items()]


CORPUS = corpus(70, 75, 80)


def go(model, tokenizer, schemes=("plain", "cut", "pi:target=auto"), lengths=LENGTHS, **settings):
    settings = {"targets": TARGETS, "windows_per_document": 1, "protocol": "far", **settings}
    return measure(model, tokenizer, CORPUS, list(schemes), lengths, **settings)


def found(text, distance):
    """By definition: the last three letters occurred more than `distance` back, and nowhere nearer."""
    far = []
    for place in range(2, len(text)):
        gram = text[place - 2 : place + 1]
        before = [other for other in range(2, place) if text[other - 2 : other + 1] == gram]
        if before and place - max(before) > distance:
            far.append(place)
    return far


@pytest.mark.parametrize("distance", [1, 8, 16, 40])
def test_a_token_counts_if_its_three_were_last_seen_more_than_l_back(distance):
    for document in CORPUS:
        tokens = torch.tensor([ord(letter) for letter in document["text"]])
        assert repeats_far(tokens, distance).nonzero()[:, 0].tolist() == found(document["text"], distance)
    assert repeats_far(torch.tensor([1, 1, 1, 1, 1, 1]), 0).tolist() == [False, False, False, True, True, True]
    assert not repeats_far(torch.tensor([1, 2]), 0).any()


def test_a_row_is_the_loss_of_these_tokens_at_every_length(model, tokenizer):
    rows = go(model, tokenizer)
    windows = [document["text"][-(LENGTHS[-1] + 1) :] for document in CORPUS]
    far = [[at for at in found(text, TRAINING_LENGTH) if at >= len(text) - TARGETS] for text in windows]
    count = sum(map(len, far))
    assert len({len(places) for places in far}) > 1
    for row in rows:
        assert row.scored_tokens == count > 3
        assert row.chosen_share == count / (3 * TARGETS)
        losses, others = [], []
        length = min(row.length, TRAINING_LENGTH) if row.line == "cut" else row.length
        scheme = f"pi:factor={length / TRAINING_LENGTH}" if row.line.startswith("pi") else "rope"
        for text, places in zip(windows, far, strict=True):
            tokens = torch.tensor(tokenizer(text)["input_ids"])[-(length + 1) :]
            with patch(model, scheme), torch.no_grad():
                nll = -torch.log_softmax(model(tokens[None, :-1]).logits[0].double(), -1)
            nll = nll[torch.arange(length), tokens[1:]].tolist()
            scored = dict(zip(range(len(text) - TARGETS, len(text)), nll[-TARGETS:], strict=True))
            losses.append([scored[at] for at in places])
            others += [loss for at, loss in scored.items() if at not in places]
        assert row.nll == pytest.approx(sum(map(sum, losses)) / count, abs=1e-5)
        assert row.others_nll == pytest.approx(statistics.fmean(others), abs=1e-5)
        residuals = [sum(part) - row.nll * len(part) for part in losses]  # the error of a ratio
        error = math.sqrt(sum(r**2 for r in residuals) / 2 * 3) / count
        assert statistics.stdev(row.nll_by_document) / math.sqrt(3) == pytest.approx(error, abs=1e-4)
        assert statistics.fmean(row.nll_by_document) == pytest.approx(row.nll, abs=1e-5)


def test_a_text_that_repeats_nothing_has_no_number(model, tokenizer):
    letters = "".join(map(chr, range(33, 33 + 80)))
    (row,) = measure(model, tokenizer, [{"name": "d", "text": letters}], ["plain"], [32], protocol="far", targets=16)
    assert math.isnan(row.nll)
    assert (row.scored_tokens, row.chosen_share) == (0, 0.0)
    assert math.isfinite(row.others_nll)
    assert '"nll": null' in row.to_json()


def test_other_lengths_are_other_tokens_and_a_run_resumes(model, tokenizer, tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    first = go(model, tokenizer, results=rows)
    assert go(model, tokenizer, results=Rows(rows.path)) == first
    assert go(model, tokenizer, lengths=(16, 32))[0].texts != first[0].texts


def test_lengths_within_l_are_refused(model, tokenizer):
    with pytest.raises(EvaluationError, match=r"length 16: protocol 'far' needs .* training length of 16"):
        go(model, tokenizer, lengths=(16,))


class Given(Chosen):
    """Chosen tokens are those of the masks that it is given."""

    def __init__(self, masks):
        self.masks = masks

    def chosen(self, window):
        return self.masks[window]


@pytest.mark.parametrize(("documents", "each"), [(8, 1), (8, 2), (9, 5), (1, 6), (2, 16)])
def test_blocks_are_linear_in_the_sums_of_their_chosen_tokens(documents, each):
    """nll + (s - nll n) B / sum n, for each of 8 or more documents, or for each window of fewer."""
    generator = torch.Generator().manual_seed(0)
    losses, masks = torch.rand(2, documents * each, 10, generator=generator).double()
    masks = masks > 0.7
    items = [Context(n, f"document {n // each}", torch.arange(11), 0, 10) for n in range(len(losses))]
    row = Given(masks).row({}, items, list(losses))
    size = each if documents >= 8 else 1
    number = len(losses) // size
    count, nll = int(masks.sum()), losses[masks].mean().item()
    expected = []
    for start in range(0, len(losses), size):
        chosen = losses[start : start + size][masks[start : start + size]]
        expected.append(nll + (chosen.sum().item() - nll * len(chosen)) * number / count)
    assert row["nll_by_document"] == pytest.approx(expected, abs=2e-6)
    assert row["nll"] == pytest.approx(nll)
    assert (row["chosen_share"], row["others_nll"]) == (
        count / masks.numel(),
        pytest.approx(losses[~masks].mean().item()),
    )
