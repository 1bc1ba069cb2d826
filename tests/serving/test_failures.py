"""Whatever fails for one request fails that request alone: an exception at every step of a server that others use."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch import patch
from rope_patch.saving.loading import default_checkpoint

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from rope_patch.serving.answers import Completions  # noqa: E402, they need what is imported above
from rope_patch.serving.batch import PAGE, Batch  # noqa: E402
from rope_patch.serving.factors import Reaches  # noqa: E402
from rope_patch.serving.handlers import ResponseHandler  # noqa: E402
from rope_patch.serving.sampling import Sampling  # noqa: E402
from rope_patch.serving.server import Server  # noqa: E402
from rope_patch.serving.text import Text  # noqa: E402

LIMIT, NEW, POISON, SEED = 512, 12, 1999, 666
GOOD = ["import os\n", "def value(x):\n    return x", "class A:\n", "# a comment", "for i in range(3):\n"]
BAD = {"prompt": [5, 6, POISON], "max_tokens": NEW, "stop": ["poison"], "seed": SEED, "temperature": 1, "logprobs": 3}


class Failure(Exception):
    """No error of Python's own."""


@pytest.fixture(scope="module")
def served():
    """A server in this process: its address, model, batch, and what it answers to the good prompts alone."""
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint())
    tokenizer = AutoTokenizer.from_pretrained(default_checkpoint())
    tokenizer.chat_template = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
    patch(model, "rerope:window=64+logn")
    settings = {"num_blocks": 8 * LIMIT // PAGE, "max_batch_tokens": 64, "auto_switch_to_flash": False}
    batch = Batch(model, tokenizer, {**settings, "max_blocks_per_request": 0}, Sampling())
    application = Server("tiny-llama", model, {None: batch}, Reaches(LIMIT), 90).application()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    http = uvicorn.Server(uvicorn.Config(application, port=port, log_level="critical", http="h11"))
    thread = threading.Thread(target=http.run)
    thread.start()
    try:
        while not http.started:
            assert thread.is_alive()
            time.sleep(0.05)
        address = f"http://127.0.0.1:{port}"
        alone = [ask(address, prompt=prompt) for prompt in GOOD]
        yield SimpleNamespace(address=address, model=model, tokenizer=tokenizer, batch=batch, alone=alone)
    finally:
        http.should_exit = True
        thread.join()


def post(address, path="/v1/completions", **body):
    """Status and body of an answer."""
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


def ask(address, **body):
    status, answer = post(address, **{"max_tokens": NEW, **body})
    assert status == 200, answer
    return json.loads(answer)["choices"][0]["text"]


def health(address):
    try:
        return urllib.request.urlopen(f"{address}/health", timeout=10).status
    except urllib.error.HTTPError as refusal:
        return refusal.code


def beside_good_ones(served, **body):
    """The answer to one request, while others get theirs."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        good = [pool.submit(ask, served.address, prompt=prompt) for prompt in GOOD]
        answer = post(served.address, **body)
        assert [one.result() for one in good] == served.alone
    assert ask(served.address, prompt=GOOD[0]) == served.alone[0]
    assert health(served.address) == 200
    return answer


def failing(wrapped, when):
    """A function that fails on some arguments."""

    def fail(*arguments, **settings):
        if when(*arguments, **settings):
            raise Failure("at /some/path")
        return wrapped(*arguments, **settings)

    return fail


@contextlib.contextmanager
def failing_forward(model, when, failure=Failure):
    def hook(_, arguments, settings):
        if when(settings["input_ids"]):
            raise failure("at /some/path")

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def once():
    """True the first time."""
    left = [True]
    return lambda *_, **__: bool(left) and left.pop()


STEPS = {
    "admission": lambda m, s: m.setattr(
        s.batch, "_joined", failing(s.batch._joined, lambda name, ids, *_: POISON in ids[:3])
    ),
    "adding": lambda m, s: m.setattr(
        s.batch.manager, "add_request", failing(s.batch.manager.add_request, lambda ids, **_: POISON in ids[:3])
    ),
    "sampling": lambda m, s: m.setattr(Sampling, "draw", failing(Sampling.draw, lambda self, *_: self.seed == SEED)),
    "late sampling": lambda m, s: m.setattr(
        Sampling, "draw", failing(Sampling.draw, lambda self, _, step: self.seed == SEED and step == 7)
    ),
    "text": lambda m, s: m.setattr(Text, "add", failing(Text.add, lambda self, *_, **__: self._stop == ["poison"])),
    "decoding": lambda m, s: m.setattr(
        Text, "_decode", failing(Text._decode, lambda self, ids: self._stop == ["poison"] and len(ids) > 1)
    ),
    "stop strings": lambda m, s: m.setattr(Text, "_open", failing(Text._open, lambda self, string: string == "poison")),
    "writing": lambda m, s: m.setattr(
        Completions, "choice", failing(Completions.choice, lambda self, *_, **__: self.logprobs)
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_an_exception_at_one_step_is_the_request_s_own(served, monkeypatch, step, stream):
    STEPS[step](monkeypatch, served)
    status, answer = beside_good_ones(served, **BAD, stream=stream)
    failed_alone(status, answer, stream)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_fails_on_one_prompt(served, n, stream):
    with failing_forward(served.model, lambda ids: (ids == POISON).any()):
        status, answer = beside_good_ones(served, **BAD, n=n, stream=stream)
    failed_alone(status, answer, stream)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_given_up_while_the_model_still_fails_on_it(served, stream):
    """The first answer fails alone, and the others of its request leave while a step is at work on the next of them."""

    def slowly(ids):
        return bool((ids == POISON).any()) and not time.sleep(0.3)

    with failing_forward(served.model, slowly):
        status, answer = beside_good_ones(served, **BAD, n=3, stream=stream)
    failed_alone(status, answer, stream)


def failed_alone(status, answer, stream):
    """A 500, or a stream that ends with an error; neither tells what the exception says."""
    if stream:
        assert status == 200
        *_, last = answer.strip().split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert status == 500
        error = json.loads(answer)["error"]
    assert error["message"] == "the server failed on this request"
    assert "/some/path" not in answer


def test_an_exception_of_the_tokenizer(served, monkeypatch):
    kind = type(served.tokenizer)
    monkeypatch.setattr(kind, "__call__", failing(kind.__call__, lambda self, text, *_, **__: text == "poison"))
    status, answer = beside_good_ones(served, prompt="poison")
    failed_alone(status, answer, False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_the_model_fails_on(served, monkeypatch, stream):
    body = {"input": "a", "max_output_tokens": NEW, "stream": stream, "temperature": 1, "seed": SEED}
    monkeypatch.setattr(Sampling, "draw", failing(Sampling.draw, lambda self, *_: self.seed == SEED))
    status, answer = beside_good_ones(served, path="/v1/responses", **body)
    assert status == (200 if stream else 500)
    assert "the server failed on this request" in answer
    assert "/some/path" not in answer


def test_a_handler_of_transformers_that_fails(served, monkeypatch):
    async def fail(*_):
        raise Failure("at /some/path")

    monkeypatch.setattr(ResponseHandler, "handle_request", fail)
    status, answer = beside_good_ones(served, path="/v1/responses", input="a")
    failed_alone(status, answer, False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("failure", [Failure, SystemExit])
def test_a_step_that_fails_once_fails_nobody(served, failure):
    """SystemExit ends the thread of Transformers without a word to its requests."""

    def several(ids):
        return ids.shape[1] == len(GOOD) + 1 and first()  # all of them decode

    first = once()
    with failing_forward(served.model, several, failure):
        status, _ = beside_good_ones(served, prompt=GOOD[0] * 2, max_tokens=3 * NEW)
    assert status == 200


@pytest.mark.parametrize(
    "part", ["scheduler.schedule_batch", "update_batch", "inputs_and_outputs.prepare_batch_tensors"]
)
def test_an_exception_in_the_batch_of_transformers(served, monkeypatch, part):
    *path, name = part.split(".")
    holder = served.batch.manager.batch_processor
    for step in path:
        holder = getattr(holder, step)
    calls = iter(range(10**6))
    monkeypatch.setattr(holder, name, failing(getattr(holder, name), lambda *_, **__: next(calls) == 4))
    status, _ = beside_good_ones(served, prompt=GOOD[1])
    assert status == 200
    assert next(calls) > 4


def test_an_interrupted_draw_goes_on_as_it_would_have(served):
    body = {"prompt": GOOD[0], "temperature": 1.5, "seed": 3, "logprobs": 2}
    expected = json.loads(post(served.address, **body, max_tokens=NEW)[1])["choices"][0]
    calls = iter(range(10**6))
    with failing_forward(served.model, lambda ids: next(calls) == 6):
        found = json.loads(post(served.address, **body, max_tokens=NEW)[1])["choices"][0]
    assert found["text"] == expected["text"]
    assert found["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-4)


def test_a_model_that_fails_on_everything_is_unhealthy_until_it_works(served):
    with failing_forward(served.model, lambda ids: True):
        assert post(served.address, prompt="a", max_tokens=2)[0] in (500, 503)
        for _ in range(100):
            if health(served.address) == 503:
                break
            time.sleep(0.1)
        assert health(served.address) == 503
        status, answer = post(served.address, prompt="a", max_tokens=2)
        assert (status, json.loads(answer)["error"]["type"]) == (503, "server_error")
    for _ in range(100):
        if health(served.address) == 200:
            break
        time.sleep(0.1)
    assert ask(served.address, prompt=GOOD[2]) == served.alone[2]


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_hang_up_leave_nothing_behind(served, stream):
    host, port = served.address.removeprefix("http://").split(":")
    body = json.dumps({"prompt": GOOD[0], "max_tokens": 400, "n": 20, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for cut in (len(head) + 5, len(head) + len(body)):  # in the body, and after it
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall((head + body)[:cut])
            time.sleep(0.3)
    beside_good_ones(served, prompt="a", max_tokens=2)
    batch = served.batch
    for _ in range(50):
        if batch._turns.free == 8 * LIMIT // PAGE:
            break
        time.sleep(0.1)
    assert batch._turns.free == 8 * LIMIT // PAGE
    assert not batch._inside
    assert not batch._suspects
    assert not batch.manager.output_router.result_handlers
