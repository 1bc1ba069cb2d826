"""The published vectors: up to date, held to by Transformers, and able to see a reader that drops something."""

import importlib.util
import json
import math

import numpy as np
import pytest
import torch

from rope_patch.models.rope_entries import scheme_of_entry
from rope_patch.typing import RotarySpec
from tools.vectors import ENTRIES, FOLDER, HEAD, L, vectors

spec = importlib.util.spec_from_file_location("check_vectors", FOLDER / "check_vectors.py")
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)


def numbers_apart(value) -> tuple[object, list[float]]:
    """A JSON value with 0.0 for each of its floats, and the floats."""
    floats: list[float] = []
    shape = json.loads(json.dumps(value), parse_float=lambda text: floats.append(float(text)) or 0.0)
    return shape, floats


def test_the_files_are_those_that_the_command_writes():
    made = vectors()
    assert {path.stem for path in FOLDER.glob("*.json")} == made.keys()
    for name, vector in made.items():
        shape, floats = numbers_apart(json.loads((FOLDER / f"{name}.json").read_text()))
        expected_shape, expected = numbers_apart(vector)
        assert shape == expected_shape, name
        # the last bit of a power differs between processors; at position 100,000 that is 1e-11 of a cosine
        assert floats == pytest.approx(expected, rel=1e-9, abs=1e-9), name


def test_transformers_is_held_to_them():
    found = dict(check.deviations(check.transformers_tables))
    assert len(found) >= 40
    assert {name: worst for name, worst in found.items() if isinstance(worst, str) or max(worst) > 1e-4} == {}


def test_a_reader_that_drops_the_temperature_is_seen():
    def without_temperature(config, layer_type, positions):
        config.get("rope_parameters", {}).pop("attention_factor", None)
        return check.transformers_tables(config, layer_type, positions)

    found = dict(check.deviations(without_temperature))
    seen = {name for name, worst in found.items() if isinstance(worst, str) or max(worst) > 1e-4}
    assert seen == {name for name in ENTRIES if "attention_factor" in ENTRIES[name]}


def test_the_check_is_short_and_needs_nothing_of_this_library():
    text = (FOLDER / "check_vectors.py").read_text()
    assert len(text.splitlines()) <= 40
    assert "rope_patch" not in text


@pytest.mark.parametrize("name", ["yarn", "llama3", "longrope", "dynamic", "proportional_factor", "linear"])
def test_the_schemes_here_agree(name):
    vector = json.loads((FOLDER / f"{name}.json").read_text())
    entry = vector["config"]["rope_parameters"]
    scheme = scheme_of_entry(entry, nested=False)
    for row in vector["rows"]:
        length = torch.tensor([row["positions"][-1] + 1])
        found = scheme.frequencies(RotarySpec(HEAD, entry["rope_theta"], L), length)
        np.testing.assert_allclose(np.ravel(found.inv_freq), row["inv_freq"], rtol=1e-5, atol=1e-12)
        assert math.isclose(float(found.attention_scaling), row["attention_factor"], rel_tol=1e-6)
