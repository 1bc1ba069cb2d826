"""The record of a scheme in a config: what is written is read back, and what cannot be one is refused by name."""

import copy
import json
import pickle
import sys

import pytest
from transformers import AutoConfig, Gemma3Config

import rope_patch
from rope_patch import InvalidField, NotExpressible, UnknownScheme, get_scheme, patch
from rope_patch.models.record import RECORD, Record, before_patch, forget_record
from rope_patch.saving.export import describe_serving
from tests.families import build, config_of
from tests.walk.reload import walk

YARN = {"name": "yarn", "factor": 4.0}
NATIVE = {"rope_theta": 10000.0, "rope_type": "default"}

OLD = {  # as releases before this class wrote them
    "static": {"scheme": YARN, "rope_parameters": NATIVE, "max_position_embeddings": 32},
    "late": {"scheme": {"name": "rerope", "window": 6}, "rope_parameters": NATIVE},
    "of adapters": {"scheme": YARN},
    "layers": {"scheme": YARN, "rope_parameters": NATIVE, "left_alone": {"0": "sliding window"}},
    "rows": {"scheme": {"name": "hierarchical"}, "positions": 8},
    "factors": {"scheme": YARN, "per_request": {"4": YARN, "1": {**YARN, "factor": 1.0}}},
}


@pytest.mark.parametrize("form", OLD)
def test_a_record_is_read_and_written_back_in_its_form(form):
    config, again = config_of("llama"), {}
    vars(config)[RECORD] = copy.deepcopy(OLD[form])
    record = Record.read(config)
    record.write(again)
    written = again[RECORD]
    assert json.loads(json.dumps(written)) == written
    assert list(written) == list(OLD[form])
    assert {name: written[name] for name in written if name not in ("scheme", "per_request")} == {
        name: value for name, value in OLD[form].items() if name not in ("scheme", "per_request")
    }
    assert Record.read(again) == record
    assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record


def test_the_fields_are_what_was_written():
    assert Record.read({RECORD: OLD["layers"]}).left_alone == {0: "sliding window"}
    assert Record.read({RECORD: OLD["rows"]}).positions == 8
    factors = Record.read({RECORD: OLD["factors"]}).per_request
    assert [(factor, scheme.factor) for factor, scheme in factors.items()] == [(1, 1), (4, 4)]
    assert Record.read({"model_type": "llama"}) is None


def test_a_scheme_is_stated_where_the_config_says_other_positions_than_the_native_ones():
    record = Record.read({RECORD: OLD["static"]})
    config = config_of("llama")
    config.rope_parameters = {**NATIVE, "rope_type": "yarn", "factor": 4.0}
    assert record.is_stated(config)
    config.rope_parameters = dict(NATIVE)
    assert not record.is_stated(config)


def test_the_record_of_a_text_model_is_found_in_the_config_around_it():
    config = Gemma3Config(text_config={"num_hidden_layers": 1}, vision_config={"num_hidden_layers": 1})
    assert Record.read(config) is Record.read(config.to_dict()) is None
    Record(get_scheme("rerope:window=6")).write(config.text_config)
    for form in (config, config.to_dict()):
        assert Record.read(form).scheme == get_scheme("rerope:window=6")
    forget_record(config)
    assert RECORD not in config.to_json_string()
    assert Record.read({"text_config": 5}) is None


def test_a_config_gets_its_own_values_back():
    model = build("llama")
    native = {name: getattr(model.config, name) for name in ("rope_parameters", "max_position_embeddings")}
    with patch(model, "yarn:factor=4"):
        config = copy.deepcopy(model.config)
    record = Record.read(config)
    assert record.is_stated(config)
    assert record.native == native
    assert before_patch(config).rope_parameters == native["rope_parameters"]
    record.restore(config)
    assert {name: getattr(config, name) for name in native} == native
    assert not record.is_stated(config)
    config.rope_parameters["rope_theta"] = 5.0
    assert record.native == native


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"scheme": {"name": "yarm"}}, UnknownScheme, "did you mean 'yarn'"),
        ({"scheme": None}, InvalidField, "None does not describe a scheme"),
        ({"max_position_embeddings": 0}, InvalidField, "max_position_embeddings=0; it must be a length in tokens"),
        ({"max_position_embeddings": True}, InvalidField, "max_position_embeddings=True; it must be"),
        ({"positions": "8"}, InvalidField, "positions='8'; it must be a number of rows"),
        ({"left_alone": ["0"]}, InvalidField, r"left_alone=\['0'\]; it must be a reason for each layer's index"),
        ({"left_alone": {"first": ""}}, InvalidField, "left_alone={'first': ''}; it must be"),
        ({"per_request": {"0": YARN}}, InvalidField, "it must be a scheme for each factor"),
        ({"per_request": [YARN]}, InvalidField, "it must be a scheme for each factor"),
        ({"per_request": {"2": {"name": "yarm"}}}, UnknownScheme, "did you mean 'yarn'"),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_value_and_what_is_allowed(changes, error, said):
    written = {RECORD: {**OLD["static"], **changes}}
    with pytest.raises(error, match=said):
        Record.read(written)


def test_nothing_is_patched_or_exported_on_top_of_a_record_that_cannot_be_read(tmp_path):
    model = build("llama")
    model.config.rope_patch = {"scheme": {"name": "yarm"}}
    with pytest.raises(UnknownScheme, match="did you mean 'yarn'"):
        patch(model, "rerope", window=6)
    assert "cannot be read: there is no scheme" in rope_patch.describe(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnknownScheme, match="did you mean 'yarn'"):
        describe_serving(tmp_path, "yarn:factor=4")
    assert AutoConfig.from_pretrained(tmp_path).rope_patch == {"scheme": {"name": "yarm"}}
    with pytest.raises(NotExpressible):
        rope_patch.export_rope_parameters(get_scheme("rerope:window=6"), config_of("llama"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before, code does not tell the class of a method")
@pytest.mark.parametrize(("spec", "most"), [("rerope:window=6", 20), ("yarn:factor=4", 29)])
def test_a_folder_walks_straight_to_its_model(spec, most):
    stays = walk(spec)
    assert stays[0].function == "from_pretrained"
    assert "_load" in {each.function for each in stays}
    assert len(stays) <= most, "\n".join(f"{each.module}.{each.function}" for each in stays)
    assert not [each for each in stays if each.climbs]
