"""`make gpu` at tiny sizes on a CPU: a part that is done is not measured again, and a cut fine-tune goes on."""

import json

import pytest
import torch

from benchmarks import gpu


def words(out, *only):
    sizes = ["--length", "512", "--steps", "2", "--rows", "2", "--prompt", "16", "--new", "2"]
    return ["--device", "cpu", *sizes, "--out", str(out), "--only", *only]


def results(out):
    return json.loads((out / "gpu.json").read_text())["done"]


def test_parts_that_are_done_are_kept_and_failed_ones_are_tried_again(tmp_path, monkeypatch):
    asked = []

    def serve(stages, scheme, cudnn):
        asked.append((scheme, cudnn))
        if len(asked) == 2:
            raise RuntimeError("out of memory")
        return {"tokens_per_second": 1.0}

    monkeypatch.setattr(gpu.Stages, "_served", serve)
    assert gpu.main(words(tmp_path, "serve")) == 1
    assert results(tmp_path)["serve/plain without cuDNN"]["error"] == "RuntimeError: out of memory"
    assert gpu.main(words(tmp_path, "serve")) == 0
    assert asked == [(None, True), (None, False), ("rerope:window=128", False), (None, False)]


def test_a_cut_fine_tune_goes_on_at_its_last_step(tmp_path, monkeypatch):
    save = torch.save

    def interrupted(state, path):
        if len(state["losses"]) == 2:
            path.write_bytes(b"half a file")
            raise KeyboardInterrupt
        save(state, path)

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(words(tmp_path / "cut", "finetune"))
    monkeypatch.setattr(torch, "save", save)
    for out in ("cut", "whole"):
        assert gpu.main(words(tmp_path / out, "finetune")) == 0
    cut, whole = (results(tmp_path / out)["finetune/yarn:target=512"]["result"] for out in ("cut", "whole"))
    assert (cut["resumed_at"], whole["resumed_at"]) == (1, 0)
    assert cut["losses"] == whole["losses"]


def test_nothing_is_measured_without_the_device(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu.main(["--only", "serve"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
