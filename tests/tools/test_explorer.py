"""docs/explorer.html without a browser: its facts are those of the registry, its formulas those of the library."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from rope_patch import InvalidField, NotExpressible, Scheme, get_scheme
from rope_patch.models.rope_parameters import export_rope_parameters
from rope_patch.schemes import scheme_class
from rope_patch.schemes.rules import rules_of
from rope_patch.schemes.slots import ModelShape, Target
from rope_patch.schemes.target import takes_target
from tests.explorer import checkpoint_of, distances_of, every_distance, resolved, rotary_of, slow_angles
from tools import explorer
from tools.position_matrices import rotated_distances

NODE = shutil.which("node")
NAMES = [name for names in explorer.SCHEMES.values() for name in names]
MODELS = [*explorer.MODELS[:4], explorer.MODELS[-1], {"L": 96, "theta": 500, "d": 16, "heads": 6}]
PAGE = explorer.PAGE.read_text(encoding="utf-8")

LONG = [1 + i / 5 for i in range(64)]
CASES = {
    "rope": [{}],
    "nope": [{}],
    "xpos": [{}, {"scale_base": 100, "gamma": 1.5}],
    "pi": [{"factor": 1}, {"factor": 4.5}],
    "ntk": [{"factor": 2}, {"factor": 8, "variant": "old"}],
    "ntk_mixed": [{"factor": 4}, {"factor": 16, "exponent": 0.75}],
    "ntk_by_parts": [{"factor": 4}, {"factor": 8, "beta_fast": 16, "beta_slow": 2}],
    "dynamic_ntk": [{}, {"factor": 2, "original_max_position_embeddings": 700}, {"length": 9000}],
    "yarn": [
        {"factor": 4},
        {"factor": 1},
        {"factor": 40, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
        {"factor": 8, "ramp": "rotations", "beta_fast": 20},
        {"factor": 16, "attention_factor": 1.3, "original_max_position_embeddings": 500},
    ],
    "dynamic_yarn": [{}, {"factor": 3}, {"length": 5000, "beta_slow": 0.5}],
    "mrrope": [{"factor": 4}, {"factor": 8, "form": "uni"}, {"factor": 2, "beta_fast": 1000}],
    "llama3": [{"factor": 8}, {"factor": 32, "low_freq_factor": 2, "high_freq_factor": 8}],
    "longrope": [
        {"short_factor": [1.0] * 64, "long_factor": LONG, "factor": 4},
        {"short_factor": LONG, "long_factor": LONG, "attention_factor": 1.1},
    ],
    "abf": [{"base": 500_000}, {"base": 1e6}],
    "giraffe": [{"cutoff_length": 4096}, {"cutoff_length": 100}],
    "giraffe_power": [{"power": 2}, {"power": 0.3}],
    "clip": [{}, {"pairs": 5}, {"pairs": 1}],
    "fope_cut": [{}, {"training_length": 50}],
    "proportional": [{"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.7, "factor": 2}],
    "resonance": [{}],
    "rerope": [{"window": 40}, {"window": 1}],
    "leaky_rerope": [{"window": 40, "factor": 4}, {"window": 7, "factor": 2.5}],
    "self_extend": [{"group_size": 4, "window": 40}, {"group_size": 7, "window": 30, "shift": "fractional"}],
    "dpe": [{"window": 40, "groups": [2, 8, 4, 32]}, {"window": 16, "groups": [3, 5], "shift": "floor"}],
    "dca": [
        {},
        {"chunk_size": 60, "local_window": 20},
        {"chunk_size": 60, "local_window": 40},
        {"chunk_size": 50, "constants": "paper"},
    ],
    "string": [{}, {"shift": 60, "window": 20, "attention_factor": 1.07}],
    "lm_infinite": [{"local_window": 60}, {"local_window": 30, "n_global": 4}, {"local_window": 5, "n_global": 0}],
    "window": [{}, {"window": 50}],
    "alibi": [{}],
    "kerple": [{}, {"variant": "power", "initial_scale": 0.5}],
    "sandwich": [{}, {"embedding_dim": 32, "base": 100}],
    "t5": [{}, {"interpolation": 4}, {"num_buckets": 64, "max_distance": 1000}],
    "logn": [{}, {"clip": False, "training_length": 500}, {"power": 0.5}, {"clip": False, "power": 2}]
    + [{"form": form, "scale": 0.2, "floor": 60} for form in ("llama4", "mistral", "inkling")],
    "ssmax": [{"initial_scale": 0.43}],
}
PAIRS = [pytest.param(name, fields, id=f"{name}-{i}") for name, all_ in CASES.items() for i, fields in enumerate(all_)]

needs_node = pytest.mark.skipif(NODE is None, reason="there is no node to run the formulas of the page")

DRIVER = """
const vm = require("vm"), page = require("fs").readFileSync(process.argv[1], "utf8");
for (const id of ["facts", "formulas"])
  vm.runInThisContext(page.match(new RegExp(`<script id="${id}">([^]*?)</script>`))[1]);
