"""docs/explorer.html in a real browser: keys, mouse, sliders, copies, light and dark, a phone."""

from __future__ import annotations

import ast
import json
import math
import random
import re

import pytest

from rope_patch import get_scheme
from tests.browser import CHROMIUM, browser
from tests.explorer import checkpoint_of, distances_of, slow_angles
from tools import explorer

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to open the page"),
]

URL = explorer.PAGE.as_uri()
NAMES = [name for names in explorer.SCHEMES.values() for name in names]
COMPARED = (
    *("rope", "nope", "pi", "ntk", "yarn", "dynamic_ntk", "mrrope", "longrope"),
    *("rerope", "leaky_rerope", "self_extend", "dca", "string", "lm_infinite", "window", "dpe"),
)

PIXEL = """((cells) => {
  const canvas = byId("map-b"), size = canvas.width, context = canvas.getContext("2d");
  return [size, cells.map(([row, column]) => [...context.getImageData(column * size, row * size, 1, 1).data])];
})"""


@pytest.fixture(scope="module")
def chromium():
    with browser() as page:
        yield page


@pytest.fixture
def page(chromium):
    chromium.theme("light")
    chromium.resize(1280)
    chromium.open(URL)
    chromium.errors.clear()
    yield chromium
    assert not chromium.errors
    assert {re.sub("#.*", "", url) for url in chromium.requests} <= {URL, "about:blank"}


def scheme_of(page, side="b"):
    """The scheme that the line of Python makes, on the model that is chosen."""
    line = page(f"document.querySelector('[data-code={side}-python]').textContent")
    spec = ast.literal_eval(ast.parse(line).body[0].value.args[1])
    model = page("state.model")
    return get_scheme(spec).resolve(checkpoint_of(model)), model, page("tokens()")


def choose(page, name, side="b"):
    """By the keyboard, from the top of the list."""
    page.focus(f"[data-scheme={side}]")
    page.press("Home")
    page.press("ArrowDown", NAMES.index(name))
    assert page(f"state.{side}.name") == name


def test_the_first_screen_shows_orange_beside_rerope(page):
    assert page("[state.a.name, state.b.name, tokens() / state.model.L]") == ["rope", "rerope", 4]
    assert "56 % of the map is new" in page("byId('said-a').textContent")
    assert "Nothing is new" in page("byId('said-b').textContent")
    box = page("(({bottom}) => bottom)(byId('map-b').getBoundingClientRect())")
    assert box < 800
    scheme, model, length = scheme_of(page, "a")
    angles, known = slow_angles(scheme, model, length, length - 1, 0)
    assert f"{int((angles > known).sum())} of 64 pairs" in page("byId('said-a').textContent")


@pytest.mark.parametrize("name", COMPARED)
def test_cells_are_those_of_python_after_sliders_moved(page, name):
    choose(page, name)
    shown = "#panel-b > .fields [data-slider]"  # and not those of the closed part
    sliders = page(f"[...document.querySelectorAll('{shown}')].map((each) => each.dataset.slider)")
    for field in [field for field in sliders if field in ("factor", "window", "local_window", "chunk_size", "shift")]:
        before = page(f"document.querySelector('#panel-b [data-field={field}]').value")
        page.focus(f"#panel-b [data-slider={field}]")
        page.press("ArrowRight", 3)
        assert page(f"document.querySelector('#panel-b [data-field={field}]').value") != before
    page.focus("#length")
    page.press("ArrowRight", 5)
    scheme, model, length = scheme_of(page)
    assert length == round(4 * model["L"] * 2 ** (5 / 16))

    chance = random.Random(0)
    for _ in range(12):
        page.point("#map-b", chance.random(), chance.random())
        data = page("({...byId('readout-b').dataset})")
        m, n = int(data["m"]), int(data["n"])
        distances = distances_of(scheme, m, n)
        if not distances:
            assert math.isnan(float(data["distance"]))
            continue
        angles, known = slow_angles(scheme, model, length, m, n)
        assert min(abs(float(data["distance"]) - each) for each in distances) < 1e-9
        assert float(data["seenAs"]) == pytest.approx(float((angles / known).max()) * model["L"], rel=1e-5, abs=1e-6)

    page.focus("#map-b")
    page.press("Escape")
    cells = [(row / 40 + 0.0125, column / 40 + 0.0125) for row in range(40) for column in range(40)]
    size, colours = page(f"{PIXEL}({json.dumps(cells)})")
    for (row, column), (red, _, blue, alpha) in zip(cells, colours, strict=True):
        m, n = (math.floor((math.floor(share * size) + 0.5) * length / size) for share in (row, column))
        if not distances_of(scheme, m, n):
            assert alpha == 0
            continue
        angles, known = slow_angles(scheme, model, length, m, n)
        share = float((angles / known).max())
        if abs(share - 1) > 1e-5:
            assert (red > blue + 60 and red > 160 and blue < 110) == (share > 1), (m, n, share)


def test_every_scheme_is_drawn_and_its_line_makes_it(page):
    for name in NAMES:
        page.open(f"{URL}#a={name}&b={name}+logn&model=SmolLM2-135M")
        assert page("byId('panel-a').querySelector('.wrong').textContent") == ""
        scheme, _, _ = scheme_of(page, "a")
        assert scheme.name == name
        both, _, _ = scheme_of(page, "b")
        assert [part.name for part in both.parts()] == ([name] if name in ("logn", "ssmax") else [name, "logn"])
        for chart in ("angles", "waves", "score"):
            assert "NaN" not in page(f"byId('{chart}-a').innerHTML"), (name, chart)


