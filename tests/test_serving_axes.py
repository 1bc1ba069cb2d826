"""A factor for each request in `rope-patch serve`, where positions have three axes, and in hybrid models."""

import asyncio
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from rope_patch import RopePatchWarning, patch
from rope_patch.models.find_stacks import read_stack
from rope_patch.saving.export import export_checkpoint
from rope_patch.saving.loading import default_checkpoint
from rope_patch.serving.batch import Batch
from rope_patch.serving.factors import models_by_factor, schemes_by_factor
from rope_patch.serving.one_by_one import needs_turns
from rope_patch.serving.sampling import Sampling
from tests.families import FAMILIES as OF_TEXT
from tests.families import TRAINING_LENGTH as L
from tests.families import build as text_model
from tests.models import mrope_families
from tests.models.mrope_families import with_image
from tests.models.test_mrope import tokens
from tests.runs import assert_close, generated, left_padded

FACTORS = (1, 2, 4)
OF_IMAGES = [f for f in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5") if f in mrope_families.FAMILIES]
HYBRIDS = [f for f in ("qwen3_5_text", "qwen3_next") if f in OF_TEXT]
NEW = 6
SPECS = ["yarn:target=auto", "ntk:target=auto+logn", "self_extend:target=auto"]


def build(family):
    return mrope_families.build(family) if family in OF_IMAGES else text_model(family)


def by_factor(family, spec="yarn:target=auto"):
    """A model for each factor, which share weights, and one of its own for each."""
    model, alone = build(family), {}
    schemes = schemes_by_factor(spec, FACTORS, [read_stack(model).checkpoint])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RopePatchWarning)  # a factor of 1 changes nothing
        for factor, scheme in schemes.items():
            alone[factor] = build(family)
            patch(alone[factor], scheme)
    return models_by_factor(schemes, model), alone


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", OF_IMAGES + HYBRIDS)
def test_each_factor_is_the_model_that_was_patched_with_it_alone(family, spec):
    models, alone = by_factor(family, spec)
    batch, mask = left_padded([tokens(30), tokens(20, seed=1), tokens(8, seed=2)])
    found = {factor: generated(models[factor], batch, attention_mask=mask) for factor in (4, 1, 2)}
    for factor, one in alone.items():
        assert torch.equal(found[factor], generated(one, batch, attention_mask=mask))
    weights = [{id(weight) for weight in model.parameters()} for model in models.values()]
    assert weights[0] == weights[1] == weights[2]


@torch.no_grad()
@pytest.mark.parametrize("family", OF_IMAGES)
def test_images_are_read_by_each_factor_as_by_its_model_alone(family):
    models, alone = by_factor(family)
    logits = []
    for factor in FACTORS:
        found, expected = (each[factor](**with_image(), use_cache=False).logits for each in (models, alone))
        assert torch.equal(found, expected)
        logits.append(found)
        new = {"max_new_tokens": NEW, "do_sample": False}
        assert torch.equal(
            models[factor].generate(**with_image(), **new), alone[factor].generate(**with_image(), **new)
        )
    assert (logits[0] - logits[1]).abs().max() > 1e-3  # factors can be told apart
    assert (logits[1] - logits[2]).abs().max() > 1e-3


class Words:
    """A tokenizer whose texts are ids."""

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def __len__(self):
        return 97


def batch_of(model):
    settings = {"num_blocks": 8, "max_batch_tokens": 16, "auto_switch_to_flash": False, "max_blocks_per_request": 0}
    return Batch(model, Words(), settings, Sampling())


async def answers(batches, requests):
    """Ids and their log-probabilities for requests, all at once, each a factor and a prompt."""

    async def answer(factor, prompt):
        parts = batches[factor].tokens(object(), prompt, NEW, Sampling(top_logprobs=0))
        return [token async for new, _ in parts for token in new]

    for batch in batches.values():
        await batch.start()
    try:
        return await asyncio.gather(*(answer(*request) for request in requests))
    finally:
        for batch in batches.values():
            await batch.stop()


