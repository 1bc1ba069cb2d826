"""LongCE against its definition, token by token in float64, with gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import rope_patch
from rope_patch.errors import EvaluationError
from rope_patch.training import long_ce
from rope_patch.training.adapters import make_trainable
from rope_patch.training.chunked_loss import chunked_loss
from rope_patch.training.long_ce import LongCE

from .test_chunked_loss import VOCABULARY, build

SHORT, STEP = 6, 4


def log_p(model, tokens, place, begin):
    return torch.log_softmax(model(tokens[None, begin:place]).logits[0, -1], -1)[tokens[place]]


def defined(model, tokens, labels, documents):
    """The mean over all labels; no token sees another document."""
    total, count, weights = torch.zeros((), dtype=torch.float64), 0, []
    for row, wanted, begins in zip(tokens, labels, documents, strict=True):
        for place in range(1, len(row)):
            if wanted[place] == -100:
                continue
            begin = max(start for start in begins if start <= place)
            full = -log_p(model, row, place, begin)
            weight = 1.0
            if place >= SHORT:
                short = -log_p(model, row, place, max(begin, (place - SHORT) // STEP * STEP))
                weight = min(math.exp((short - full).item()), 5.0)
            weights.append(weight)
            total, count = total + weight * full, count + 1
    return total / count, weights


def case(name="llama", spec=None):
    model = build(name).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # so that some weights reach their limit
    if spec:
        rope_patch.patch(model, spec)
    tokens = torch.randint(1, VOCABULARY, (2, 19), generator=torch.Generator().manual_seed(3))
    labels = tokens.masked_fill(torch.rand(2, 19, generator=torch.Generator().manual_seed(4)) < 0.2, -100)
    return model, tokens, labels


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("name", "spec"), [("llama", None), ("llama, tied", "rerope:window=4+logn"), ("granite", "yarn:factor=2")]
)
def test_the_loss_and_its_gradients_are_the_definition(name, spec):
    model, tokens, labels = case(name, spec)
    expected, weights = defined(model, tokens, labels, [[0], [0]])
    assert min(weights) < 1.0 < max(weights)
    assert name == "granite" or max(weights) == 5.0
    wanted = gradients(model, expected)
    with chunked_loss(model, 5, long_ce=LongCE(SHORT, STEP)):
        loss = model(input_ids=tokens, labels=labels).loss
    assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(gradients(model, loss), wanted, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", [None, "rerope:window=4+logn"])
def test_documents_of_a_packed_row_stay_apart(spec):
    model, tokens, labels = case(spec=spec)
    documents = [[0, 9], [0, 3, 14]]
    labels[0, [0, 9]] = labels[1, [0, 3, 14]] = -100
    begins = [[max(begin for begin in row if begin <= place) for place in range(19)] for row in documents]
    positions = torch.arange(19) - torch.tensor(begins)
    with torch.no_grad():
        expected, _ = defined(model, tokens, labels, documents)
    with chunked_loss(model, long_ce=LongCE(SHORT, STEP)):
        loss = model(input_ids=tokens, position_ids=positions, labels=labels).loss
    assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)


def test_right_padding_counts_for_nothing():
    model, tokens, labels = case()
    expected, _ = defined(model, tokens[:1, :15], labels[:1, :15], [[0]])
    tokens, labels = tokens[:1].clone(), labels[:1].clone()
    labels[:, 15:] = -100
    mask = torch.ones_like(tokens)
    mask[:, 15:] = 0
    with chunked_loss(model, long_ce=LongCE(SHORT, STEP)):
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)


def test_adapters_under_autocast_train_towards_the_same():
    """LoRA with bfloat16 products: loss and gradients are those of float32, within the rounding of bfloat16."""
    torch.manual_seed(0)
    model, tokens, labels = case(spec="rerope:window=4+logn")
    adapted = make_trainable(model.float(), "lora", rank=2, alpha=4.0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)  # else the gradients of the other half are zero

    def trained(enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), chunked_loss(adapted, long_ce=LongCE(SHORT, STEP)):
            loss = adapted(input_ids=tokens, labels=labels).loss
        return loss, torch.cat([gradient.flatten() for gradient in gradients(adapted, loss)])

    (exact, wanted), (loss, gradient) = trained(False), trained(True)
    assert_close(loss, exact, atol=0.02, rtol=0.02)
    assert torch.cosine_similarity(gradient, wanted, dim=0) > 0.98
    assert all("lora" in name for name, parameter in adapted.named_parameters() if parameter.grad is not None)


def test_a_row_within_the_short_context_has_the_usual_loss():
    model, tokens, labels = case()
    with chunked_loss(model, long_ce=LongCE(19, 4)):
        loss = model(input_ids=tokens, labels=labels).loss
    assert_close(loss.double(), model(input_ids=tokens, labels=labels).loss.double(), atol=1e-5, rtol=1e-5)


def test_short_contexts_of_the_recipe():
    assert LongCE.beyond(4096, 32768) == LongCE(4096, 1024)
    with pytest.raises(EvaluationError, match="loss=longce with rows of 4096 tokens is not allowed"):
        LongCE.beyond(4096, 4096)
    with pytest.raises(EvaluationError, match="step=0 is not allowed"):
        LongCE(4, 0)


def test_positions_of_a_short_context_begin_anew_and_so_do_those_of_the_documents_in_it():
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])
    found = long_ce._part("position_ids", positions, slice(3, 10), 10)
    assert found.tolist() == [[0, 1, 2, 3, 0, 1, 2], list(range(7))]
