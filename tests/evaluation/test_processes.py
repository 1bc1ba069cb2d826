"""Two processes on gloo give what one gives. `work` is what each of the two does."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from rope_patch import patch
from rope_patch.errors import EvaluationError
from rope_patch.evaluation.measured_model import weights_fingerprint
from rope_patch.evaluation.processes import joined
from rope_patch.evaluation.protocols import protocol as shared
from rope_patch.evaluation.row import Rows
from rope_patch.saving import loading

from ..processes import run_two
from .conftest import byte_tokenizer, documents, measure, tiny_llama

CORPUS = documents(45, 50, 37, 20)
SCHEMES = ["plain", "pi:target=auto", "rerope:window=8+logn"]
MEASUREMENTS = {
    "last": {"targets": 8},
    "by_position": {},
    "sliding": {"stride": 5},
    "disjoint": {},
    "yarn_compat": {"stride": 7},
}
SHARDED = {"protocol": "sliding", "stride": 5, "name": "tiny"}


def measured(protocol, results=None):
    schemes = ["plain"] if protocol == "by_position" else SCHEMES
    settings = {"protocol": protocol, "results": results, **MEASUREMENTS[protocol]}
    return measure(tiny_llama(), byte_tokenizer(), CORPUS, schemes, [16, 32], **settings)


def lasting(rows):
    """Rows without times, and without the commit, which may change meanwhile."""
    passing = {"seconds": 0.0, "tokens_per_second": 0.0, "commit": None}
    return [json.loads(dataclasses.replace(row, **passing).to_json()) for row in rows]


def passes_run(protocol, results=None):
    """How many forward passes this process ran."""
    calls = []
    chunked_nll = shared.chunked_nll
    shared.chunked_nll = lambda *arguments: calls.append(1) or chunked_nll(*arguments)
    try:
        measured(protocol, results)
    finally:
        shared.chunked_nll = chunked_nll
    return len(calls)


def sharded_fingerprint():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model, mesh = tiny_llama(), init_device_mesh("cpu", (2,))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shares = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(module, name, torch.nn.Parameter(shares))
    return weights_fingerprint(model)


def in_training():
    """A patched model inside DistributedDataParallel is measured as it is."""
    model = tiny_llama()
    patch(model, "rerope", window=8)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    return lasting(measure(wrapped, byte_tokenizer(), CORPUS, ["rerope:window=8"], [16, 32], targets=8))


def in_sharded_training():
    """The same inside FSDP2, where embedding and head are spread and gathered with the outermost module."""
    from torch.distributed.fsdp import fully_shard

    model = tiny_llama()
    patch(model, "rerope", window=8)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    rows = lasting(measure(model, byte_tokenizer(), CORPUS, ["rerope:window=8"], [16, 32], **SHARDED))
    return rows, all(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def work(rank: int, folder: Path) -> None:
    process = joined(cpu=True)
    os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    results = Rows(folder / "rows.jsonl")
    found = {
        "rows": {protocol: lasting(measured(protocol, results)) for protocol in MEASUREMENTS},
        "again": passes_run("sliding", Rows(folder / "rows.jsonl") if rank == 0 else None),
        "passes": passes_run("last"),
        "fingerprint": sharded_fingerprint(),
        "in_training": in_training(),
        "in_sharded_training": in_sharded_training(),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    process.destroy_process_group()


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("together")
    assert run_two(work, folder) == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], folder


@pytest.fixture(autouse=True)
def one_thread():
    """As the two have: threads divide a sum in their own way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("protocol", MEASUREMENTS)
def test_two_processes_give_the_rows_of_one(together, protocol):
    alone = lasting(measured(protocol))
    for found in together[0]:
        assert found["rows"][protocol] == alone


def test_each_row_is_written_once_and_measured_once(together):
    found, folder = together
    written = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert len(written) == sum(len(rows) for rows in found[0]["rows"].values())
    assert [each["again"] for each in found] == [0, 0]


def test_the_two_divide_the_windows(together):
    # six windows of three documents, under each scheme at both lengths
    assert [found["passes"] for found in together[0]] == [len(SCHEMES) * 2 * 3] * 2


def test_the_first_alone_tells_how_far_it_is(together):
    lines = [
        [line for line in (together[1] / f"{rank}.log").read_text().splitlines() if "elapsed" in line]
        for rank in (0, 1)
    ]
    assert lines[1] == []
    assert [line.partition(": loss")[0] for line in lines[0][:6]] == [
        "1 of 6: plain checkpoint at 16",
        "2 of 6: PI at 16",
        "3 of 6: ReRoPE, w = 8, log-n at 16",
        "4 of 6: plain checkpoint at 32",
        "5 of 6: PI at 32",
        "6 of 6: ReRoPE, w = 8, log-n at 32",
    ]


def test_weights_that_are_spread_over_processes_have_the_same_fingerprint(together):
    for found in together[0]:
        assert found["fingerprint"] == weights_fingerprint(tiny_llama())


def test_a_patched_model_in_training_is_measured_as_it_is(together):
    alone = measure(tiny_llama(), byte_tokenizer(), CORPUS, ["rerope:window=8"], [16, 32], targets=8)
    for found in together[0]:
        assert found["in_training"] == lasting(alone)


def test_a_patched_model_whose_weights_are_spread_is_measured_as_it_is(together):
    alone = measure(tiny_llama(), byte_tokenizer(), CORPUS, ["rerope:window=8"], [16, 32], **SHARDED)
    for found in together[0]:
        rows, still_spread = found["in_sharded_training"]
        assert rows == lasting(alone)
        assert still_spread


def test_several_processes_on_one_device_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EvaluationError, match="device 'cuda:1': with several processes each uses its own"):
        loading.load_model(loading.default_checkpoint(), device="cuda:1")
