"""Whatever is written where the library reads words, settings or configs: it works, or an error gives the reason."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import reject
from hypothesis import strategies as st

from rope_patch import RopePatchError, export_rope_parameters, get_scheme, list_schemes, native_scheme, patch, repatch
from rope_patch.cli import load, main
from rope_patch.cli.options import parse
from rope_patch.evaluation.scheme_specs import scheme_at
from rope_patch.schemes import Checkpoint, scheme_class, scheme_from_dict
from tests.cases import ALL, CASES
from tests.families import build, config_of
from tests.hardening.exploring import explore
from tests.hardening.hostile import damaged, damaged_words, leaves, things
from tests.hardening.scale import parts
from tests.runs import logits, tokens

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
FUZZED = "fuzzed inputs"

ENTRIES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"attention_factor": 1.1, "truncate": True, "original_max_position_embeddings": 32},
    },
    {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    {
        **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    },
    {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "sliding_attention": {}},
]
"""What the `rope_parameters` of checkpoints are like."""


def exploring(usual: int, hard: int, size: int = 1000) -> pytest.MarkDecorator:
    """Parametrise a test by the cases that it goes through: `number` of them, of which `part`."""
    numbers = parts(usual=usual, hard=hard, size=size)
    return pytest.mark.parametrize(("part", "number"), list(enumerate(numbers)))


# --- schemes -------------------------------------------------------------------------------------------------------


def read_back(scheme):
    assert scheme_from_dict(scheme.to_dict()) == scheme
    assert get_scheme(str(scheme)).parts() == scheme.parts()
    assert hash(scheme) == hash(copy.deepcopy(scheme))


@exploring(usual=300, hard=2500)
def test_words_for_schemes(part, number, count):
    def holds(words):
        scheme_at(words, 64, [Checkpoint(32, num_heads=4, max_length=32)])
        read_back(get_scheme(words))

    count(FUZZED, explore(st.text(max_size=30) | damaged_words(ALL), holds, number, part))


@exploring(usual=150, hard=1500)
def test_fields_of_schemes(part, number, count):
    @st.composite
    def named(draw):
        name = draw(st.sampled_from(list_schemes()))
        field = st.sampled_from([field.name for field in dataclasses.fields(scheme_class(name))] or ["factor"])
        return name, draw(st.dictionaries(field | st.text(max_size=6), things, max_size=4))

    def holds(case):
        name, fields = case
        read_back(get_scheme(name, **{key: value for key, value in fields.items() if key != "name"}))

    count(FUZZED, explore(named(), holds, number, part))


@exploring(usual=150, hard=1500)
def test_dicts_of_schemes(part, number, count):
    wholes = st.sampled_from([get_scheme(spec).to_dict() for spec in ALL])
    count(FUZZED, explore(damaged(wholes) | things, lambda data: read_back(scheme_from_dict(data)), number, part))


BIG = [2**31, 2**63, 2**64, 10**400, 1e300, 1e-300]


@exploring(usual=25, hard=400, size=200)
def test_numbers_that_a_scheme_takes_can_be_computed_with(part, number, count):
    @st.composite
    def named(draw):
        scheme = get_scheme(CASES[draw(st.sampled_from(list_schemes()))])
        fields = sorted(scheme.fields()) or ["seed"]
        changed = draw(st.dictionaries(st.sampled_from(fields), st.sampled_from(BIG), max_size=2))
        return scheme.name, {**scheme.fields(), **changed}

    model = build()

    def holds(case):
        name, fields = case
        with patch(model, get_scheme(name, **fields)):
            logits(model, tokens(40))

    count(FUZZED, explore(named(), holds, number, part))


# --- options -------------------------------------------------------------------------------------------------------

COMMANDS: dict[str, list[str]] = {
    "perplexity": ["--scheme", "yarn:target=auto", "--lengths", "16,32", "--targets", "8", "--seed", "1"],
    "passkey": ["--scheme", "yarn:target=auto", "--lengths", "16,32", "--trials", "2"],
    "sweep": ["--target", "4x", "--schemes", "yarn", "--budget-minutes", "2", "--dry-run"],
    "search": ["--target", "4x", "--population", "8", "--budget-minutes", "2"],
    "finetune": ["--scheme", "pi:factor=4", "--length", "64", "--steps", "4"],
    "compare": ["--only", "rope", "alibi", "--steps", "3"],
    "export": ["--scheme", "yarn:factor=4", "--length", "128", "--dry-run", "--json"],
    "plot": ["position_maps", "--scheme", "rerope:window=8", "--training-length", "16"],
    "list": ["--json"],
    "describe": ["--scheme", "yarn:factor=2"],
}
"""Words that each command takes."""


@st.composite
def command_lines(draw, command):
    chosen = [draw(damaged_words([word])) if draw(st.integers(0, 2)) == 0 else word for word in COMMANDS[command]]
    # what no command line can hold
    return [word.replace("\0", "").encode("utf-8", "replace").decode() for word in chosen]


def read(command, words):
    with contextlib.suppress(SystemExit):  # after --help
        options = parse(load(command).Options, words)
        assert dataclasses.is_dataclass(options)


@exploring(usual=15, hard=100)
@pytest.mark.parametrize("command", COMMANDS)
def test_options(part, number, count, command):
    count(FUZZED, explore(command_lines(command), lambda words: read(command, words), number, part))


@exploring(usual=6, hard=100)
@pytest.mark.parametrize("command", COMMANDS)
def test_yaml(part, number, count, command, tmp_path):
    path = tmp_path / "settings.yaml"
    written = [file.read_text() for file in sorted(CONFIGS.glob("*.yaml"))]
    fields = st.sampled_from([field.name for field in dataclasses.fields(load(command).Options)])
    spelled = st.dictionaries(fields, leaves, max_size=3).map(yaml.dump)

    def holds(words):
        path.write_bytes(words.encode("utf-8", "surrogatepass"))
        read(command, [str(path)])

    count(FUZZED, explore(damaged_words(written) | spelled, holds, number, part))


# --- configs -------------------------------------------------------------------------------------------------------


def say(config, entry):
    """Give a config `rope_parameters`, unless Transformers has reasons of its own against them."""
    try:
        config.rope_parameters = entry
    except Exception:
        reject()


@exploring(usual=60, hard=500)
def test_rope_parameters_as_a_scheme_reads_them(part, number, count):
    cases = st.tuples(damaged(st.sampled_from(ENTRIES)), st.sampled_from([get_scheme(spec) for spec in ALL]))

    def holds(case):
        entry, scheme = case
        config = config_of("llama")
        say(config, entry)
        export_rope_parameters(scheme, config)

    count(FUZZED, explore(cases, holds, number, part))


@exploring(usual=20, hard=250)
def test_rope_parameters_as_a_model_has_them(part, number, count):
    model = build()
    told = model.config.rope_parameters

    def holds(entry):
        say(model.config, entry)
        try:
            native_scheme(model)
        finally:
            model.config.rope_parameters = told

    count(FUZZED, explore(damaged(st.sampled_from(ENTRIES)), holds, number, part))


@exploring(usual=20, hard=250)
def test_what_a_config_says_of_the_scheme_it_was_saved_under(part, number, count):
    records = [{"scheme": get_scheme(spec).to_dict(), "rope_parameters": ENTRIES[0]} for spec in ALL]
    model = build()

    def holds(record):
        model.config.rope_patch = record
        try:
            with contextlib.suppress(RopePatchError):  # of a table that `repatch` has to take up
                patch(model, "rerope", window=6).remove()
            repatch(model).remove()
        finally:
            del model.config.rope_patch

    learned = {"scheme": get_scheme("learned").to_dict(), "positions": 16}
    cases = damaged(st.sampled_from([*records, learned]), leaves) | leaves
    count(FUZZED, explore(cases, holds, number, part))


# --- the command line ----------------------------------------------------------------------------------------------


@exploring(usual=10, hard=60)
@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"compare", "plot"}))  # those do without a model
def test_words_of_the_command_line(part, number, count, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    missing = {"export": [str(tmp_path / "none")], "list": []}  # a model that is not there: nothing may be measured

    def holds(words):
        status = main([command, *missing.get(command, ["--model", str(tmp_path / "none")]), *words])
        said = capsys.readouterr().err
        assert status in (0, 2)
        assert (status == 2) == (said.count("rope-patch: ") > 0 and said.count("Traceback") == 0)

    count(FUZZED, explore(command_lines(command), holds, number, part))


@exploring(usual=20, hard=300)
def test_export_of_a_folder_whose_config_is_damaged(part, number, count, tmp_path, capsys):
    whole = {
        **json.loads((CONFIGS.parent / "assets" / "tiny-llama" / "config.json").read_text()),
        "rope_patch": {"scheme": get_scheme("yarn:factor=4").to_dict(), "rope_parameters": ENTRIES[0]},
    }
    path = tmp_path / "config.json"
    cases = damaged(st.sampled_from([whole, {**whole, "rope_parameters": ENTRIES[3], "rope_patch": None}]))

    def holds(config):
        try:
            path.write_text(json.dumps(config))
        except (TypeError, ValueError):  # what JSON cannot say
            return
        assert main(["export", str(tmp_path), "--json"]) in (0, 2)
        capsys.readouterr()

    count(FUZZED, explore(cases, holds, number, part))
