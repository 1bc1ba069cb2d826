"""The model `rope_patch` of lm-evaluation-harness: what it loads, under which scheme, and tasks from local data."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import yaml

import rope_patch
from rope_patch.errors import EvaluationError, InvalidField, NoCheckpoint, UnknownScheme
from rope_patch.patching import find_handle
from rope_patch.saving.loading import load_tokenizer

from .conftest import TRAINING_LENGTH, byte_tokenizer, tiny_llama

lm_eval = pytest.importorskip("lm_eval")

from lm_eval._cli.utils import key_val_to_dict  # noqa: E402  which needs it
from lm_eval.api.registry import Registry  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from rope_patch.evaluation.lm_eval import RopePatchLM, main  # noqa: E402

ROOT = Path(__file__).parents[2]
TEXT = "a text of bytes"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """With an end of text, which the harness adds to what ends an answer."""
    folder, tokenizer = tmp_path_factory.mktemp("lm_eval") / "checkpoint", byte_tokenizer()
    tokenizer.eos_token = "<s>"
    tiny_llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def wrapped(checkpoint, **arguments):
    return RopePatchLM(str(checkpoint), device="cpu", **arguments)


def nll_of(model, text=TEXT):
    """The harness's loss of a text, whose first token follows the start of text."""
    from lm_eval.api.instance import Instance

    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    return -model.loglikelihood_rolling([request], disable_tqdm=True)[0]


