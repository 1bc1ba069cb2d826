"""`rope-patch serve`: a real process, asked by the client of OpenAI."""

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch import patch
from rope_patch.evaluation.checkpoints import default_checkpoint

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

SCHEME = "rerope:window=64+logn"
LIMIT = 700
NEW = 12


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
    with server(folder, "--max-length", str(LIMIT)) as (address, _):
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


def test_without_max_tokens_the_limit_is_used(client):
    answer = complete(client, TEXT[:1500], max_tokens=None)
    assert answer.usage.total_tokens == LIMIT or answer.choices[0].finish_reason == "stop"


def test_a_client_that_hangs_up_disturbs_nobody(client, alone):
    stream = complete(client, PROMPTS[2], stream=True, max_tokens=400)
    next(iter(stream))
    stream.close()
    assert complete(client, PROMPTS[1]).choices[0].text == alone(PROMPTS[1])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_tokens": LIMIT}, f"and max_tokens={LIMIT}: {LIMIT} tokens of prompt and answer are allowed"),
        ({"prompt": TEXT * 2}, f"{LIMIT} tokens of prompt and answer are allowed"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"temperature": 0.7}, "temperature=0.7: this server was started with 0.0 for all requests"),
        ({"stop": ["\n"]}, "knows no stop strings"),
        ({"model": "gpt-4"}, "requested 'gpt-4'"),
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


def test_sigterm_ends_it():
    with server(default_checkpoint(), "--scheme", "yarn:factor=4") as (address, process):
        assert complete(client_of(address), "import os\n").usage.completion_tokens == NEW
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) in (0, -signal.SIGTERM)
        output = process.stdout.read()
    assert "under yarn:factor=4" in output
    assert "up to 1024 tokens a request" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--scheme", "rerop:window=8"], "rerope"),
        (["--max-length", "0"], "--max-length 0: at least 1 is allowed"),
        (["--temperature", "-1"], "--temperature -1.0: at least 0 is allowed"),
    ],
)
def test_wrong_options_end_in_one_line(words, sentence):
    command = [sys.executable, "-m", "rope_patch.cli", "serve", default_checkpoint(), *words]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2
    assert sentence in found.stderr
    assert len(found.stderr.splitlines()) == 1
