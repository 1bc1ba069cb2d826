"""`rope-patch demo-chat`: what its page asks for, and what it gets."""

from __future__ import annotations

import json
import re
import socket
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from rope_patch import patch
from rope_patch.cli import main
from rope_patch.cli.demo_chat import Options, load_demo
from rope_patch.cli.options import parse
from rope_patch.errors import AlreadyPatched, EvaluationError
from rope_patch.saving.loading import default_checkpoint
from rope_patch.serving import demo
from rope_patch.shipped import recipes_folder

L, NEW = 256, 24
TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }} #\n{% endfor %}"
TEXT = "".join(f"def value_{i}(x):\n    return x + {i}\n\n" for i in range(40))
QUESTION = "def value_3(x):"


def asked_of(*words):
    return TestClient(load_demo(parse(Options, [*words, "--max-tokens", str(NEW)])).application())


@pytest.fixture(scope="module")
def client():
    with asked_of() as client:
        yield client


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A folder with a chat template that was saved under a scheme."""
    folder = tmp_path_factory.mktemp("chat")
    model, tokenizer = parts()
    patch(model, "self_extend:group_size=8,window=64")
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with asked_of(str(folder)) as client:
        yield client


def parts():
    return AutoModelForCausalLM.from_pretrained(default_checkpoint()), AutoTokenizer.from_pretrained(
        default_checkpoint()
    )


def prompt_of(client, document=TEXT, question=QUESTION, **fields):
    return client.post("/prompt", json={"document": document, "question": question, **fields})


def completed(client, path, ids):
    answer = client.post(f"/{path}/v1/completions", json={"prompt": ids, "max_tokens": NEW})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@torch.no_grad()
def generated(ids, scheme=None):
    model, tokenizer = parts()
    if scheme is not None:
        patch(model, scheme)
    found = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    return tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True)


def test_the_page_asks_nobody_else_and_writes_no_html(client):
    answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    page = answer.text
    assert "connect-src 'self'" in page
    assert not re.search(r"https?://|src=|@import|url\(", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", page)


def test_the_page_hears_what_the_model_is(client):
    about = client.get("/about").json()
    assert about == {
        "model": "tiny-llama",
        "scheme": "rerope:window=128+logn",
        "trained": L,
        "limit": 4 * L,
        "readable": 4 * L,
        "max_tokens": NEW,
        "characters": 16 * 4 * L,
        "chat": False,
    }
    assert client.get("/health").status_code == 200


def test_both_models_answer_as_generate_does(client):
    ids = prompt_of(client).json()["prompt"]
    assert len(ids) > 2 * L
    patched, plain = completed(client, "patched", ids), completed(client, "plain", ids)
    assert patched == generated(ids, "rerope:window=128+logn")
    assert plain == generated(ids)
    assert patched != plain


def test_an_answer_is_streamed_with_its_number_of_tokens(client):
    ids = prompt_of(client).json()["prompt"]
    body = {"prompt": ids, "max_tokens": NEW, "stream": True, "stream_options": {"include_usage": True}}
    lines = client.post("/patched/v1/completions", json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert len(events) > 5
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == completed(client, "patched", ids)
    assert events[-1]["usage"]["prompt_tokens"] == len(ids)
    assert events[-1]["usage"]["completion_tokens"] <= NEW


def test_without_a_template_the_text_and_the_question_are_continued(client):
    tokenizer = parts()[1]
    found = prompt_of(client, f"\n{TEXT}\n", f" {QUESTION} ").json()
    assert tokenizer.decode(found["prompt"]) == f"{TEXT.strip()}\n\n{QUESTION}"
    assert tokenizer.decode(prompt_of(client, "a = 1", "").json()["prompt"]) == "a = 1"


@pytest.mark.parametrize("new", [8, 100])
def test_truncated_text_and_its_answer_fill_the_training_length(client, new):
    found = prompt_of(client, max_tokens=new).json()
    truncated = found["truncated"]
    assert L - new - 4 <= len(truncated) <= L - new
    assert found["prompt"][-len(truncated) + 2 :] == truncated[2:]  # where it was cut, a word may be read otherwise


def test_what_fits_is_not_truncated(client):
    tokens = len(prompt_of(client, "a = 1", "b").json()["prompt"])
    whole = prompt_of(client, "a = 1", "b", max_tokens=L - tokens).json()
    assert whole["truncated"] is None
    assert "nothing is cut" in whole["note"]
    assert len(prompt_of(client, "a = 1", "b", max_tokens=L - tokens + 1).json()["truncated"]) < tokens


@pytest.mark.parametrize(("question", "new"), [(QUESTION * 40, NEW), (QUESTION, 250), ("", 2 * L)])
def test_where_no_text_fits_into_the_training_length_the_others_still_answer(client, question, new):
    found = prompt_of(client, TEXT[:600], question, max_tokens=new).json()
    assert found["truncated"] is None
    assert found["note"] == f"The question and an answer of {new} tokens leave no room for text within L = {L}."
    assert found["prompt"]


def test_a_chat_is_one_message_and_keeps_its_template_when_truncated(chat):
    tokenizer = parts()[1]
    found = prompt_of(chat).json()
    assert tokenizer.decode(found["prompt"]) == f"# user: {TEXT.strip()}\n\n{QUESTION} #\n"
    truncated = tokenizer.decode(found["truncated"])
    assert truncated.startswith("# user: ")
    assert truncated.endswith(f"\n\n{QUESTION} #\n")
    assert truncated.removeprefix("# user: ")[2:] in tokenizer.decode(found["prompt"])
    assert len(found["truncated"]) <= L - NEW


def test_a_chat_model_may_continue_a_text_instead(chat, client):
    found, expected = prompt_of(chat, chat=False).json(), prompt_of(client).json()
    assert found["prompt"] == expected["prompt"]
    assert prompt_of(chat, chat=True).json() == prompt_of(chat).json() != found
    truncated = parts()[1].decode(found["truncated"])
    assert truncated.endswith(f"\n\n{QUESTION}")
    assert "# user" not in truncated


def test_a_folder_answers_under_its_own_scheme_and_without_it(chat):
    about = chat.get("/about").json()
    assert about["chat"]
    assert about["scheme"].startswith("self_extend:")
    ids = prompt_of(chat).json()["prompt"]
    assert completed(chat, "patched", ids) == generated(ids, "self_extend:group_size=8,window=64")
    assert completed(chat, "plain", ids) == generated(ids)


@pytest.mark.parametrize("which", ["client", "chat"])
def test_an_example_is_twice_as_long_as_training_with_its_answer_at_the_far_end(which, request):
    client = request.getfixturevalue(which)
    example = client.post("/example", json={}).json()
    found = prompt_of(client, **example).json()
    assert 2 * L - NEW - 2 * demo.SLACK <= len(found["prompt"]) <= 2 * L - NEW
    far = "71432 is the pass key" if which == "chat" else "marigold"
    assert far in example["document"][:400]
    assert far not in parts()[1].decode(found["truncated"])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"document": ""}, "the text is empty: paste one, or fill in the example"),
        ({"document": " \n "}, "the text is empty"),
        (
            {"document": TEXT * 4, "max_tokens": NEW},
            f" + {NEW} tokens exceed the limit of {4 * L}; shorten the prompt or raise --max-length",
        ),
        ({"document": " " * 17000 + "a"}, "17001 characters; at most 16384 are allowed"),
        ({"max_tokens": 0}, "max_tokens=0: Input should be greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"document": 3}, "document=3: Input should be a valid string"),
        ({"chat": True}, "chat=true: this checkpoint has no chat template; leave chat out"),
        ({"chat": "perhaps"}, "chat='perhaps'"),
        ({"documents": "a"}, "documents='a': Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_asked_is_a_400_that_says_why(client, fields, sentence):
    answer = prompt_of(client, **fields)
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]


def test_a_pasted_book_is_refused_before_it_is_read(client):
    answer = prompt_of(client, "a" * 10**5)
    assert answer.status_code == 400
    assert "the body has" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("words", "scheme", "limit"),
    [
        (["--scheme", "yarn:factor=2"], "yarn:factor=2", 2 * L),
        (["--scheme", "yarn:target=auto"], "yarn:target=auto", 4 * L),
        (["--scheme", "yarn:target=auto", "--max-length", "3x"], "yarn:target=auto", 3 * L),
        (["--max-length", "700"], "rerope:window=128+logn", 700),
    ],
)
def test_the_longest_request_is_what_the_scheme_reaches(words, scheme, limit):
    from rope_patch.cli.options import in_tokens

    found = load_demo(in_tokens(parse(Options, words)))
    assert (found.scheme, found.limit, found.trained) == (scheme, limit, L)
    assert found.patched.max_tokens == L // 4


def test_a_model_with_a_table_of_positions_reads_no_further_without_a_scheme(tmp_path):
    tokenizer = parts()[1]
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=1, n_head=2, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with asked_of(str(tmp_path)) as client:
        about = client.get("/about").json()
        assert (about["scheme"], about["limit"], about["readable"]) == ("hierarchical", 256, 64)
        found = prompt_of(client, TEXT[:400]).json()
        assert len(found["prompt"]) > 64
        completed(client, "patched", found["prompt"])
        completed(client, "plain", found["truncated"])
        refused = client.post("/plain/v1/completions", json={"prompt": found["prompt"], "max_tokens": NEW})
        assert refused.status_code == 400


def test_models_that_answer_elsewhere_are_refused(tmp_path):
    with pytest.raises(EvaluationError, match="name a scheme; the page always shows the plain model, too"):
        load_demo(parse(Options, ["--scheme", "plain"]))
    with pytest.raises(EvaluationError, match="T5ForConditionalGeneration is not served: it has an encoder"):
        load_demo(parse(Options, [str(recipes_folder() / "assets" / "tiny-t5")]))
    with pytest.raises(EvaluationError, match=r"fox.* is not served"):
        load_demo(parse(Options, ["--scheme", "fox"]))
    model, tokenizer = parts()
    patch(model, "pi:factor=2")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(AlreadyPatched):
        load_demo(parse(Options, [str(tmp_path), "--scheme", "pi:factor=4"]))


def test_a_cache_that_does_not_fit_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10 * 2**30))
    each = 6 * 2 * 4 * 64 * 4  # layers, keys and values, heads, their width, bytes
    most = 10 * 2**30 // each
    load_demo(parse(Options, ["--max-length", str(most // 2), "--device", "cpu"]))
    words = (
        f"the cache for {2 * (most // 2 + 1)} tokens takes 10.0 GiB, and 10.0 GiB are free; pass a lower --max-length"
    )
    with pytest.raises(EvaluationError, match=re.escape(words)):
        load_demo(parse(Options, ["--max-length", str(most // 2 + 1), "--device", "cpu"]))
    for command in (["serve", default_checkpoint()], ["demo-chat"]):
        assert main([*command, "--max-length", "2000000", "--device", "cpu", "--port", "0"]) == 2
        assert "GiB are free; pass a lower --max-length" in capsys.readouterr().err


def test_a_port_is_checked_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr("rope_patch.cli.demo_chat.load_demo", lambda _: pytest.fail("a model is loaded"))
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for command in (["demo-chat"], ["serve", default_checkpoint()]):
            assert main([*command, "--port", str(port)]) == 2
            assert f"--port {port} is taken: end the program that listens there, or pass" in capsys.readouterr().err
    assert main(["demo-chat", "--port", "70000"]) == 2
    assert "--port 70000: 0 to 65535 are allowed" in capsys.readouterr().err
    assert main(["demo-chat", "--host", "no such host"]) == 2
    assert "--host no such host: " in capsys.readouterr().err
    assert main(["demo-chat", "--max-tokens", "0"]) == 2
    assert "--max-tokens 0: at least 1 is allowed" in capsys.readouterr().err