def true_nll(model, checkpoint, text=TEXT):
    ids = load_tokenizer(str(checkpoint))(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        scores = model(torch.tensor([[0, *ids]])).logits[0, :-1].double().log_softmax(-1)
    return -scores[torch.arange(len(ids)), torch.tensor(ids)].sum().item()


def test_the_entry_point_of_later_releases_gives_the_class():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lm_eval.models"]
    registry = Registry("model")
    for name, value in points.items():
        registry.register(name, target=EntryPoint(name, value, "lm_eval.models"))
    assert registry.get("rope_patch") is RopePatchLM


def test_without_a_scheme_it_is_hf(checkpoint):
    model = wrapped(checkpoint)
    assert nll_of(model) == nll_of(HFLM(str(checkpoint), device="cpu"))
    assert model.max_length == TRAINING_LENGTH
    assert model.get_model_info()["scheme"] == "plain"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_under_a_scheme_the_loss_is_that_of_the_patched_model(checkpoint, batch_size):
    model = wrapped(checkpoint, scheme="rerope:window=4+logn", batch_size=batch_size)
    truth = rope_patch.from_pretrained(checkpoint).eval()
    plain = true_nll(truth, checkpoint, 3 * TEXT)
    rope_patch.patch(truth, "rerope:window=4+logn")
    assert model.max_length == 4 * TRAINING_LENGTH
    assert nll_of(model, 3 * TEXT) == pytest.approx(true_nll(truth, checkpoint, 3 * TEXT), rel=1e-5)
    assert nll_of(model, 3 * TEXT) != pytest.approx(plain, rel=1e-4)
    assert model.get_model_info()["max_length"] == 64
    assert model.get_model_info()["training_length"] == 16


SPELLED = {
    "one field": "scheme=yarn:factor=4",
    "semicolons": "scheme=yarn:factor=4;beta_fast=16",
    "quotes": 'scheme="yarn:factor=4,beta_fast=16"',
    "brackets": "scheme=layers:[0=pi:factor=2;rest=rerope:window=4]",
}


@pytest.mark.parametrize("kind", SPELLED)
def test_a_scheme_comes_through_the_harness_whole(checkpoint, kind):
    arguments = key_val_to_dict(f"pretrained={checkpoint},{SPELLED[kind]},max_length=64")
    model = RopePatchLM.create_from_arg_obj(arguments, {"device": "cpu"})
    spec = SPELLED[kind].partition("=")[2].strip('"')
    expected = rope_patch.get_scheme(spec if "[" in spec else spec.replace(";", ","))
    assert find_handle(model.model).scheme == expected
    if kind != "quotes":  # which the older way to split does not know
        again = RopePatchLM.create_from_arg_string(f"pretrained={checkpoint},{SPELLED[kind]}", {"device": "cpu"})
        assert find_handle(again.model).scheme == expected


@pytest.mark.parametrize("scheme", [{"name": "yarn", "factor": 4}, {"rope_type": "yarn", "factor": 4.0}])
def test_a_scheme_may_be_a_mapping_of_a_yaml_file(checkpoint, scheme):
    assert find_handle(wrapped(checkpoint, scheme=scheme).model).scheme == rope_patch.get_scheme("yarn:factor=4")


@pytest.mark.parametrize("split", [key_val_to_dict, "simple_parse_args_string"])
def test_a_field_that_a_comma_cuts_off_is_named_with_the_line_to_write(checkpoint, split):
    if isinstance(split, str):
        from lm_eval.utils import simple_parse_args_string as split
    arguments = split(f"pretrained={checkpoint},scheme=YaRN:factor=4,beta_fast=16")
    with pytest.raises(EvaluationError, match=r"beta_fast=16: .* Write scheme=YaRN:factor=4;beta_fast=16 with"):
        RopePatchLM.create_from_arg_obj(arguments, {"device": "cpu"})


def test_auto_is_the_longest_prompt(checkpoint):
    model = wrapped(checkpoint, scheme="yarn:target=auto", max_length=96)
    assert find_handle(model.model).scheme == rope_patch.get_scheme("yarn:factor=6.0")
    assert model.max_length == 96
    with pytest.raises(InvalidField, match=r"target='auto' is not allowed.* Or add max_length=N"):
        wrapped(checkpoint, scheme="yarn:target=auto")


@pytest.fixture
def recorded(checkpoint, tmp_path):
    """A folder that was saved under a scheme."""
    model = rope_patch.from_pretrained(checkpoint)
    rope_patch.patch(model, "rerope:window=4")
    model.save_pretrained(tmp_path / "recorded")
    load_tokenizer(str(checkpoint)).save_pretrained(tmp_path / "recorded")
    return tmp_path / "recorded"


@pytest.mark.parametrize(
    ("asked", "scheme"), [(None, "rerope:window=4"), ("plain", None), ("pi:factor=2", "pi:factor=2")]
)
def test_a_record_holds_unless_a_scheme_is_asked_for(recorded, asked, scheme):
    model = wrapped(recorded, scheme=asked)
    handle = find_handle(model.model)
    assert handle is None if scheme is None else handle.scheme == rope_patch.get_scheme(scheme)
    truth = rope_patch.from_pretrained(recorded).eval()
    rope_patch.unpatch(truth)
    if scheme:
        rope_patch.patch(truth, scheme)
    assert nll_of(model) == pytest.approx(true_nll(truth, recorded), rel=1e-5)


@pytest.fixture
def adapters(checkpoint, tmp_path):
    """A folder of adapters that were trained under a scheme."""
    peft = pytest.importorskip("peft")
    base = rope_patch.from_pretrained(checkpoint)
    rope_patch.patch(base, "pi:factor=2")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(base, settings).save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


@pytest.mark.parametrize(("asked", "scheme"), [(None, "pi:factor=2"), ("rerope:window=4", "rerope:window=4")])
@pytest.mark.parametrize("alone", [True, False])
def test_adapters_bring_their_scheme(checkpoint, adapters, alone, asked, scheme):
    model = wrapped(adapters, scheme=asked) if alone else wrapped(checkpoint, peft=str(adapters), scheme=asked)
    truth = rope_patch.from_pretrained(adapters).eval()
    if asked:
        rope_patch.unpatch(truth)
        rope_patch.patch(truth, asked)
    assert find_handle(model.model).scheme == rope_patch.get_scheme(scheme)
    assert nll_of(model) == pytest.approx(true_nll(truth, checkpoint), rel=1e-5)


def test_a_gguf_file_brings_its_tokenizer(tmp_path):
    pytest.importorskip("gguf")
    from tests.evaluation.test_checkpoints_gguf import write

    write(tmp_path / "tiny.gguf", tiny_llama())
    model = wrapped(tmp_path / "tiny.gguf", scheme="rerope:window=4", dtype="float32")
    assert find_handle(model.model).scheme == rope_patch.get_scheme("rerope:window=4")
    assert model.tokenizer("a").input_ids == load_tokenizer(str(tmp_path / "tiny.gguf"))("a").input_ids


def test_a_model_over_several_devices_and_other_numbers(checkpoint):
    model = wrapped(checkpoint, scheme="rerope:window=4", parallelize=True, dtype="bfloat16")
    assert model.model.dtype == torch.bfloat16
    assert find_handle(model.model) is not None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scheme": "yran:factor=4"}, UnknownScheme, "there is no scheme 'yran'"),
        ({"delta": "x"}, EvaluationError, "delta='x': model rope_patch loads no such weights; use --model hf"),
        ({"gguf_file": "x.gguf"}, EvaluationError, "gguf_file='x.gguf': write pretrained=.*x.gguf"),
        ({"peft": "/nowhere"}, NoCheckpoint, "there is no checkpoint '/nowhere'"),
    ],
)
def test_what_it_cannot_do_is_said(checkpoint, arguments, error, message):
    with pytest.raises(error, match=message):
        wrapped(checkpoint, **arguments)


