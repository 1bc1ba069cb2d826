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


def test_losses_are_drawn_and_nothing_that_is_scored_is_trained_on(tmp_path, monkeypatch):
    taken, tokens = [], gpu.Stages._tokens
    monkeypatch.setattr(gpu, "WINDOWS", 2)

    def recorded(stages, start, count):
        taken.append((start, start + count))
        return tokens(stages, start, count)

    monkeypatch.setattr(gpu.Stages, "_tokens", recorded)
    assert gpu.main(words(tmp_path, "far", "finetune")) == 0
    rows = sorted(span for span in taken if span[1] - span[0] == 512)  # windows have a target more
    assert rows[0][0] >= max(end for start, end in taken if (start, end) not in rows)
    assert len(set(rows)) == 2
    assert (tmp_path / "losses.png").stat().st_size > 5000
    found = results(tmp_path)
    assert found["far/rerope:window=128+logn"]["result"].keys() == found["far/plain"]["result"].keys()


def test_a_text_that_is_too_short_is_an_error_and_within_l_there_is_no_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "WINDOWS", 2)
    within = ["--device", "cpu", "--length", "256", "--steps", "1", "--out", str(tmp_path), "--only", "far"]
    assert gpu.main(within) == 0
    assert not (tmp_path / "losses.png").exists()
    monkeypatch.setattr(gpu.Stages, "_text", torch.ones(1, 600, dtype=torch.long))
    assert gpu.main([*within[:-2], "--only", "finetune"]) == 1
    assert "600 tokens" in results(tmp_path)["finetune/yarn:target=256"]["error"]
