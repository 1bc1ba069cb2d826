"""Tokens of requests in a shared batch: shares of the probability, seeds, and answers that are taken up again."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers.generation.continuous_batching.requests import RequestState

from rope_patch.serving.batch import Sampler, Sampling

SHARES = [0.2, 0.5, 0.05, 0.25]  # not in order
DRAWS = 3000


@pytest.mark.parametrize(
    ("top_p", "temperature", "expected"),
    [
        (1.0, 1.0, SHARES),
        (0.6, 1.0, [0, 0.5 / 0.75, 0, 0.25 / 0.75]),  # the token that crosses the share is among them
        (0.5, 1.0, [0, 1, 0, 0]),
        (0.01, 1.0, [0, 1, 0, 0]),
        (0.96, 1.0, SHARES),
        (1.0, 0.5, [share**2 / sum(each**2 for each in SHARES) for share in SHARES]),
        (0.6, 2.0, [0, 0.5**0.5 / (0.5**0.5 + 0.5), 0, 0.5 / (0.5**0.5 + 0.5)]),  # of shares that are nearer
    ],
)
def test_tokens_are_drawn_by_their_share_of_the_likeliest(top_p, temperature, expected):
    sampling, logits = Sampling(temperature, top_p, seed=7), torch.tensor(SHARES).log()
    counted = Counter(sampling.draw(logits, step) for step in range(DRAWS))
    for token, share in enumerate(expected):
        error = (share * (1 - share) / DRAWS) ** 0.5
        assert abs(counted[token] / DRAWS - share) <= 4 * error, token


def test_a_draw_follows_the_seed_and_its_place_in_the_answer():
    logits = torch.zeros(1000)
    drawn = [[Sampling(1.0, seed=seed).draw(logits, step) for step in range(20)] for seed in (0, 1, 0)]
    assert drawn[0] == drawn[2]
    assert len({*drawn[0], *drawn[1]}) > 30


@pytest.mark.parametrize("interrupted", [(4,), (1, 6), (3, 3, 9)], ids=str)
def test_an_answer_that_is_taken_up_again_goes_on_as_it_would_have(interrupted):
    """Transformers then begins with prompt and answer as the prompt."""
    sampler, logits = Sampler(Sampling()), torch.zeros(1, 1000)

    def answer(places):
        settings = {"sampling": Sampling(temperature=1.0, seed=3)}
        state = RequestState("one", initial_tokens=[5, 6, 7], max_new_tokens=12, logit_processor_kwargs=settings)
        said = []
        for place in range(12):
            for _ in range(places.count(place)):
                state = state.create_equivalent_initial_request()
            sampler.prepare_tensor_args([SimpleNamespace(state=state)])
            token = int(sampler(logits, torch.zeros(1)).argmax())
            state.generated_tokens.append(token)
            said.append(token)
        return said

    whole = answer(())
    assert len(set(whole)) > 8
    assert answer(interrupted) == whole
