"""`rope-patch serve` under requests that ask for too much: a 4xx with the limit, and nobody else notices."""

import concurrent.futures
import http.client
import json
import shutil
import threading
import time
import urllib.parse
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rope_patch.saving.loading import default_checkpoint
from tests.test_serve import server

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

LIMIT = 700
VOCABULARY = 2048  # rows of the checkpoint's embedding
TEMPLATE = "{% for m in messages %}# {{ m.content }}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
WORDS = "the quick brown fox jumps over a lazy dog "


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address and process of a server whose tokenizer has one token more than the model."""
    folder = tmp_path_factory.mktemp("hostile") / "padded"
    shutil.copytree(default_checkpoint(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert len(tokenizer) == VOCABULARY + 1
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with server(folder, "--scheme", "rerope:window=64+logn", "--max-length", str(LIMIT)) as (address, process):
        yield urllib.parse.urlsplit(address).port, process


def post(port, path, body, timeout=60):
    """Status, and the message of an error or the whole answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        raw = body if isinstance(body, str | bytes) else json.dumps(body)
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found = json.loads(answer.read())
        return answer.status, found["error"]["message"] if "error" in found else found
    finally:
        connection.close()


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


class Watched:
    """Asks for /health all the time; the slowest answer in seconds, and the growth of the server's memory in MiB."""

    def __init__(self, port, process):
        self.port, self.process, self.slowest, self.on = port, process, 0.0, True

    def __enter__(self):
        self.before = self.memory()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.on = False
        self.thread.join()
        self.grown = self.memory() - self.before

    def watch(self):
        while self.on:
            began = time.monotonic()
            assert get(self.port, "/health") == 200
            self.slowest = max(self.slowest, time.monotonic() - began)
            time.sleep(0.02)

    def memory(self):
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def user(text):
    return {"messages": [{"role": "user", "content": text}]}


TOO_MUCH = {
    "answers": (
        COMPLETIONS,
        {"prompt": ["a"] * 4000, "n": 128},
        "4000 prompts and n=128 ask for 512000 answers; at most",
    ),
    "values": (COMPLETIONS, {"prompt": "a", "n": 128, "logprobs": 20}, "lower n, max_tokens or logprobs"),
    "stop strings": (COMPLETIONS, {"prompt": "a", "stop": ["b" * 9] * 10**5}, "stop has 100000 entries; at most 16"),
    "a long stop string": (COMPLETIONS, {"prompt": "a", "stop": "b" * 10**5}, "at most 256 characters"),
    "text": (
        COMPLETIONS,
        {"prompt": WORDS * 20000},
        "characters; at most 11200 are allowed, 16 for each of 700 tokens",
    ),
    "texts": (COMPLETIONS, {"prompt": [WORDS * 260] * 128}, "tokens exceed the limit of 700"),
    "ids": (COMPLETIONS, {"prompt": [1] * 400000}, "400000 + 1 tokens exceed the limit of 700; shorten the prompt"),
    "a body": (COMPLETIONS, " " * (20 * 2**20), "the body is too large; at most 1499136 bytes are allowed"),
    "a chat": (CHAT, user(WORDS * 20000), "bytes; at most 76736 are allowed, 16 for each of 700"),
    "messages": (CHAT, {"messages": user("")["messages"] * 5000}, "bytes; at most 76736 are allowed"),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [1] * 30000}]}, "bytes; at most 76736 are allowed"),
    "tools": (CHAT, {**user("a"), "tools": [{}] * 200}, "tools has 200 entries; at most 128 are allowed"),
    "biases": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {str(n): 1 for n in range(1000)}},
        "logit_bias has 1000 entries",
    ),
    "a response": (RESPONSES, {"input": WORDS * 20000}, "bytes; at most 76736 are allowed"),
    "depth": (COMPLETIONS, '{"prompt": ' + "[" * 30000 + "]" * 30000 + "}", "recursion limit exceeded"),
    "lists": (COMPLETIONS, '{"prompt": [' + "[]," * 300000 + "[]]}", "lists, objects and members; at most 65536"),
    "fields": (COMPLETIONS, {f"f{n}": 1 for n in range(1000)}, "the body has 1000 fields; at most 64 are allowed"),
    "members": (COMPLETIONS, {"prompt": "a", "stream_options": {f"f{n}": 1 for n in range(9999)}}, "at most 64"),
    "digits": (COMPLETIONS, '{"prompt": "a", "seed": ' + "9" * 10**5 + "}", "number out of range"),
    "an id": (
        COMPLETIONS,
        {"prompt": [5, VOCABULARY]},
        f"{VOCABULARY}, '[PAD]', at place 1; ids from 0 to 2047 are allowed",
    ),
    "an id of several": (COMPLETIONS, {"prompt": [[5], [5, 6, 2**70]]}, "prompt 1 has ids beyond the vocabulary"),
    "a negative id": (COMPLETIONS, {"prompt": [-1]}, "-1, at place 0"),
    "a word": (COMPLETIONS, {"prompt": "a [PAD]"}, f"{VOCABULARY}, '[PAD]', at place "),
    "a word in a chat": (CHAT, user("a [PAD]"), f"{VOCABULARY}, '[PAD]', at place "),
    "a word in a tool": (
        CHAT,
        {**user("a"), "tools": [{"type": "function", "function": {"name": "[PAD]"}}]},
        "'[PAD]'",
    ),
    "a word in a response": (RESPONSES, {"input": "a [PAD]"}, f"{VOCABULARY}, '[PAD]', at place "),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_what_asks_for_too_much_is_refused_with_the_limit(served, what):
    path, body, sentence = TOO_MUCH[what]
    with Watched(*served) as watched:
        status, said = post(served[0], path, body)
    assert status == (413 if what == "a body" else 400)
    assert sentence in said
    assert len(said) < 400
    assert watched.slowest < 1
    assert watched.grown < 100


