"""`longppl`: key spans and value against the definition in float64, and against what the package itself printed."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rope_patch.errors import EvaluationError
from rope_patch.evaluation.protocols import long_ppl
from rope_patch.evaluation.protocols.long_ppl import key_spans
from rope_patch.evaluation.row import Rows
from tests.evaluation.conftest import measure

SHORT, STEP = 16, 6
LETTERS = ["".join("abcde"[place * place * 7 % 11 % 5] for place in range(60)), "abecd" * 8 + "abc"]
TEXT = LETTERS[0] * 2 + "é" + LETTERS[1]


def tokenizer_of(*pairs: str, bos: bool = False) -> PreTrainedTokenizerFast:
    """Letters, and some pairs of letters as one token; with `bos`, a start token in front of every text."""
    names = ["<s>", *"abcdeÃ©", *pairs]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair) for pair in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def llama(tokenizer, length, seed):
    torch.manual_seed(seed)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=length, **size))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)  # so that far tokens matter
        model.lm_head.weight.mul_(6.0 if seed > 1 else 0.5)
    return model.eval()


def pair(bos: bool = False, seed: int = 4):
    """An evaluated model that reads letters, and an evaluator that reads pairs of them, long within its L."""
    tokenizer, reader = tokenizer_of(), tokenizer_of("ab", "ce", bos=bos)
    return llama(tokenizer, 32, 1), tokenizer, llama(reader, 256, seed), reader


PRINTED = {
    False: (21.13734, [30, 112, 125, 135, 140, 145, 150, 155, 160]),
    True: (21.218039, [41, 52, 68, 101, 112, 125, 130, 135, 140, 145, 150, 155, 160]),
}
"""What `compute_longppl` and `find_key_token` of longppl 0.3.0 print for this case, trunc_len 16 and sliding_window 6:
the value, and where the key spans begin, of one character each. By whether the evaluator's tokenizer sets a start."""


def go(pair, length=164, text=TEXT, **settings):
    model, tokenizer, evaluator, reader = pair
    told = {"protocol": "longppl", "evaluator": (evaluator, reader), "short_context": SHORT, "stride": STEP, **settings}
    return measure(model, tokenizer, [{"name": "letters", "text": text}], ["plain"], [length], **told)


@pytest.mark.parametrize("bos", [False, True])
def test_spans_and_value_are_those_of_the_package(bos):
    _, _, evaluator, reader = both = pair(bos)
    value, begins = PRINTED[bos]
    assert key_spans(TEXT, evaluator, reader, SHORT, STEP) == [(begin, begin + 1) for begin in begins]
    (row,) = go(both)
    assert row.perplexity == pytest.approx(value, abs=1e-5 * value)
    assert (row.scored_tokens, row.windows) == (len(begins), 1)
    assert row.chosen_share == pytest.approx(len(begins) / 164)
    assert row.nll * len(begins) + row.others_nll * (164 - len(begins)) == pytest.approx(
        164 * math.log(9.293928), abs=1e-3
    )


@torch.no_grad()
def defined(model, tokens, place, begin):
    logits = model(tokens[None, begin:place]).logits[0, -1].double()
    return -torch.log_softmax(logits, -1)[tokens[place]].item()


@pytest.mark.parametrize(("gain", "count"), [(2.0, 156), (-1.0, 156), (-1.0, 17), (-1.0, 16)])
def test_key_tokens_are_the_definition_token_by_token(monkeypatch, gain, count):
    """With a gain of -1 most likely tokens are key, so that spans have many tokens."""
    monkeypatch.setattr(long_ppl, "GAIN", gain)
    _, _, evaluator, reader = pair()
    text = "".join(reader.convert_ids_to_tokens(reader(TEXT)["input_ids"][:count])).replace("Ã©", "é")
    encoded = reader(text, return_offsets_mapping=True)
    tokens, covered = torch.tensor(encoded["input_ids"]), set()
    assert len(tokens) == count
    for place in range(SHORT, count):
        full = defined(evaluator, tokens, place, 0)
        short = defined(evaluator, tokens, place, (place - SHORT) // STEP * STEP)
        if short - full > gain and full < 2:
            covered |= set(range(*encoded["offset_mapping"][place]))
    spans = key_spans(text, evaluator, reader, SHORT, STEP)
    assert {letter for span in spans for letter in range(*span)} == covered
    assert all(end < start for (_, end), (start, _) in pairwise(spans))
    assert gain > 0 or count < 20 or any(end - start > 2 for start, end in spans)


def test_a_token_counts_if_all_its_characters_do():
    spans = [(2, 4), (6, 9)]
    inside = [(2, 4), (3, 4), (6, 9), (7, 8)]
    outside = [(0, 1), (1, 3), (3, 5), (4, 6), (8, 10), (2, 9), (9, 10)]
    assert [token for token in [*inside, *outside] if long_ppl._lies_within(token, spans)] == inside


def test_windows_of_a_long_text_are_read_on_their_own():
    both = pair()
    (row,) = go(both, 100, windows_per_document=2, targets=60)
    alone = [go(both, 100, text, targets=60)[0].scored_tokens for text in (TEXT[64:], TEXT[:101])]
    assert row.scored_tokens == sum(alone) > 0


def test_an_evaluator_that_is_too_short_is_refused():
    both = pair()
    both[2].config.max_position_embeddings = 150
    with pytest.raises(EvaluationError, match="a text of 156 tokens at once, but its training length is 150"):
        go(both)
    with pytest.raises(EvaluationError, match="evaluator=None: protocol 'longppl' needs"):
        go(both, evaluator=None)
    with pytest.raises(EvaluationError, match="no other protocol has one"):
        go(both, protocol="last", stride=None, short_context=None)
    told = {"protocol": "longppl", "evaluator": both[2:]}
    with pytest.raises(EvaluationError, match="letters has tokens alone"):
        measure(*both[:2], [{"name": "letters", "input_ids": [1] * 200}], ["plain"], [100], **told)


def test_another_evaluator_is_another_measurement(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    first, again, other = go(pair(), results=rows), go(pair(), results=rows), go(pair(seed=7), results=rows)
    assert first == again
    assert first[0].texts != other[0].texts
    assert len(rows.rows) == 2