@torch.no_grad()
def assert_answer(model, prompt, answer):
    ids = torch.tensor([prompt + [token.id for token in answer]])
    assert torch.equal(generated(model, ids[:, : len(prompt)], NEW), ids[:, len(prompt) :])
    expected = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    found = torch.tensor([token.logprob for token in answer])
    assert_close(found, expected.gather(1, ids[0, len(prompt) :, None])[:, 0])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", OF_IMAGES + HYBRIDS)
def test_requests_under_several_factors_at_a_time(family, spec):
    """Prompts are read in pieces of 16 tokens."""
    models, alone = by_factor(family, spec)
    batches = {factor: batch_of(model) for factor, model in models.items()}
    requests = [(1, 12), (2, L + 1), (4, 3 * L), (4, 5), (2, 16), (1, 17), (4, 17)]
    requests = [(factor, tokens(length, seed=length)[0].tolist()) for factor, length in requests]
    for (factor, prompt), answer in zip(requests, asyncio.run(answers(batches, requests)), strict=True):
        assert_answer(alone[factor], prompt, answer)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_request_that_fails_in_turn_does_not_take_the_others_with_it(family, monkeypatch):
    model, alone = build(family), build(family)
    inner = model.forward

    def forward(input_ids=None, **named):
        if 96 in input_ids[0].tolist():
            raise RuntimeError("a token that the model cannot read")
        return inner(input_ids=input_ids, **named)

    monkeypatch.setattr(model, "forward", forward)
    batches, good = {None: batch_of(model)}, tokens(40)[0].tolist()

    async def both():
        batch = batches[None]
        await batch.start()
        wrong = batch.tokens(object(), [3, 96, 4], NEW, Sampling())
        right = batch.tokens(object(), good, NEW, Sampling(top_logprobs=0))

        async def fails():
            with pytest.raises(RuntimeError, match="the model failed on this request"):
                [None async for _ in wrong]

        async def goes_on():
            return [token async for new, _ in right for token in new]

        try:
            return (await asyncio.gather(fails(), goes_on()))[1]
        finally:
            await batch.stop()

    assert_answer(alone, good, asyncio.run(both()))


def test_models_that_can_be_paged_are():
    assert not needs_turns(SimpleNamespace())
    assert not needs_turns(SimpleNamespace(layer_types=["full_attention", "sliding_attention"]))
    assert needs_turns(SimpleNamespace(layer_types=["linear_attention", "full_attention"]))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*HYBRIDS[:1], *OF_IMAGES[:1]])
def test_a_folder_with_factors_is_served(tmp_path, family):
    pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    import openai

    from tests.test_serve import client_of, complete, server

    model = build(family)
    model.save_pretrained(tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(default_checkpoint())
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "plain")
    schemes = schemes_by_factor("yarn:target=auto", FACTORS, [read_stack(model).checkpoint])
    export_checkpoint(tmp_path / "plain", tmp_path / "out", by_factor=schemes)
    _, alone = by_factor(family)
    with server(tmp_path / "out") as (address, _):
        client = client_of(address)
        for length, body in ((12, {}), (L, {}), (3 * L, {}), (12, {"rope_factor": 4})):
            factor = body.get("rope_factor") or next(f for f in FACTORS if f * L >= length + NEW)
            prompt = tokens(length)[0].tolist()
            answer = complete(client, prompt, logprobs=0, max_tokens=NEW, extra_body=body)
            found = torch.tensor(answer.choices[0].logprobs.token_logprobs)
            row = torch.cat([torch.tensor([prompt]), generated(alone[factor], torch.tensor([prompt]), NEW)], dim=1)
            with torch.no_grad():
                scores = alone[factor](row, use_cache=False).logits[0, length - 1 : -1].log_softmax(-1)
            torch.testing.assert_close(found, scores.gather(1, row[0, length:, None])[:, 0], atol=1e-4, rtol=0)
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
        messages = [{"role": "user", "content": [picture]}]
        with pytest.raises(openai.BadRequestError, match="image_url"):
            client.chat.completions.create(model="out", messages=messages)
