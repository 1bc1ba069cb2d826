from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml

from rope_patch.cli import cookbook, main
from rope_patch.shipped import recipes_folder

ROOT = recipes_folder().parent
CONFIGS = sorted(path.stem for path in (ROOT / "recipes" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", cookbook.names())
def test_a_recipe_has_all_that_its_commands_name(name):
    recipe = cookbook.find(name)
    assert len(recipe.about.split()) > 4
    assert all((ROOT / place).exists() for place in recipe.files)
    for command in recipe.commands:
        python, script, *words = shlex.split(command)
        assert python == "python"
        assert {script, *(word for word in words if word.startswith("recipes/"))} <= set(recipe.files)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_description_is_run_by_the_script_that_takes_its_keys(name):
    """The scripts' own descriptions refuse keys that they do not know."""
    from rope_patch.evaluation.experiment import Experiment
    from rope_patch.evaluation.retrieval.experiment import Retrieval
    from rope_patch.evaluation.sweep import Sweep
    from rope_patch.finetuning.description import FineTuning
    from rope_patch.training.comparison import Comparison

    readers = {
        "perplexity": Experiment,
        "passkey": Retrieval,
        "sweep": Sweep,
        "finetune": FineTuning,
        "compare_encodings": Comparison,
    }
    recipe = cookbook.find(name)
    script = re.search(r"recipes/(\w+)\.py", recipe.commands[-1])[1]
    if script in readers:
        readers[script].from_yaml(ROOT / "recipes" / "configs" / f"{name}.yaml")
    else:
        keys = yaml.safe_load((ROOT / "recipes" / "configs" / f"{name}.yaml").read_text())
        assert script == ("pretrain_tiny_t5" if "tokenizer" in keys else "pretrain_tiny")


@pytest.mark.parametrize("json_is_asked", [False, True])
def test_the_list(json_is_asked, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["recipes", "list", *["--json"] * json_is_asked]) == 0
    out = capsys.readouterr().out
    if json_is_asked:
        assert [entry["name"] for entry in json.loads(out)] == cookbook.names()
    else:
        assert "…" not in out
        assert max(map(len, out.splitlines())) <= 40
        assert set(cookbook.names()) <= {line.split("│")[1].strip() for line in out.splitlines() if "│" in line}


def test_a_copy_is_what_the_library_has(tmp_path, capsys):
    assert main(["recipes", "copy", "baichuan", "--to", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in ("as_baichuan.py", "perplexity.py", "configs/baichuan.yaml", "assets/tiny-llama/model.safetensors"):
        assert (tmp_path / "recipes" / name).read_bytes() == (ROOT / "recipes" / name).read_bytes()
        assert f"wrote {tmp_path / 'recipes' / name}" in said
    assert [line.strip() for line in said.partition("next:")[2].splitlines() if line] == [
        f"cd {tmp_path}",
        "python recipes/as_baichuan.py runs/tiny-baichuan",
        "python recipes/perplexity.py recipes/configs/baichuan.yaml",
    ]


def test_what_was_changed_is_not_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["recipes", "copy", "compare_demo"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["written"] == ["recipes/compare_encodings.py", "recipes/configs/compare_demo.yaml"]
    assert found["next"] == ["python recipes/compare_encodings.py recipes/configs/compare_demo.yaml"]
    assert main(words) == 0
    assert "everything is there already" in capsys.readouterr().out

    config = tmp_path / "recipes" / "configs" / "compare_demo.yaml"
    ours = config.read_bytes()
    config.write_text("steps: 3\n")
    (tmp_path / "recipes" / "compare_encodings.py").unlink()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "recipes/configs/compare_demo.yaml: there already" in captured.err
    assert captured.out == ""
    assert not (tmp_path / "recipes" / "compare_encodings.py").exists()
    assert main([*words, "--force"]) == 0
    assert config.read_bytes() == ours


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["finetune_tny"], "there is no recipe 'finetune_tny'; did you mean 'finetune_tiny'?"),
        (["../secret"], "there is no recipe '../secret'; allowed: as_baichuan"),
        (["compare_demo", "--to", "file"], "file/recipes: Not a directory"),
    ],
)
def test_wrong_input_is_one_line(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["recipes", "copy", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
