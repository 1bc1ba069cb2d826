"""The page of `rope-patch demo-chat` in a real browser: three answers, stop, errors, a phone, light and dark."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from rope_patch.cli.demo_chat import Options, load_demo
from rope_patch.cli.options import parse
from tests.browser import CHROMIUM, browser
from tests.serving.test_demo import TEMPLATE, parts

pytest.importorskip("fastapi")
pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to open the page"),
]

NEW = 24


@contextlib.contextmanager
def served(*given):
    """The address of the page with these arguments of `rope-patch demo-chat`."""
    application = load_demo(parse(Options, [*given, "--max-tokens", str(NEW)])).application()
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def address():
    with served() as page:
        yield page


@pytest.fixture(scope="module")
def chromium():
    with browser() as page:
        yield page


@pytest.fixture
def page(chromium, address):
    chromium.theme("light")
    chromium.resize(1280)
    chromium.open(address)
    until(chromium, "about !== null")
    chromium.errors.clear()
    chromium.requests.clear()
    yield chromium
    assert all(url.startswith(address) for url in chromium.requests)


def until(page, condition, seconds=120):
    end = time.monotonic() + seconds
    while not page(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def text_of(page, selector):
    return page(f"document.querySelector({selector!r}).textContent")


def fill_in(page):
    page.point("#example", 0.5, 0.5, click=True)
    until(page, "document.getElementById('document').value.length > 500")


def ask(page):
    page.point("#ask", 0.5, 0.5, click=True)
    until(page, "running === null")


def test_three_answers_come_one_after_the_other(page):
    assert "tiny-llama was trained on L = 256 tokens" in text_of(page, "#about")
    assert "no chat template" in text_of(page, "#hint")
    fill_in(page)
    ask(page)
    assert not page.errors
    assert text_of(page, "#wrong") == ""
    assert text_of(page, "#status").endswith("Done.")
    answers = {name: text_of(page, f".{name} .text") for name in ("patched", "plain", "truncated")}
    assert len(set(answers.values())) == 3
    assert "secret" in answers["patched"]  # it stands 1.7 L back
    for name, tokens in {"patched": "1.", "plain": "1.", "truncated": "0."}.items():
        cost = text_of(page, f".{name} .cost")
        assert f"tokens of prompt, {tokens}" in cost
        assert f"{NEW} of answer" in cost
        assert "first token after " in cost
    assert "never trained" in page("document.querySelector('.plain svg').getAttribute('aria-label')")


def test_a_chat_model_is_asked_in_its_template_or_continues_a_text(chromium, tmp_path):
    model, tokenizer = parts()
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with served(str(tmp_path)) as address:
        chromium.open(address)
        until(chromium, "about !== null")
        assert text_of(chromium, "#asked") == "Question"
        fill_in(chromium)
        assert not chromium("document.getElementById('chat').checked")  # the example is a text to continue
        assert text_of(chromium, "#asked") == "How the text goes on"
        ask(chromium)
        lengths = [text_of(chromium, ".patched .cost")]
        chromium.point("#chat", 0.5, 0.5, click=True)
        assert text_of(chromium, "#hint") == "The question is put behind the text."
        ask(chromium)
        assert text_of(chromium, ".patched .cost").partition(" tokens")[0] != lengths[0].partition(" tokens")[0]
        assert text_of(chromium, "#status").endswith("Done.")


def test_a_stopped_answer_leaves_the_page_ready(page):
    fill_in(page)
    page.type("#tokens", "240")
    page.point("#ask", 0.5, 0.5, click=True)
    until(page, "!document.querySelector('.patched .text').classList.contains('empty')")
    assert page("document.getElementById('ask').disabled")
    page.point("#stop", 0.5, 0.5, click=True)
    until(page, "running === null")
    assert text_of(page, "#status") == "Stopped."
    assert "stopped after" in text_of(page, ".patched .cost")
    assert text_of(page, ".plain .text") == "No answer yet."
    page.type("#tokens", str(NEW))
    ask(page)
    assert text_of(page, "#status").endswith("Done.")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "The text is empty"),
        ("a" * 20000, "The text has 20,000 characters; this server reads 1,024 tokens at most"),
        ("x = 1\n" * 400, "exceed the limit of 1024; shorten the prompt or raise --max-length"),
    ],
)
def test_what_cannot_be_asked_is_said(page, text, sentence):
    page.type("#document", text)
    page.point("#ask", 0.5, 0.5, click=True)
    until(page, "running === null && document.getElementById('wrong').textContent")
    assert sentence in text_of(page, "#wrong")
    assert text_of(page, ".patched .text") == "No answer yet."


def test_a_short_text_is_not_truncated(page):
    page.type("#document", "import os")
    page.type("#question", "import sys")
    ask(page)
    assert "nothing is cut" in text_of(page, ".truncated .text")
    assert text_of(page, ".patched .cost") != ""


def test_a_server_that_went_away_is_named(page):
    page.type("#document", "import os")
    page("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    ask(page)
    assert "The server does not answer; look at the terminal" in text_of(page, "#wrong")


def test_an_answer_that_fails_keeps_its_text_and_lets_the_others_come(page):
    page.type("#document", "import os")
    page(HALF_AN_ANSWER)
    ask(page)
    assert text_of(page, ".patched .text") == "half"
    assert text_of(page, ".patched .cost").endswith(": the server failed on this request")
    assert "first token after" in text_of(page, ".plain .cost")


def test_no_text_becomes_html(page):
    page("say(ANSWERS.plain.card, '<b id=\"evil\">x</b>', false)")
    page("complain('<b id=\"evil\">x</b>')")
    assert page("document.getElementById('evil')") is None
    assert text_of(page, ".plain .text") == '<b id="evil">x</b>'


def test_the_keyboard_reaches_everything_in_order(page):
    page.focus("#document")
    order = ["document"]
    for _ in range(4):
        page.press("Tab")
        order.append(page("document.activeElement.id"))
    assert order == ["document", "question", "tokens", "ask", "example"]
    assert page("[...document.querySelectorAll('textarea, input')].every((control) => control.labels.length === 1)")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_fits_and_is_legible(page, theme, width):
    page.theme(theme)
    page.resize(width, mobile=width < 1000)
    fill_in(page)
    assert page("document.documentElement.scrollWidth") == width
    low = page(CONTRASTS)
    assert not low


HALF_AN_ANSWER = """{
  const real = window.fetch;
  const events = [{choices: [{text: "half"}]}, {error: {message: "the server failed on this request"}}];
  const body = events.map((event) => `data: ${JSON.stringify(event)}\\n\\n`).join("");
  window.fetch = async (path, ...rest) => path.startsWith("patched") ? new Response(body) : real(path, ...rest);
}"""

CONTRASTS = """(() => {
  const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const ground = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? ground(element.parentElement) : colour;
  };
  const texts = "h1, h1 span, h2, p, label, button:enabled, textarea, input, .text, .cost, .note";
  return [...document.querySelectorAll(texts)]
    .map((element) => [element, light(getComputedStyle(element).color), light(ground(element))])
    .filter(([, ink, paper]) => (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05) < 4.5)
    .map(([element]) => element.outerHTML.slice(0, 80));
})()"""
"""Texts of less contrast than WCAG 2.2 asks for (1.4.3: 4.5 to 1)."""