def test_a_loaded_model_goes_to_the_harness_itself(model):
    with pytest.raises(EvaluationError, match="pretrained=LlamaForCausalLM: a path or a Hub ID is expected"):
        RopePatchLM(model)


# --- tasks ------------------------------------------------------------------------------------------------------------


def dataset(folder, config, split, rows):
    """A folder that `datasets` takes for a dataset of the Hub, as docs/how-to/lm-eval.md writes it."""
    (folder / "data").mkdir(parents=True)
    (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [{"split": split, "path": f"data/{split}.jsonl"}]
    header = yaml.safe_dump({"configs": [{"config_name": config, "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{header}---\n")


def test_tasks_read_local_data_under_the_name_of_their_dataset(checkpoint, tmp_path, monkeypatch):
    fact = {"input": "Mary went to the kitchen.", "question": "Where is Mary?", "target": "kitchen"}
    dataset(tmp_path / "RMT-team" / "babilong-1k-samples", "4k", "qa1", [fact, fact])
    question = {"context": "Forty houses.", "question": "How many?", "choices": ["40", "4", "1", "2"], "answer": 0}
    dataset(tmp_path / "recursal" / "longbench-v2", "table_qa", "train", [question])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tasks = TaskManager(metadata={"max_seq_lengths": "4k"})
    model = wrapped(checkpoint, scheme="rerope:window=4", max_length=2048)
    found = lm_eval.simple_evaluate(
        model, tasks=["babilong_qa1", "longbench2_table"], task_manager=tasks, bootstrap_iters=0, log_samples=True
    )
    assert {name: len(samples) for name, samples in found["samples"].items()} == {
        "babilong_qa1": 2,
        "longbench2_table": 1,
    }
    assert found["config"]["scheme"] == "rerope:window=4"


def test_the_command_is_that_of_the_harness(checkpoint, tmp_path, monkeypatch, capsys):
    (tmp_path / "book.txt").write_text(TEXT)
    task = {
        "task": "book",
        "dataset_path": "text",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "book.txt")}, "sample_by": "document"},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    }
    (tmp_path / "book.yaml").write_text(yaml.safe_dump(task))
    words = ["--model", "rope_patch", "--model_args", f"pretrained={checkpoint},scheme=pi:factor=2", "--device", "cpu"]
    words += ["--tasks", "book", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    main()
    (written,) = (tmp_path / "out").rglob("results_*.json")
    result = json.loads(written.read_text())
    model = rope_patch.from_pretrained(checkpoint).eval()
    rope_patch.patch(model, "pi:factor=2")
    nll = torch.tensor(true_nll(model, checkpoint) / len(TEXT))
    assert result["results"]["book"]["byte_perplexity,none"] == pytest.approx(nll.exp().item(), rel=1e-5)
    assert result["config"]["scheme"] == "pi:factor=2"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words[:3], f"pretrained={checkpoint},scheme=pi", *words[4:]])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.splitlines()[-1].startswith("rope-patch: pi needs factor")


@pytest.mark.slow
def test_a_needle_of_ruler_is_made_on_the_spot(tmp_path):
    pytest.importorskip("nltk")
    folder = ROOT / "recipes" / "assets" / "tiny-llama"
    arguments = f"pretrained={folder},scheme=rerope:window=128+logn,max_length=1024"
    command = [
        sys.executable,
        "-m",
        "rope_patch.evaluation.lm_eval",
        "--model",
        "rope_patch",
        "--model_args",
        arguments,
    ]
    command += ["--tasks", "niah_single_1", "--metadata", '{"max_seq_lengths": [512]}', "--limit", "1"]
    command += ["--device", "cpu", "--output_path", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (written,) = tmp_path.rglob("results_*.json")
    assert json.loads(written.read_text())["results"]["niah_single_1"]["512,none"] in (0, 1)