const plain = (_, value) => (typeof value === "number" && !Number.isFinite(value) ? String(value) : value);
require("readline").createInterface({ input: process.stdin }).on("line", (line) => {
  const answers = JSON.parse(line).map(([code, args]) => vm.runInThisContext(code)(...args));
  console.log(JSON.stringify(answers, plain).replace(/"(NaN|-?Infinity)"/g, "$1"));
});
"""


@cache
def node() -> subprocess.Popen[str]:
    """One process for all tests, with the formulas of the page; it ends with the pipe to it."""
    command = [str(NODE), "-e", DRIVER, str(explorer.PAGE)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture(autouse=True, scope="module")
def _node_ends():
    yield
    if node.cache_info().currsize:
        node().communicate(timeout=20)
        node.cache_clear()


def asked(*calls: tuple[str, list[Any]]) -> list[Any]:
    """What functions of the page return, which are given by name or as code, for some arguments."""
    asking, answering = node().stdin, node().stdout
    assert asking is not None
    assert answering is not None
    print(json.dumps(calls), file=asking, flush=True)
    return json.loads(answering.readline())


def numbers(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_small_and_asks_for_nothing():
    assert len(PAGE.encode()) <= 150_000
    assert "default-src 'none'" in PAGE
    assert not re.search(r"https?:|//[\w.]+/|\bsrc=|@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\b", PAGE)
    assert re.findall(r'<link [^>]*href="([^"]*)"', PAGE) == ["data:,"]


def test_the_facts_are_those_of_the_registry():
    assert explorer.with_facts(PAGE) == PAGE, "run `make lists`"
    assert CASES.keys() == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_fields_have_the_rules_that_describe_shows(name):
    said = {field["name"]: field for field in explorer.facts_of(name)["fields"]}
    rules = rules_of(scheme_class(name))
    assert said.keys() | set(explorer.WITHOUT_A_PICTURE) >= rules.keys()
    assert {field: each["allowed"] for field, each in said.items()} == {field: rules[field].allowed() for field in said}


def test_the_embedded_checkpoint_is_the_last_model():
    model = explorer.MODELS[-1]
    config = json.loads((Path(__file__).parents[2] / model["name"] / "config.json").read_text())
    found = config["max_position_embeddings"], config["rope_parameters"]["rope_theta"], config["head_dim"]
    assert found == (model["L"], model["theta"], model["d"])
    assert config["num_attention_heads"] == model["heads"]


# --- the formulas -----------------------------------------------------------------------------------------------------


@needs_node
@pytest.mark.parametrize(("name", "fields"), PAIRS)
def test_frequencies_are_those_of_the_library(name, fields):
    models = [model for model in MODELS if name != "longrope" or model["d"] == 128]
    lengths = [model["L"] * share for model in models for share in (0.5, 4)]
    models = [model for model in models for _ in range(2)]
    found = asked(*(("frequencies", [name, fields, *at]) for at in zip(models, lengths, strict=True)))
    for model, length, there in zip(models, lengths, found, strict=True):
        if name == "dpe":
            continue  # its groups have to divide the pairs: below
        scheme = resolved(name, fields, model)
        if scheme.brings_bias:
            assert not any(there["theta"])
            continue
        wanted = scheme.frequencies(rotary_of(model), torch.tensor([int(length)]) if scheme.length_dependent else None)
        # the library computes in single precision
        torch.testing.assert_close(numbers(there["theta"]), wanted.inv_freq.double().view(-1), rtol=3e-6, atol=1e-12)
        assert there["temperature"] == pytest.approx(float(wanted.attention_scaling), rel=1e-6)
        if wanted.decay is not None:
            torch.testing.assert_close(numbers(there["decay"]), wanted.decay.double(), rtol=1e-5, atol=1e-9)


MAPS = [param for param in PAIRS if scheme_class(param.values[0]).segments is not Scheme.segments]
SMALL = MODELS[-1]
EVERY_CELL = """(name, fields, model, length, pairs) => pairs.map((i) => Array.from({ length }, (_, m) =>
  Array.from({ length }, (_, n) => rotated(regions(name, fields, model), m, n, i))))"""
EVERY_REACH = (
    "(name, fields, model, length, pairs) => pairs.map((i) => farthest(regions(name, fields, model), length, i))"
)


@needs_node
@pytest.mark.parametrize(("name", "fields"), MAPS)
def test_every_cell_of_a_map_is_that_of_the_library(name, fields):
    length, pairs = 180, [0, 3, 7]
    cells, *reaches = asked(
        (EVERY_CELL, [name, fields, SMALL, length, pairs]),
        *((EVERY_REACH, [name, fields, SMALL, shorter, pairs]) for shorter in (20, 91, length)),
    )
    wanted = every_distance(resolved(name, fields, SMALL), length, SMALL["d"] // 2)[pairs]
    torch.testing.assert_close(numbers(cells), wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
    for shorter, there in zip((20, 91, length), reaches, strict=True):
        most = wanted[:, :shorter, :shorter].nan_to_num(nan=-1).amax((1, 2))
        torch.testing.assert_close(numbers(there), most, rtol=1e-12, atol=1e-12)


def test_the_distances_are_those_of_the_pictures():
    scheme = get_scheme("self_extend:group_size=4,window=40")
    m, n = torch.arange(200)[:, None], torch.arange(200)
    pictured = rotated_distances(scheme, m, n).masked_fill(m < n, math.nan)
    torch.testing.assert_close(every_distance(scheme, 200, 1)[0], pictured, equal_nan=True)


SEEN = """(name, fields, model, length, cells) => {
  const view = viewOf(name, fields, model, length);
  return cells.map(([m, n]) => Object.values(view(m, n)));
}"""


@needs_node
@pytest.mark.parametrize("name", ["rope", "pi", "ntk", "yarn", "rerope", "dca", "nope", "dynamic_ntk", "dpe", "alibi"])
def test_orange_is_an_angle_beyond_those_of_training(name):
    model, length = MODELS[0], 4 * 4096
    fields = {"dpe": {"window": 512, "groups": [1, 2, 4, 32]}, "rerope": {"window": 6000}}.get(name) or CASES[name][0]
    places = torch.randint(length, (400, 2), generator=torch.Generator().manual_seed(0)).sort(descending=True).values
    cells, (every,) = places.tolist(), asked((SEEN, [name, fields, model, length, places.tolist()]))
    scheme = resolved(name, fields, model)
    for (m, n), (distance, seen_as, is_new) in zip(cells, every, strict=True):
        angles, known = slow_angles(scheme, model, length, m, n)
        assert is_new == bool((angles > known * (1 + 1e-6)).any()) or abs(seen_as - 4096) < 0.1
        assert seen_as == pytest.approx(float((angles / known).max()) * 4096, rel=1e-5, abs=1e-9)
        assert distance in distances_of(scheme, m, n)


SHARES = "(name, fields, model, length) => angles(name, fields, model, length).map((each) => Object.values(each))"


@needs_node
def test_angles_of_pairs_at_four_times_the_length():
    plain, yarn = asked(
        *((SHARES, [name, fields, MODELS[0], 16384]) for name, fields in (("rope", {}), ("yarn", {"factor": 4})))
    )
    turns = 4096 * 10_000.0 ** -(torch.arange(0, 128, 2).double() / 128) / (2 * math.pi)
    torch.testing.assert_close(numbers(plain)[:, 0], turns)
    torch.testing.assert_close(numbers(plain)[:, 1], turns * 16383 / 4096)
    assert sum(is_new for *_, is_new in plain) == int((turns < 1).sum()) == 18
    assert not any(is_new for *_, is_new in yarn)


BIASES = "(name, fields, model, distances) => distances.map((distance) => bias(name, fields, model, distance))"
BUCKETS = "(fields, model, distances) => distances.map((d) => SCHEMES.t5.bucket(resolved('t5', fields, model), d))"


@needs_node
@pytest.mark.parametrize(
    ("name", "fields"), [param for param in PAIRS if param.values[0] in ("alibi", "kerple", "sandwich")]
)
def test_biases_are_those_of_the_library(name, fields):
    distances = torch.arange(0, 600, 7)
    for model in (MODELS[0], MODELS[2], SMALL):
        found, start = asked(
            (BIASES, [name, fields, model, distances.tolist()]),
            ("(fields, model) => kerpleStart(withDefaults('kerple', fields), model)", [fields, model]),
        )
        weights = {
            "kernel_scale": torch.tensor([each["scale"] for each in start]).double(),
            "kernel_shape": torch.tensor([each["shape"] for each in start]).double(),
        }
        wanted = resolved(name, fields, model).bias(distances, model["heads"], weights).double().T
        torch.testing.assert_close(numbers(found), wanted, rtol=1e-5, atol=1e-4)


@needs_node
@pytest.mark.parametrize("fields", CASES["t5"])
def test_buckets_are_those_of_the_library(fields):
    distances = torch.arange(3000)
    (found,) = asked((BUCKETS, [fields, MODELS[0], distances.tolist()]))
    scheme = resolved("t5", fields, MODELS[0])
    table = torch.arange(scheme.num_buckets).double()[:, None]
    assert scheme.bias(distances, 1, {"relative_attention_bias": table})[0].tolist() == found


SCALES = "(name, fields, model, places) => places.map((m) => scoreScale(name, fields, model, 8192, m))"


@needs_node
@pytest.mark.parametrize(
    ("name", "fields"), [param for param in PAIRS if param.values[0] in ("logn", "ssmax", "string")]
)
def test_query_scales_are_those_of_the_library(name, fields):
    places = torch.arange(0, 9000, 13)
    (found,) = asked((SCALES, [name, fields, MODELS[0], places.tolist()]))
    scheme = resolved(name, fields, MODELS[0])
    shape = ModelShape(1, 128, 128, 1, 1, 4096, 128)
    wanted = scheme.query_scale(places, 1, scheme.parameters(shape, torch.Generator()))[0].double()
    torch.testing.assert_close(numbers(found), wanted, rtol=2e-6, atol=1e-6)


@needs_node
def test_the_initial_scale_and_the_temperature():
    scale, squared = asked(
        ("(model) => scoreScale('ssmax', {}, model, 4096, 100)", [MODELS[0]]),
        ("(model) => scoreScale('yarn', {factor: 4}, model, 16384, 9999, true)", [MODELS[0]]),
    )
    parameters = get_scheme("ssmax").parameters(ModelShape(1, 128, 128, 1, 1, 4096, 128), torch.Generator())
    assert scale == pytest.approx(float(parameters["scale"]) * math.log(101), rel=1e-6)
    assert squared == pytest.approx((0.1 * math.log(4) + 1) ** 2 * math.log(10_000) / math.log(4096))


# --- fields and what is copied ----------------------------------------------------------------------------------------


@needs_node
def test_fields_for_a_length_are_those_of_the_library():
    names = [name for name in NAMES if takes_target(scheme_class(name))]
    cases = [(name, model, share) for name in names for model in MODELS for share in (2, 4, 16)]
    found = asked(*(("fieldsFor", [name, share * model["L"], model]) for name, model, share in cases))
    for (name, model, share), there in zip(cases, found, strict=True):
        wanted = scheme_class(name).fields_for(Target(name, share * model["L"], checkpoint_of(model), {}))
        assert {field: there[field] for field in wanted} == pytest.approx(wanted), (name, model, share)


TRIED = {
    "int": (0, 1, 2, 3, -1, 2.5, 64, 5000),
    "float": (0, 0.5, 1, 4, -2, 33, 64),
    "bool": (True,),
    "str": ("index", "old", "paper", "uni", "llama4", "floor", "power", "wrong"),
    "tuple": ([], [1], [1, 2], [0.5] * 64, [2] * 4, [1, 0]),
}


@needs_node
@pytest.mark.parametrize("name", NAMES)
def test_wrong_fields_are_those_that_the_library_refuses(name):
    model, start = MODELS[0], CASES[name][0]
    tried = [
        {**start, field["name"]: value} for field in explorer.facts_of(name)["fields"] for value in TRIED[field["kind"]]
    ]
    for fields, wrong in zip(tried, asked(*(("mistake", [name, fields, model]) for fields in tried)), strict=True):
        try:
            resolved(name, fields, model).frequencies(rotary_of(model))
            refused = False
        except InvalidField:
            refused = True
        assert bool(wrong) == refused, (fields, wrong)


@needs_node
@pytest.mark.parametrize("name", NAMES)
def test_the_line_of_python_makes_the_same_scheme(name):
    for fields, line in zip(CASES[name], asked(*(("spec", [name, fields]) for fields in CASES[name])), strict=True):
        assert get_scheme(line) == get_scheme(name, **fields)
    assert asked(("spec", ["rerope", {"window": 128}, True])) == ["rerope:window=128+logn"]


@needs_node
def test_a_number_in_the_config_keeps_its_point():
    config = {
        "rope_type": "yarn",
        "factor": 4,
        "truncate": True,
        "long_factor": [1, 1.5],
        "original_max_position_embeddings": 8,
    }
    (text,) = asked(("configText", [config]))
    assert json.loads(text) == {"rope_parameters": config}
    assert '"factor": 4.0,' in text
    assert "[1.0, 1.5]" in text
    assert '": 8\n' in text


@needs_node
@pytest.mark.parametrize(("name", "fields"), PAIRS)
def test_the_config_is_the_exported_one(name, fields):
    model, length = MODELS[0], 16384
    (found,) = asked(("ropeParameters", [name, fields, model, length]))
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, max_position_embeddings=4096)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    try:
        scheme = get_scheme(name, **fields)
        try:
            wanted = export_rope_parameters(scheme, config)
        except NotExpressible:
            wanted = export_rope_parameters(scheme, config, as_lists=length)
    except NotExpressible:
        assert found is None
        return
    assert found.keys() == wanted.keys()
    wanted = {key: value if isinstance(value, str) else pytest.approx(value, rel=3e-6) for key, value in wanted.items()}
    assert found == wanted