HALF = "\ud800"
SURROGATES = [
    (COMPLETIONS, {"prompt": HALF}),
    (COMPLETIONS, {"prompt": ["a", f"b{HALF}c"]}),
    *((COMPLETIONS, {"prompt": "a", name: HALF}) for name in ("stop", "model", "user", "seed", "suffix", HALF)),
    (COMPLETIONS, {"prompt": "a", "stop": ["b", HALF]}),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {HALF: 1}}),
    (COMPLETIONS, {"prompt": "a", "metadata": {"b": HALF}}),
    (CHAT, user(HALF)),
    (CHAT, user([{"type": "text", "text": HALF}])),
    (CHAT, {"messages": [{"role": HALF, "content": "a"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "a", "name": HALF}]}),
    (CHAT, {**user("a"), "tools": [{"type": "function", "function": {"name": HALF}}]}),
    (
        CHAT,
        {**user("a"), "tools": [{"type": "function", "function": {"name": "f"}}], "chat_template_kwargs": {"b": HALF}},
    ),
    *((RESPONSES, {"input": "a", name: HALF}) for name in ("input", "instructions", "model", "user")),
    (RESPONSES, {"input": "a", "chat_template_kwargs": {HALF: 1}}),
    (RESPONSES, {"input": "a", "metadata": {HALF: 1}}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), SURROGATES)
def test_half_of_a_surrogate_pair_is_a_400_in_every_field(served, path, body, stream):
    status, said = post(served[0], path, {**body, "stream": stream})
    assert status == 400
    assert "half of a surrogate pair is no text" in said


def test_an_emoji_is_no_half(served):
    status, answer = post(
        served[0], COMPLETIONS, {"prompt": "\N{GRINNING FACE}", "max_tokens": 2, "stop": "\N{GRINNING FACE}"}
    )
    assert status == 200
    assert answer["usage"]["prompt_tokens"] > 1


def test_a_short_request_beside_one_for_many_answers(served):
    port, _ = served
    many = {"prompt": WORDS * 8, "n": 128, "max_tokens": 400}
    raw = json.dumps(many).encode()
    connections = []
    for _ in range(3):
        connections.append(http.client.HTTPConnection("127.0.0.1", port))
        connections[-1].request("POST", COMPLETIONS, raw)
    time.sleep(1)
    with Watched(*served) as watched:
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            body = {"prompt": "import os", "max_tokens": 4}
            answers = [answer.result()[0] for answer in [pool.submit(post, port, COMPLETIONS, body) for _ in range(2)]]
        taken = time.monotonic() - began
    for connection in connections:
        connection.close()
    assert answers == [200, 200]
    assert taken < 10
    assert watched.slowest < 1


def test_clients_that_never_end_their_bodies_stop_nobody(served):
    port, _ = served
    waiting = []
    for _ in range(300):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", COMPLETIONS, b'{"', {"Content-Length": "100"})
        waiting.append(connection)
    assert post(port, COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200
    for connection in waiting:
        connection.close()


def test_requests_beyond_those_that_the_server_works_on(served):
    port, _ = served
    waiting = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(270)]
    for connection in waiting:
        connection.request("POST", COMPLETIONS, json.dumps({"prompt": WORDS, "max_tokens": 600}))
    time.sleep(2)
    status, said = post(port, COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    assert (status, said) == (503, "the server works on 256 requests; ask again later")
    assert get(port, "/health") == 200
    for connection in waiting:
        connection.close()
    for _ in range(50):
        if (status := post(port, COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0]) == 200:
            break
        time.sleep(0.1)
    assert status == 200
