"""No function calls one on a higher floor, whatever a model is asked: the calls of every case are recorded."""

import copy
import sys

import pytest
import torch
from transformers import StaticCache

from rope_patch import patch
from rope_patch.attention.turner import Branch
from tests.cases import ALL, ROUTES
from tests.contract.test_continuous_batching import batched, prompts_of
from tests.families import TRAINING_LENGTH, build
from tests.models import t5_families
from tests.runs import tokens
from tests.walk.calls import recorded

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="before, code does not tell the class of a method")

MODEL = "models.baichuan.modeling."
"""A model as those of Transformers, which call what is registered as their attention."""

LENGTH = TRAINING_LENGTH + 9
LONG = 640  # tokens: one dense block would hold too many pairs


def answers(model, ids, mask=None, cache=None):
    """A prefill, and two tokens that follow it one by one."""
    length = ids.shape[1] - 2
    with torch.no_grad():
        for start, stop in ((0, length), (length, length + 1), (length + 1, length + 2)):
            seen = None if mask is None else mask[:, :stop]
            cache = model(ids[:, start:stop], seen, past_key_values=cache, use_cache=True).past_key_values


def learns(model, ids, mask=None):
    model(ids, mask, labels=ids, use_cache=False).loss.backward()


def texts(model):
    ids = tokens(LENGTH, rows=2)
    answers(model, ids)
    learns(model, ids)


def left_pads(model):
    ids = tokens(LENGTH, rows=2)
    mask = (torch.arange(LENGTH) >= torch.tensor([[5], [0]])).long()
    answers(model, ids, mask)
    learns(model, ids, mask)


def long_texts(model):
    answers(model, tokens(LONG))
    learns(model, tokens(LONG))


def static_caches(model):
    answers(model, tokens(LENGTH), cache=StaticCache(config=model.config, max_cache_len=LENGTH))


def paged_caches(model):
    batched(model, prompts_of(5, LENGTH))


def answers_to_texts(model):
    learns(model, tokens(LENGTH))
    model.generate(tokens(LENGTH), max_new_tokens=3, do_sample=False)


def situations():
    """A model, a scheme, and what is done with it."""
    llama, deep = build("llama", num_hidden_layers=1), build("llama")
    for spec in ALL:
        yield llama, spec, texts
    for spec in ROUTES:
        yield llama, spec, long_texts
        for act in (texts, left_pads, static_caches):
            yield deep, spec, act
        yield build("baichuan_alibi"), spec, texts
        yield build("gemma3"), spec, texts
        yield t5_families.build(), spec, answers_to_texts
    for spec in ("rerope:window=6", "rope+alibi"):
        yield deep, spec, paged_caches


@pytest.fixture(scope="module")
def climbs():
    """Each call of a function on a higher floor, with a situation in which it occurs."""
    found = {}
    for model, spec, act in situations():
        patched = copy.deepcopy(model)
        patch(patched, spec, allow_untrained=True)
        with recorded() as calls:
            act(patched)
        assert len(calls.entered) > 3, (spec, act.__name__)
        found |= dict.fromkeys(calls.climbs() - found.keys(), f"{spec}, {act.__name__}")
    return {climb: situation for climb, situation in found.items() if not climb.startswith(MODEL)}


def test_no_function_calls_one_on_a_higher_floor(climbs):
    new = [f"{climb} (under {situation})" for climb, situation in climbs.items()]
    assert not new, "\n".join(new)


BELOW = """
def score(call):
    return list(key for key in call.keys())
"""

ABOVE = """
class Call:
    def keys(self):
        yield from (1, 2)
"""


def test_calls_are_recorded():
    below, above = {"__name__": "rope_patch.attention.below"}, {"__name__": "rope_patch.mounting.above"}
    exec(BELOW, below)
    exec(ABOVE, above)
    call = above["Call"]()
    with recorded() as calls:
        below["score"](call)
        Branch(None, tokens(1), tokens(1))
    climb = "attention.below.score.<locals>.<genexpr> -> mounting.above.Call.keys"
    assert calls.climbs() == {climb}
    assert calls.entered[-1].function.module == "rope_patch.attention.turner"  # what `dataclass` makes has no file
