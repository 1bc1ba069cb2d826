"""Two processes on gloo give what one gives. `work` is what each of the two does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import distributed

from rope_patch import AlreadyPatched, patch
from rope_patch.errors import EvaluationError
from rope_patch.evaluation import perplexity, sharing
from rope_patch.evaluation.perplexity import measure
from rope_patch.evaluation.results import ResultFile, weights_fingerprint

from ..processes import run_two
from .conftest import byte_tokenizer, documents, tiny_llama

CORPUS = documents(45, 50, 37, 20)
SCHEMES = ["plain", "pi:factor=auto", "rerope:window=8+logn"]
MEASUREMENTS = {
    "last": {"targets": 8},
    "by_position": {},
    "sliding": {"stride": 5},
    "disjoint": {},
    "yarn_compat": {"stride": 7},
}


def measured(protocol, results=None):
    schemes = ["plain"] if protocol == "by_position" else SCHEMES
    settings = MEASUREMENTS[protocol]
    return measure(
        tiny_llama(), byte_tokenizer(), CORPUS, schemes, [16, 32], protocol=protocol, results=results, **settings
    )


def lasting(rows):
    """Rows without what the clock says, and without the sources, which somebody may be editing meanwhile."""
    passing = {"seconds": 0.0, "tokens_per_second": 0.0, "code": "", "commit": None}
    return [json.loads(dataclasses.replace(row, **passing).to_json()) for row in rows]


def at_rank(number):
    """Fails on one process alone."""
    if sharing.is_main() == (number == 0):
        raise EvaluationError(f"rank {number} is out of memory")
    return number


def raised(action):
    with pytest.raises(EvaluationError) as caught:
        action()
    return str(caught.value)


def passes_run(protocol):
    """How many forward passes this process ran."""
    calls = []
    chunked_nll = perplexity.chunked_nll
    perplexity.chunked_nll = lambda *arguments: calls.append(1) or chunked_nll(*arguments)
    try:
        measured(protocol)
    finally:
        perplexity.chunked_nll = chunked_nll
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
    settings = {"protocol": "sliding", "stride": 5, "name": "tiny"}
    rows = lasting(measure(model, byte_tokenizer(), CORPUS, ["rerope:window=8"], [16, 32], **settings))
    spread = all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    return rows, spread


def work(rank: int, folder: Path) -> None:
    sharing.join("cpu")
    results = sharing.only_main(lambda: ResultFile(folder / "rows.jsonl"))
    found = {
        "rows": {protocol: lasting(measured(protocol, results)) for protocol in MEASUREMENTS},
        "again": passes_run_with(results),
        "passes": {protocol: passes_run(protocol) for protocol in MEASUREMENTS},
        "raised": [
            raised(lambda: sharing.each(at_rank, [1, 1, 1])),
            raised(lambda: sharing.on_main(lambda: at_rank(0))),
            raised(lambda: measure(tiny_llama(), byte_tokenizer(), CORPUS, ["plain"], [512])),
        ],
        "fingerprint": sharded_fingerprint(),
        "in_training": in_training(),
        "in_sharded_training": in_sharded_training(),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


def passes_run_with(results):
    """The rows that only the main process has read are not measured again on any."""
    chunked_nll = perplexity.chunked_nll
    perplexity.chunked_nll = None
    try:
        return lasting(measured("sliding", results))
    finally:
        perplexity.chunked_nll = chunked_nll


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("together")
    assert run_two(work, folder) == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], folder


@pytest.mark.parametrize("protocol", MEASUREMENTS)
def test_two_processes_give_the_rows_of_one(together, protocol):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the two have: threads divide a sum in their own way
    try:
        alone = lasting(measured(protocol))
    finally:
        torch.set_num_threads(threads)
    for found in together[0]:
        assert found["rows"][protocol] == alone


def test_each_row_is_written_once(together):
    found, folder = together
    written = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert len(written) == sum(len(rows) for rows in found[0]["rows"].values())
    assert found[0]["again"] == found[1]["again"] == found[0]["rows"]["sliding"]


def test_both_processes_run_equally_many_passes(together):
    first, second = (found["passes"] for found in together[0])
    assert first == second
    assert first["last"] == len(SCHEMES) * 2 * 2  # three documents: the second process runs the last one once more


def test_an_error_on_one_process_is_raised_on_both(together):
    for found in together[0]:
        assert found["raised"][0] == "rank 1 is out of memory"
        assert found["raised"][1] == "rank 0 is out of memory"
        assert "a context of 512 tokens needs documents of 513 tokens" in found["raised"][2]


def test_weights_that_are_spread_over_processes_have_the_same_fingerprint(together):
    for found in together[0]:
        assert found["fingerprint"] == weights_fingerprint(tiny_llama())


def test_a_patched_model_in_training_is_measured_as_it_is(together):
    alone = measure(tiny_llama(), byte_tokenizer(), CORPUS, ["rerope:window=8"], [16, 32], targets=8)
    for found in together[0]:
        assert found["in_training"] == lasting(alone)


def test_a_patched_model_whose_weights_are_spread_is_measured_as_it_is(together):
    settings = {"protocol": "sliding", "stride": 5, "name": "tiny"}
    alone = measure(tiny_llama(), byte_tokenizer(), CORPUS, ["rerope:window=8"], [16, 32], **settings)
    for found in together[0]:
        rows, still_spread = found["in_sharded_training"]
        assert rows == lasting(alone)
        assert still_spread


def test_items_of_a_turn_are_alike_and_all_are_done(monkeypatch):
    monkeypatch.setattr(sharing, "world", lambda: 3)
    turns = sharing._turns(["a", "bb", "c", "dd", "e", "f"], len)
    assert turns == [[0, 2, 4], [5, 5, 5], [1, 3, 3]]
    shares = [[f"{index}" for index in (turn[rank] for turn in turns)] for rank in range(3)]
    assert sharing._in_order(shares, turns) == ["0", "1", "2", "3", "4", "5"]


def test_one_process_alone_needs_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    sharing.join("cuda:7")
    assert sharing.is_main()
    assert sharing.own_device() is None
    assert sharing.on_main(lambda: 3) == sharing.only_main(lambda: 3) == 3
    assert sharing.each(lambda item: -item, [1, 2, 3]) == [-1, -2, -3]
    assert sharing.share("abc") == [0, 1, 2]


def test_several_processes_on_one_device_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EvaluationError, match="device 'cuda:1': of several processes each takes its own"):
        sharing.join("cuda:1")


def test_a_patched_model_is_measured_as_it_is(monkeypatch):
    model, tokenizer = tiny_llama(), byte_tokenizer()
    alone = measure(model, tokenizer, CORPUS, ["rerope:window=8+logn"], [16, 32], targets=8)
    carried = patch(model, "rerope:window=8+logn")
    monkeypatch.setattr(perplexity, "patch", None)  # never taken apart
    for spec in ("rerope:window=8+logn", carried.scheme):
        rows = measure(model, tokenizer, CORPUS, [spec], [16, 32], targets=8)
        assert lasting(rows) == lasting(dataclasses.replace(row, line=str(spec)) for row in alone)
    assert rows[0].mount == carried.plan.mounts() == "late"
    for other in ("plain", "rerope:window=9+logn"):
        with pytest.raises(AlreadyPatched, match=r"carries rerope:window=8.*logn.*before measuring"):
            measure(model, tokenizer, CORPUS, ["rerope:window=8+logn", other], [16, 32], targets=8)
    carried.remove()
