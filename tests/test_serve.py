"""`rope-patch serve`: a real process, asked by the client of OpenAI."""

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch import RopePatchWarning, patch
from rope_patch.cli import main
from rope_patch.saving.loading import default_checkpoint

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

SCHEME = "rerope:window=64+logn"
LIMIT = 700
NEW = 12
DEFAULT = 90


TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"


@contextlib.contextmanager
def server(folder, *words):
    """The address of a server that answers, and its process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "rope_patch.cli", "serve", str(folder), "--port", str(port), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ}, text=True)
    try:
        for _ in range(1200):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://localhost:{port}/health") as answer:
                assert answer.status == 200
                break
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.1)
        yield f"http://localhost:{port}/v1", process
    finally:
        process.kill()
        process.wait()


def client_of(address):
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def patched():
    model = AutoModelForCausalLM.from_pretrained(default_checkpoint())
    tokenizer = AutoTokenizer.from_pretrained(default_checkpoint())
    tokenizer.chat_template = TEMPLATE
    patch(model, SCHEME)
    return model, tokenizer


@pytest.fixture(scope="module")
def folder(patched, tmp_path_factory):
    """A checkpoint that was saved under the scheme."""
    folder = tmp_path_factory.mktemp("saved")
    for part in patched:
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def client(folder):
    with server(folder, "--max-length", str(LIMIT), "--max-tokens", str(DEFAULT)) as (address, _):
        yield client_of(address)


@pytest.fixture(scope="module")
def alone(patched):
    """What `generate` gives to a prompt."""
    model, tokenizer = patched

    def generate(prompt, new=NEW):
        ids = tokenizer(prompt, return_tensors="pt")
        found = model.generate(**ids, max_new_tokens=new, do_sample=False)
        return tokenizer.decode(found[0, ids.input_ids.shape[1] :], skip_special_tokens=True)

    with torch.no_grad():
        yield generate


TEXT = "".join(f"def value_{i}(x):\n    return x + {i}\n\n" for i in range(60))
PROMPTS = [TEXT[:1], TEXT[:40], TEXT[:400], TEXT[:1200], "import os\nimport "]


def complete(client, prompt, **settings):
    model = client.models.list().data[0].id
    return client.completions.create(**{"model": model, "prompt": prompt, "max_tokens": NEW, **settings})


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_is_what_generate_gives(client, alone, prompt):
    assert complete(client, prompt).choices[0].text == alone(prompt)


def test_a_prompt_beyond_the_training_length(client, alone):
    answer = complete(client, TEXT[:1200])
    assert answer.usage.prompt_tokens > 256
    assert answer.choices[0].finish_reason == "length"


def test_a_streamed_completion(client, alone):
    parts = [chunk.choices[0].text for chunk in complete(client, PROMPTS[3], stream=True)]
    assert len(parts) > 3
    assert "".join(parts) == alone(PROMPTS[3])


def test_several_clients_at_once(client, alone):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = [answer.choices[0].text for answer in pool.map(lambda p: complete(client, p), PROMPTS * 3)]
    assert texts == [alone(prompt) for prompt in PROMPTS] * 3


@pytest.mark.parametrize("prompt", [TEXT[:40], TEXT[:1500]])
def test_without_max_tokens_an_answer_has_a_default_limit(client, prompt):
    answer = complete(client, prompt, max_tokens=None)
    allowed = min(DEFAULT, LIMIT - answer.usage.prompt_tokens)
    assert answer.usage.completion_tokens == allowed or answer.choices[0].finish_reason == "stop"


def test_a_client_that_hangs_up_disturbs_nobody(client, alone):
    stream = complete(client, PROMPTS[2], stream=True, max_tokens=400)
    next(iter(stream))
    stream.close()
    assert complete(client, PROMPTS[1]).choices[0].text == alone(PROMPTS[1])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"max_tokens": LIMIT},
            f" + {LIMIT} tokens exceed the limit of {LIMIT}; lower max_tokens or raise --max-length",
        ),
        (
            {"prompt": TEXT * 2},
            f" + {NEW} tokens exceed the limit of {LIMIT}; shorten the prompt or raise --max-length",
        ),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**6]}, "ids beyond the vocabulary"),
        ({"prompt": [[1, 2], [-1]]}, "ids beyond the vocabulary"),
        ({"prompt": 3}, "prompt"),
        ({"temperature": 3}, "temperature=3: Input should be less than or equal to 2"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0}, "top_p=0: Input should be greater than 0"),
        ({"n": 0}, "n=0: Input should be greater than or equal to 1"),
        ({"best_of": 3}, "best_of=3 is not served"),
        ({"logprobs": 21}, "logprobs=21: Input should be less than or equal to 20"),
        ({"echo": True}, "echo=True is not served"),
        ({"logit_bias": {"5": 1}}, "logit_bias={'5': 1} is not served"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not served"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5 is not served"),
        ({"max_tokens": 0}, "max_tokens=0: Input should be greater than or equal to 1"),
        ({"max_tokens": -3}, "max_tokens=-3"),
        ({"max_tokens": "many"}, "max_tokens='many': Input should be a valid integer"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"stop": 3}, "stop"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"stream_options": {"bits": True}}, "stream_options.bits"),
        ({"extra_body": {"generation_config": "{}"}}, "generation_config='{}'"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field=1: Extra inputs are not permitted"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_a_400(client, settings, sentence, stream):
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(client, **{"prompt": "import os", "stream": stream, **settings})
    assert sentence in refusal.value.body["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(client, alone, folder, stream):
    messages = [{"role": "user", "content": "import os"}]
    answer = client.chat.completions.create(model=str(folder), messages=messages, max_tokens=NEW, stream=stream)
    expected = alone("# user: import os\n")
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == expected
    else:
        assert answer.choices[0].message.content == expected


def chat(client, messages, **settings):
    model = client.models.list().data[0].id
    return client.chat.completions.create(**{"model": model, "messages": messages, "max_tokens": NEW, **settings})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"top_logprobs": 30, "logprobs": True}, "top_logprobs=30"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "n": 2}, "n=2 is not served"),
        ({"response_format": {"type": "json_object"}}, "response_format={'type': 'json_object'} is not served"),
        ({"messages": []}, ""),
        ({"messages": [{"content": "a"}]}, "messages.0.role"),
        ({"messages": "hello"}, "messages='hello': Input should be a valid list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content=[{'type': 'image_url'}]",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_chat_cannot_have_is_a_400(client, settings, sentence, stream):
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, **{"messages": [{"role": "user", "content": "a"}], "stream": stream, **settings})
    assert sentence in refusal.value.body["message"]


def test_fields_that_ask_for_nothing_are_fine(client, alone):
    nothing = {
        "tools": [],
        "n": 1,
        "logprobs": False,
        "user": "me",
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "response_format": {"type": "text"},
    }
    answer = chat(client, [{"role": "user", "content": "import os"}], **nothing)
    assert answer.choices[0].message.content == alone("# user: import os\n")
    assert complete(client, PROMPTS[1], n=1, best_of=1, echo=False, logprobs=None).choices[0].text == alone(PROMPTS[1])


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"{}", b'{"prompt": null}'])
def test_a_body_that_is_no_request_is_a_400_with_the_reason(client, body):
    url, kind = f"{client.base_url}completions", {"Content-Type": "application/json"}
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=60)
    assert refusal.value.code == 400
    assert json.load(refusal.value)["error"]["message"]


def test_an_unknown_model_is_a_404(client, folder):
    with pytest.raises(openai.NotFoundError, match=r"only .* is served"):
        complete(client, "a", model="gpt-4")
    assert client.models.list().data[0].id == folder.name  # and not where it lies
    assert complete(client, PROMPTS[1], model=str(folder)).model == folder.name


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_string(client, alone, stream):
    whole = alone(PROMPTS[3])
    stop = whole[5:9]  # begins within a token, and its parts come one after the other
    answer = complete(client, PROMPTS[3], stop=[stop, "never"], stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == whole[: whole.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


def test_draws_follow_the_seed_and_nothing_else(client):
    def drawn(seed, **settings):
        return complete(client, PROMPTS[2], temperature=1.5, seed=seed, **settings).choices[0].text

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        crowded = list(pool.map(drawn, range(6)))
    assert crowded == [drawn(seed) for seed in range(6)]
    assert len(set(crowded)) > 3
    several = complete(client, PROMPTS[2], temperature=1.5, seed=0, n=3)
    assert [choice.text for choice in several.choices] == crowded[:3]
    assert drawn(3, top_p=1e-6) == complete(client, PROMPTS[2]).choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_as_texts_and_as_ids(client, alone, patched, stream):
    _, tokenizer = patched
    for prompts in (PROMPTS[1:3], [tokenizer(prompt).input_ids for prompt in PROMPTS[1:3]]):
        answer = complete(
            client, prompts, n=2, stream=stream, stream_options={"include_usage": True} if stream else None
        )
        parts = list(answer) if stream else [answer]
        texts = [""] * 4
        for part in parts:
            for choice in part.choices:
                texts[choice.index] += choice.text
        assert texts == [alone(prompt) for prompt in PROMPTS[1:3] for _ in range(2)]
        usage = parts[-1].usage
        assert usage.prompt_tokens == sum(len(tokenizer(prompt).input_ids) for prompt in PROMPTS[1:3])
        assert usage.completion_tokens == 4 * NEW


@torch.no_grad()
def test_log_probabilities_are_those_of_the_model(client, patched):
    model, tokenizer = patched
    ids = tokenizer(PROMPTS[2], return_tensors="pt").input_ids
    generated = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    expected = model(generated).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    own = expected.gather(1, generated[0, ids.shape[1] :, None])[:, 0]
    logprobs = complete(client, PROMPTS[2], logprobs=2).choices[0].logprobs
    torch.testing.assert_close(torch.tensor(logprobs.token_logprobs), own, atol=1e-4, rtol=0)
    best = expected.topk(2).values
    for row, top in enumerate(logprobs.top_logprobs):
        assert sorted(top.values(), reverse=True) == pytest.approx(best[row].tolist(), abs=1e-4)
    assert "".join(logprobs.tokens) == tokenizer.decode(generated[0, ids.shape[1] :])
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:place])) for place in range(NEW)]


def test_log_probabilities_of_a_chat(client):
    plain = chat(client, [{"role": "user", "content": "import os"}], logprobs=True, top_logprobs=2)
    content = plain.choices[0].logprobs.content
    assert len(content) == NEW
    assert all(token.logprob == token.top_logprobs[0].logprob > token.top_logprobs[1].logprob for token in content)
    streamed = chat(client, [{"role": "user", "content": "import os"}], logprobs=True, stream=True)
    parts = [token for chunk in streamed if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [token.token for token in parts] == [token.token for token in content]


def test_a_client_that_hangs_up_unstreamed_frees_its_place(client, alone):
    with pytest.raises(openai.APITimeoutError):
        complete(client.with_options(timeout=0.2), PROMPTS[2], max_tokens=500, logprobs=20)
    assert complete(client, PROMPTS[1]).choices[0].text == alone(PROMPTS[1])


def test_a_body_that_is_too_large_and_endless_headers_are_refused(client):
    with pytest.raises(openai.APIStatusError) as refusal:
        complete(client, "a" * (17 * 2**20))
    assert refusal.value.status_code == 413
    address = urllib.parse.urlsplit(str(client.base_url))
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(OSError):  # it may answer before the last of them
            for number in range(10_000):
                connection.sendall(b"x-%d: abcdefgh\r\n" % number)
            connection.sendall(b"\r\n")
        assert b" 4" in connection.recv(64).partition(b"\r\n")[0][:12]


def test_a_checkpoint_without_a_template_under_a_scheme_until_sigterm():
    with server(default_checkpoint(), "--scheme", "yarn:factor=2", "--api-key", "none") as (address, process):
        client = client_of(address)
        assert complete(client, "import os\n").usage.completion_tokens == NEW
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="has no chat template: ask for /v1/completions"):
                chat(client, [{"role": "user", "content": "a"}], stream=stream)
        with pytest.raises(openai.BadRequestError, match="has no chat template"):
            client.responses.create(model=default_checkpoint(), input="a")
        with pytest.raises(openai.BadRequestError, match=r"\+ 512 tokens exceed the limit of 512"):
            complete(client, "import os", max_tokens=512)
        with pytest.raises(openai.AuthenticationError):
            complete(client.with_options(api_key="other"), "import os")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) in (0, -signal.SIGTERM)
        output = process.stdout.read()
    assert "under yarn:factor=2" in output
    assert "up to 512 tokens a request" in output
    assert "Traceback" not in output


@pytest.fixture(scope="module")
def by_factor(folder_without_a_scheme):
    words = ("--scheme", "yarn:target=auto", "--factors", "4,1,2", "--max-tokens", str(DEFAULT))
    with server(folder_without_a_scheme, *words) as (address, _):
        yield client_of(address)


@pytest.fixture(scope="module")
def folder_without_a_scheme(tmp_path_factory):
    """The small checkpoint with a template for chats."""
    folder = tmp_path_factory.mktemp("plain")
    shutil.copytree(default_checkpoint(), folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def under():
    """The greedy ids and their log-probabilities for a prompt of ids, by a model patched with one factor."""
    models = {}

    @torch.no_grad()
    def score(ids, factor):
        if factor not in models:
            models[factor] = AutoModelForCausalLM.from_pretrained(default_checkpoint(), dtype=torch.float32)
            patch(models[factor], "yarn", factor=factor)
        row = models[factor].generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
        found = models[factor](row).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        return found.gather(1, row[0, len(ids) :, None])[:, 0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RopePatchWarning)  # a factor of 1 changes nothing
        yield score


def test_requests_of_three_lengths_in_turn_run_under_the_smallest_factor_that_covers_them(by_factor, under, patched):
    ids = patched[1](TEXT).input_ids
    lengths = [256 - NEW, 256 - NEW + 1, 512 - NEW, 600, 40, 1024 - NEW] * 2
    with concurrent.futures.ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(pool.map(lambda n: complete(by_factor, ids[:n], logprobs=0), lengths))
    factors = {length: 1 if length + NEW <= 256 else 2 if length + NEW <= 512 else 4 for length in lengths}
    expected = {length: under(ids[:length], factor) for length, factor in factors.items()}
    for length, answer in zip(lengths, answers, strict=True):
        found = torch.tensor(answer.choices[0].logprobs.token_logprobs)
        torch.testing.assert_close(found, expected[length], atol=1e-4, rtol=0)
    for length in (40, 600):  # factors are told apart by this tolerance
        assert (under(ids[:length], 2) - expected[length]).abs().max() > 1e-3


@pytest.mark.parametrize("body", [{"rope_factor": 4}, {"vllm_xargs": {"rope_factor": 4}}, {"rope_factor": 4.0}])
def test_a_request_runs_under_the_factor_that_it_asks_for(by_factor, under, patched, body):
    ids = patched[1](TEXT).input_ids[:200]
    answer = complete(by_factor, ids, logprobs=0, extra_body=body)
    found = torch.tensor(answer.choices[0].logprobs.token_logprobs)
    torch.testing.assert_close(found, under(ids, 4), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rope_factor": 3}, "rope_factor=3: 1, 2, 4 are allowed"),
        ({"rope_factor": 1.5}, "rope_factor=1.5: 1, 2, 4 are allowed"),
        ({"rope_factor": True}, "rope_factor=True: Input should be a valid number"),
        ({"rope_factor": "4"}, "rope_factor='4': Input should be a valid number"),
        ({"vllm_xargs": {"rope_factor": 0}}, "rope_factor=0: 1, 2, 4 are allowed"),
        ({"vllm_xargs": {"other": 1}}, "vllm_xargs.other=1: Extra inputs are not permitted"),
        ({"vllm_xargs": {"rope_factor": 2}, "rope_factor": 4}, "one is allowed"),
        ({"rope_factor": 1, "prompt": TEXT[:1500]}, "exceed the limit of 256 under rope_factor=1"),
        ({"max_tokens": 1025}, "+ 1025 tokens exceed the limit of 1024"),
    ],
)
def test_a_factor_that_a_request_cannot_have_is_a_400(by_factor, settings, sentence):
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(by_factor, TEXT[:40], extra_body=settings)
    assert sentence in refusal.value.body["message"]


def test_a_server_without_factors_takes_none(client):
    with pytest.raises(openai.BadRequestError, match="rope_factor=2 is not served: all requests run under one scheme"):
        complete(client, "a", extra_body={"rope_factor": 2})


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_drawn_as_the_request_has_it(by_factor, stream):
    def text(**settings):
        words = {"model": by_factor.models.list().data[0].id, "input": TEXT[:100], "max_output_tokens": NEW}
        found = by_factor.responses.create(**words, stream=stream, **settings)
        if not stream:
            return found.output_text
        return "".join(event.delta for event in found if event.type == "response.output_text.delta")

    drawn = [text(temperature=1.5, extra_body={"seed": seed}) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert text() == text(temperature=0) == text(temperature=1.5, top_p=1e-6) != drawn[0]
    for wrong in ({"temperature": 3}, {"extra_body": {"rope_factor": 3}}, {"extra_body": {"stop": "a"}}):
        with pytest.raises(openai.BadRequestError):
            text(**wrong)


def test_a_chat_with_tools_is_drawn_as_the_request_has_it(by_factor):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

    def text(**settings):
        found = chat(by_factor, [{"role": "user", "content": "import os"}], tools=tools, **settings)
        return found.choices[0].message.content

    assert text() == text(temperature=0) != text(temperature=1.5, seed=3) == text(temperature=1.5, seed=3)
    with pytest.raises(openai.BadRequestError, match="stop='a' is not served"):
        text(stop="a")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--factors", "1,2"], "factors for requests need a scheme with target=auto, such as yarn:target=auto"),
        (["--scheme", "yarn:factor=2", "--factors", "1,2"], "factors for requests need a scheme with target=auto"),
        (["--scheme", "yarn:target=auto", "--factors", "0,2"], "different whole numbers from 1 are allowed"),
        (["--scheme", "yarn:target=auto", "--factors", "2,2"], "different whole numbers from 1 are allowed"),
        (["--scheme", "rerope:target=auto", "--factors", "1,2"], "is the same under every factor"),
        (["--scheme", "yarn:target=auto", "--factors", "1,2", "--max-length", "600"], "the factors reach 512 tokens"),
        (["--scheme", "rerop:window=8"], "rerope"),
        (["--scheme", "fox"], "is not served: a paged cache cannot keep"),
        (["--max-length", "0"], "--max-length 0: at least 1 is allowed"),
        (["--temperature", "-1"], "--temperature -1.0: at least 0 is allowed"),
    ],
)
def test_wrong_options_end_in_one_line(words, sentence, capsys):
    assert main(["serve", default_checkpoint(), *words]) == 2
    *warned, refused = capsys.readouterr().err.splitlines()
    assert sentence in refused
    assert all(line.startswith("rope-patch: fox replaces") for line in warned)
