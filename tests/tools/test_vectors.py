"""The published vectors: up to date, right by definitions of their own, and able to see each bug that they name."""

import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from rope_patch.models.rope_entries import scheme_of_entry
from rope_patch.typing import RotarySpec
from tests.doctor.vector_definitions import defined
from tests.tools.bugs_of_readers import BUGS, REPORTED, entry_of, reader
from tools.vectors import FOLDER, VERSION, vectors

spec = importlib.util.spec_from_file_location("check_vectors", FOLDER / "check_vectors.py")
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)

INDEX = {entry["name"]: entry for entry in check.INDEX["vectors"]}
KNOWN = {name for name, entry in INDEX.items() if "Transformers" in entry["known"]}


def vector(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def numbers_apart(value) -> tuple[object, list[float]]:
    """A JSON value with 0.0 for each of its floats, and the floats."""
    floats: list[float] = []
    shape = json.loads(json.dumps(value), parse_float=lambda text: floats.append(float(text)) or 0.0)
    return shape, floats


def test_the_files_are_those_that_the_command_writes():
    made = vectors()
    assert INDEX.keys() == made.keys()
    assert {path.stem for path in FOLDER.glob("*.json")} == made.keys() | {"index", "schema"}
    for name, each in made.items():
        shape, floats = numbers_apart(vector(name))
        expected_shape, expected = numbers_apart(each)
        assert shape == expected_shape, name
        # the last bit of a power differs between processors; at position 1,000,000 that is 1e-10 of a cosine
        assert floats == pytest.approx(expected, rel=1e-9, abs=1e-9), name


def test_the_index_has_the_hash_of_every_file_and_its_version_is_in_the_changelog():
    for name, entry in INDEX.items():
        assert entry["file"] == f"{name}.json"
        assert entry["sha256"] == hashlib.sha256((FOLDER / entry["file"]).read_bytes()).hexdigest(), name
        assert entry["known"] == vector(name)["known"]
        assert entry["says"].endswith("."), name
    changes = re.findall(r"^## (\S+)", (FOLDER / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[0] == check.INDEX["version"] == VERSION


@pytest.mark.parametrize("name", INDEX)
def test_every_vector_is_what_the_schema_describes(name):
    validate = pytest.importorskip("jsonschema").validate
    each = vector(name)
    validate(each, json.loads((FOLDER / "schema.json").read_text()))
    for row in each["rows"]:
        positions = row["positions"] if isinstance(row["positions"][0], list) else [row["positions"]]
        assert {axis[1] for axis in positions} == {1}
        assert row["length"] == max(map(max, positions)) + 1
        assert len(positions) == (3 if "axes" in each else 1)
        assert np.shape(row["cos"]) == np.shape(row["sin"]) == (len(positions[0]), len(row["inv_freq"]))


@pytest.mark.parametrize("name", INDEX)
def test_every_vector_is_what_its_definition_says(name):
    each = vector(name)
    for row in each["rows"]:
        truth = defined(each["config"], each["layer_type"], row["length"])
        np.testing.assert_allclose(row["inv_freq"], np.float64(truth.inv_freq), rtol=1e-13)
        assert math.isclose(row["attention_factor"], float(truth.factor), rel_tol=1e-14)
        assert each.get("axes", truth.axes) == truth.axes
        cos, sin = truth.tables(row["positions"])
        # an angle of a million radians in float64 is exact to 1e-10
        np.testing.assert_allclose(row["cos"], np.float64(cos), rtol=0, atol=1e-9)
        np.testing.assert_allclose(row["sin"], np.float64(sin), rtol=0, atol=1e-9)


def differing(tables):
    """Names of the vectors that a reader does not agree with."""
    return {name for name, worst in check.deviations(tables) if isinstance(worst, str) or max(worst) > 1e-4}


def test_transformers_is_held_to_them():
    assert differing(check.transformers_tables) == KNOWN


def test_a_batch_gives_the_short_row_the_long_list_in_transformers():
    from transformers import AutoConfig, AutoModel

    each = vector("longrope_rows")
    rows = [row["positions"] for row in each["rows"]]
    assert "one batch" in "".join(each["known"])
    rotary = AutoModel.from_config(AutoConfig.for_model(**each["config"])).rotary_emb
    cos = rotary(torch.zeros(1), torch.tensor(rows))[0].numpy()
    assert rows[0][-1] < 64 <= rows[1][-1]
    found = np.arccos(np.clip(cos[:, 1, :16] / each["rows"][0]["attention_factor"], -1, 1))  # position 1 of both
    np.testing.assert_allclose(found[1], each["rows"][1]["inv_freq"], atol=1e-3)
    np.testing.assert_allclose(found[0], each["rows"][1]["inv_freq"], atol=1e-3)
    assert abs(found[0] - np.array(each["rows"][0]["inv_freq"])).max() > 0.1


def test_a_reader_without_a_bug_agrees_with_all():
    assert differing(reader(lambda fields: None)) == set()


def test_a_number_that_is_none_is_no_agreement():
    def tables(config, layer_type, positions):
        cos, sin = check.transformers_tables(config, layer_type, positions)
        return cos, [[math.nan] * len(row) for row in sin]

    assert differing(tables) == INDEX.keys()


def test_every_thread_that_the_index_names_has_its_bug_here():
    assert {thread for entry in INDEX.values() for thread in entry["traps"]} == BUGS.keys()
    assert {thread.lower().rpartition("/")[2] for thread in BUGS} >= REPORTED


@pytest.mark.parametrize("thread", sorted(BUGS))
def test_a_bug_is_seen_by_each_vector_that_names_it(thread):
    named = {name for name, entry in INDEX.items() if thread in entry["traps"]}
    assert named <= differing(reader(BUGS[thread]))


def test_a_reader_that_drops_the_temperature_is_seen():
    def without(config, layer_type, positions):
        config.get("rope_parameters", {}).pop("attention_factor", None)
        return check.transformers_tables(config, layer_type, positions)

    changed = {name for name in INDEX if "attention_factor" in vector(name)["config"].get("rope_parameters", {})}
    # one of them says what follows without it
    assert differing(without) == KNOWN | changed - {"yarn_attention_factor_written_out"}


def test_the_check_is_short_and_needs_nothing_of_this_library():
    text = (FOLDER / "check_vectors.py").read_text()
    assert len(text.splitlines()) <= 40
    assert "rope_patch" not in text
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) == {"itertools", "json", "math", "pathlib"}


FLAT = [
    name
    for name in INDEX
    if (config := vector(name)["config"])["model_type"] == "llama" and entry_of(config).get("rope_type")
    if name not in ("yarn_factor_null", "longrope_factor_missing", "yarn_mscale_zero")
]
"""Llamas whose entry is whole, and whose numbers a scheme takes."""


@pytest.mark.parametrize("name", FLAT)
def test_the_schemes_here_agree(name):
    each = vector(name)
    config = each["config"]
    entry = {"rope_theta": config.get("rope_theta", 10000.0), **entry_of(config)}
    top = {key: config[key] for key in ("original_max_position_embeddings",) if key in config}
    scheme = scheme_of_entry(entry | top, nested=False)
    trained = config["max_position_embeddings"] if "original" not in str(entry | top) else 64
    for row in each["rows"]:
        spec = RotarySpec(config["head_dim"], entry["rope_theta"], trained)
        found = scheme.frequencies(spec, torch.tensor([row["length"]]))
        np.testing.assert_allclose(np.ravel(found.inv_freq), row["inv_freq"], rtol=1e-5, atol=1e-12)
        assert math.isclose(float(found.attention_scaling), row["attention_factor"], rel_tol=1e-6)


def test_the_five_lines_run_in_another_project(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    page = (FOLDER.parent / "docs" / "how-to" / "vectors.md").read_text()
    assert code in page
    assert len([line for line in code.splitlines() if line]) == 5
    shutil.copytree(FOLDER, tmp_path / "vectors")
    (tmp_path / "test_positions.py").write_text(code)
    for change, passes in (("None", True), ("fields.pop('rope_parameters', None)", False)):
        own = f"from tests.tools.bugs_of_readers import reader\n\ntables = reader(lambda fields: {change})\n"
        (tmp_path / "yours.py").write_text(own)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
        path = {"PYTHONPATH": str(FOLDER.parent)}
        ended = subprocess.run(
            command, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, check=False
        )
        assert (ended.returncode == 0) == passes, ended.stdout + ended.stderr


def test_each_reader_was_held_to_all_of_them_and_the_pages_say_how_many_agree():
    docs = FOLDER.parent / "docs"
    rows = [json.loads(line) for line in (docs / "results/serving/deviations.jsonl").read_text().splitlines()]
    held = {row["reader"] for row in rows}
    assert sorted((row["reader"], row["vector"]) for row in rows) == sorted(product(held, INDEX))
    agree = Counter(row["reader"] for row in rows if row["agrees"])
    page = (docs / "serving.md").read_text()
    assert (
        f"Transformers 5.23 agrees with {agree['Transformers 5 5.23.0']}, vLLM 0.32.0 with {agree['vLLM 0.32.0']}, "
        f"mlx-lm 0.32.2 with {agree['mlx-lm 0.32.2']} "
    ) in page
    assert f"{len(INDEX)} configs" in page
    assert f"{len(INDEX)} configs" in (docs / "how-to" / "vectors.md").read_text()


def test_the_page_has_a_line_for_each_vector():
    pytest.importorskip("mkdocs")
    path = FOLDER.parent / "docs" / "hooks" / "vectors.py"
    loaded = importlib.util.spec_from_file_location("hook_of_vectors", path)
    hook = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(hook)
    page = hook.on_page_markdown((path.parents[1] / "how-to" / "vectors.md").read_text(), None, None, None)
    assert "<!--" not in page
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(INDEX)
    assert "| vLLM 0.32.0 | 90 | 15 | 3 |" in page
