"""What a request may ask for at most, and the turns that requests take."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from rope_patch.serving import limits
from rope_patch.serving.limits import Refusal
from rope_patch.serving.requests import ChatRequest, CompletionRequest, parse
from rope_patch.serving.turns import Turns


def refused(act, *words):
    with pytest.raises(Refusal) as refusal:
        act(*words)
    return str(refusal.value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a\\udc00b"}',
        b'{"a": {"\\ud83d": 1}}',
        b'{"prompt": "\\ud800\\ud800"}',
        b'{"prompt": "\xed\xa0\x80"}',
    ],
)
def test_half_of_a_surrogate_pair_is_no_json(body):
    assert "half of a surrogate pair is no text" in refused(limits.read_json, body)


def test_a_whole_surrogate_pair_is_a_character():
    assert limits.read_json(b'{"prompt": "\\ud83d\\ude00"}') == {"prompt": "\N{GRINNING FACE}"}


@pytest.mark.parametrize("part", [b"[],", b"{},", b'{"":1},'])
def test_many_lists_and_objects_are_refused_before_they_are_built(part):
    assert "lists, objects and members" in refused(limits.read_json, b'{"a": [' + part * 2**17 + b"1]}")


def test_brackets_in_a_text_are_no_lists():
    text = '["' + '[{:\\"' * 2**15
    assert limits.read_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize("body", [b'"' * 2**20, b"[" * 2**17 + b'"\\' * 2**19, b'["' + b'[\\"' * 2**18])
def test_text_that_is_no_json_is_refused_in_linear_time(body):
    began = time.perf_counter()
    refused(limits.read_json, body)
    assert time.perf_counter() - began < 2


def test_depth_is_limited():
    assert "recursion limit" in refused(limits.read_json, b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({str(name): 1 for name in range(100)}, "the body has 100 fields; at most 64 are allowed"),
        ({"messages": [{}] * 5000}, "messages has 5000 entries; at most 4096 are allowed"),
        ({"input": [{}] * 5000}, "input has 5000 entries; at most 4096 are allowed"),
        ({"tools": [{}] * 129}, "tools has 129 entries; at most 128 are allowed"),
        ({"stop": ["a"] * 300}, "stop has 300 entries; at most 16 are allowed"),
        (
            {"logit_bias": {str(token): 1 for token in range(301)}},
            "logit_bias has 301 entries; at most 300 are allowed",
        ),
    ],
)
def test_lists_are_limited(body, sentence):
    assert refused(limits.read_json, json.dumps(body).encode()) == sentence


@pytest.mark.parametrize(
    ("kind", "body", "sentence"),
    [
        (CompletionRequest, {"prompt": "a", "stop": "b" * 300}, "String should have at most 256 characters"),
        (CompletionRequest, {"prompt": "a", "n": 129}, "n=129: Input should be less than or equal to 128"),
        (CompletionRequest, {"prompt": "a", "max_tokens": 10**400}, "Input should be less than 2147483648"),
        (CompletionRequest, {"prompt": "a", "stream_options": {str(n): 1 for n in range(99)}}, "99 fields"),
        (CompletionRequest, {"prompt": [["a"] * 10**5]}, "prompt.0"),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 10**5}]}, "messages.0.content"),
        (CompletionRequest, {"prompt": "a", "suffix": "b" * 10**6}, "suffix='bbb"),
    ],
)
def test_a_refusal_is_short(kind, body, sentence):
    said = refused(parse, kind, body)
    assert sentence in said
    assert len(said) < 250


def test_answers_and_characters_are_limited():
    assert "4000 prompts and n=128 ask for 512000 answers; at most 128" in refused(
        limits.check_prompts, ["a"] * 4000, 128, 100
    )
    assert "prompt 1 has 1601 characters; at most 1600 are allowed, 16 for each of 100 tokens" in refused(
        limits.check_prompts, ["a", "a" * 1601], 1, 100
    )
    limits.check_prompts(["a" * 1600] * 64, 2, 100)
    assert "lower n, max_tokens or logprobs" in refused(limits.check_answers, [4096] * 128, None)
    assert "with 21 log-probabilities each" in refused(limits.check_answers, [2**14], 20)
    limits.check_answers([2**11] * 128, None)


class Held:
    """Answers that hold places until they are told to leave."""

    def __init__(self, turns):
        self.turns, self.began, self.tasks = turns, [], {}

    async def ask(self, request, places=1):
        leave = asyncio.Event()

        async def hold():
            async with self.turns.taken(request, places):
                self.began.append(request)
                await leave.wait()

        self.tasks.setdefault(request, []).append((asyncio.ensure_future(hold()), leave))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self, request, *, cancel=False):
        task, leave = self.tasks[request].pop(0)
        task.cancel() if cancel else leave.set()
        await asyncio.wait([task])
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_a_request_for_many_answers_leaves_places_for_others():
    async def run():
        turns = Turns(12)
        held = Held(turns)
        for _ in range(20):
            await held.ask("many")
        assert held.began == ["many"] * 6  # as many as it leaves free
        for name in "abcdef":
            await held.ask(name)
        assert held.began[6:] == list("abcdef")  # each at once
        await held.ask("late")
        assert turns.free == 0
        await held.end("many")
        assert held.began[-1] == "late"  # and not the next of many
        await held.end("a")
        await held.end("many", cancel=True)
        assert held.began.count("many") == 6
        for name in "bcdef":
            await held.end(name)
        assert held.began.count("many") > 6

    asyncio.run(run())


def test_a_large_answer_is_not_overtaken_for_ever():
    async def run():
        held = Held(Turns(4))
        await held.ask("a", 2)
        await held.ask("b", 2)
        await held.ask("large", 4)
        await held.ask("small", 1)
        await held.end("a")
        assert held.began == ["a", "b"]
        await held.end("b")
        assert held.began == ["a", "b", "large"]
        await held.end("large")
        assert held.began[-1] == "small"

    asyncio.run(run())


def test_requests_that_leave_together_wake_nobody_of_each_other():
    async def run():
        turns = Turns(4)
        held = Held(turns)
        for _ in range(20):
            await held.ask("many")
        for task, _ in held.tasks["many"]:
            task.cancel()
        await asyncio.wait([task for task, _ in held.tasks["many"]])
        assert all(task.cancelled() for task, _ in held.tasks["many"])
        assert turns.free == 4
        assert not turns._waiting

    asyncio.run(run())


def test_places_come_back_from_answers_that_are_cancelled():
    async def run():
        turns = Turns(2)
        held = Held(turns)
        for name in "abcd":
            await held.ask(name)
        await held.end("c", cancel=True)  # while it waits
        await held.end("a", cancel=True)  # while it holds
        assert held.began == ["a", "b", "d"]
        await held.end("b")
        await held.end("d")
        assert turns.free == 2
        assert not turns._held
        assert not turns._waiting

    asyncio.run(run())
