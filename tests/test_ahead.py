"""A compiled token for a GPU that is not here: what it starts, beside the unpatched model's."""

import pytest
import torch

from benchmarks import ahead
from benchmarks.comparison import Shape

SMALL = Shape(512, 4, 2, 64, "bfloat16")
on_cuda_builds = pytest.mark.skipif(bool(ahead.missing()), reason=ahead.missing())


@on_cuda_builds
@pytest.mark.filterwarnings("ignore::rope_patch.RopePatchWarning")
def test_a_token_by_one_rotation_starts_as_many_kernels_as_a_plain_one():
    plain = ahead.token(None, layers=1, shape=SMALL)
    assert plain.kernels > 8
    for scheme in ("rerope", "dca"):
        found = ahead.token(scheme, layers=1, shape=SMALL)
        assert found.kernels + found.calls <= plain.kernels + plain.calls + 2, (found, plain)
        assert found.skipped == 0
        assert ahead.token(scheme, "traced", layers=1, shape=SMALL).kernels > found.kernels


@on_cuda_builds
def test_a_graph_with_a_tensor_of_the_cpu_is_skipped():
    with ahead._absent_gpu(), torch._subclasses.FakeTensorMode():
        on_gpu, on_cpu = torch.ones(8, device=ahead.DEVICE), torch.ones(8)
        graph = torch.fx.symbolic_trace(lambda x, y: (x + 1, y + 1))
        assert ahead._lowered(graph, [on_gpu, on_cpu])["skipped"] == 1


def test_a_build_without_cuda_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert ahead.main([]) == 2
    assert "pip install torch==2.11.0" in capsys.readouterr().err