def test_both_texts_are_copied(page):
    page.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    choose(page, "yarn", "a")
    page.point("[data-copy=a-python]", 0.5, 0.5, click=True)
    page.settle()
    assert page("navigator.clipboard.readText()") == 'patch(model, "yarn:factor=4")'
    assert page("document.querySelector('[data-copy=a-python]').textContent") == "Copied"
    page.focus("[data-copy=a-config]")
    page.press(" ")
    copied = json.loads(page("navigator.clipboard.readText()"))["rope_parameters"]
    assert (copied["rope_type"], copied["factor"], copied["original_max_position_embeddings"]) == ("yarn", 4.0, 4096)
    assert page("document.querySelector('[data-copy=b-config]')") is None


def test_the_keyboard_reaches_everything(page):
    seen = set()
    for _ in range(40):
        page.press("Tab")
        seen.add(page("(({id, dataset}) => id || Object.entries(dataset).flat().join('='))(document.activeElement)"))
    wanted = {
        "theme",
        "model",
        "length",
        "play",
        "scheme=a",
        "logn=a",
        "map-a",
        "scheme=b",
        "slider=window",
        "map-b",
        "look",
    }
    assert wanted <= seen
    page.focus("#map-a")
    page.press("ArrowLeft")
    before = page("byId('readout-b').textContent")
    page.press("ArrowUp", shift=True)
    assert page("byId('readout-b').textContent") != before
    assert page("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_wrong_field_is_named_and_nothing_breaks(page):
    choose(page, "rerope")
    page.type("#panel-b [data-field=window]", "0")
    assert page("byId('panel-b').querySelector('.wrong').textContent") == "window must be an integer of at least 1."
    page.type("#panel-b [data-field=window]", "100")
    assert page("byId('panel-b').querySelector('.wrong').textContent") == ""
    assert 'rerope:window=100"' in page("document.querySelector('[data-code=b-python]').textContent")


def test_the_animation_runs_to_the_longest_text_and_stops(page):
    page.focus("#length")
    page.press("End")
    page.press("ArrowLeft", 8)
    page.focus("#play")
    page.press(" ")
    assert page("byId('play').getAttribute('aria-pressed')") == "true"
    for _ in range(100):
        if page("byId('play').getAttribute('aria-pressed')") == "false":
            break
        page("new Promise((done) => setTimeout(done, 50))")
    assert page("tokens() / state.model.L") == 16
    assert page("byId('play').getAttribute('aria-pressed')") == "false"


def test_a_bar_shows_the_map_of_its_pair(page):
    page.point("#angles-a [data-pair='3']", 0.5, 0.5, click=True)
    assert page("state.look") == 3
    assert "Nothing is new to this pair" in page("byId('said-a').textContent")
    page.focus("#look")
    page.press("Home")
    assert page("state.look") == -1


def test_a_model_of_your_own(page):
    page.focus("#numbers summary")
    page.press(" ")
    page.type("[data-model=L]", "1024")
    page.type("[data-model=theta]", "500000")
    page.type("[data-model=d]", "64")
    assert page("[state.model.L, state.model.theta, state.model.d, byId('model').value]") == [1024, 500_000, 64, ""]
    scheme, _, length = scheme_of(page)
    assert (scheme.window, length) == (512, 4096)
    again = page("location.href")
    page.open(again)
    assert page("state.model.L") == 1024


def test_the_address_brings_back_what_was_chosen(page):
    page.open(f"{URL}#model=TinyLlama-1.1B&length=4096&a=yarn:factor=2,truncate=False&b=dca:chunk_size=1024+logn")
    assert page("byId('long').textContent") == "4,096 tokens = 2 L"
    assert str(scheme_of(page, "a")[0]) == str(get_scheme("yarn:factor=2,truncate=False"))
    assert "dca:chunk_size=1024+logn" in page("location.hash")
    page.open(f"{URL}#model=nothing&length=x&a=wrong:y=1&b=&c")
    assert page("[state.a.name, state.b.name]") == ["rope", "rerope"]


def luminance(page, expression):
    red, green, blue = map(int, re.findall(r"\d+", page(expression))[:3])
    linear = [(x / 255 / 12.92) if x <= 10 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in (red, green, blue)]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_can_be_read_light_and_dark_wide_and_on_a_phone(page, theme, width):
    page.theme(theme)
    page.resize(width, 800, mobile=width == 400)
    page.open(URL)
    assert page("document.documentElement.dataset.theme") == theme
    page.focus("#numbers summary")
    page.press(" ")
    assert page("document.documentElement.scrollWidth") == width
    ground = luminance(page, "getComputedStyle(document.querySelector('figure')).backgroundColor")
    for selector in ("h2", ".about", "figcaption b.new", ".readout", "pre"):
        ink = luminance(page, f"getComputedStyle(document.querySelector('{selector}')).color")
        low, high = sorted([ink, ground])
        assert (high + 0.05) / (low + 0.05) >= (3 if selector == "figcaption b.new" else 4.5), selector
    small = page(
        "[...document.querySelectorAll('button, select, input[type=number], input[type=range]')]"
        ".filter((each) => each.offsetParent && each.getBoundingClientRect().height < 24).length"
    )
    assert small == 0
    page.point("#theme", 0.5, 0.5, click=True)
    assert page("document.documentElement.dataset.theme") != theme
