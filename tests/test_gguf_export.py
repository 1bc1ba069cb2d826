"""GGUF files with the frequencies of a scheme, as llama.cpp reads them."""

import math

import numpy as np
import pytest

from rope_patch.cli import main
from rope_patch.errors import NotExpressible
from rope_patch.saving.gguf_export import export_gguf
from tests.evaluation.conftest import TRAINING_LENGTH, tiny_llama
from tests.evaluation.test_checkpoints_gguf import write

gguf = pytest.importorskip("gguf")


@pytest.fixture
def plain(tmp_path):
    write(tmp_path / "plain.gguf", tiny_llama())
    return tmp_path / "plain.gguf"


def test_the_copy_has_the_factors_the_temperature_and_the_longer_context(plain, tmp_path, capsys):
    words = ["export", str(plain), "--scheme", "yarn:factor=4", "--output", str(tmp_path / "out.gguf")]
    assert main(words) == 0
    assert f"up to {4 * TRAINING_LENGTH} tokens" in capsys.readouterr().out
    before, after = gguf.GGUFReader(plain), gguf.GGUFReader(tmp_path / "out.gguf")
    assert after.fields["llama.context_length"].contents() == 4 * TRAINING_LENGTH
    assert after.fields["llama.rope.scaling.attn_factor"].contents() == pytest.approx(0.1 * math.log(4) + 1)
    kept = before.fields.keys() - {"llama.context_length", "GGUF.kv_count", "GGUF.tensor_count"}
    assert all(after.fields[name].contents() == before.fields[name].contents() for name in kept)
    tensors = {tensor.name: tensor.data for tensor in after.tensors}
    factors = tensors.pop("rope_freqs.weight")
    assert all(np.array_equal(tensors.pop(tensor.name), tensor.data) for tensor in before.tensors)
    assert not tensors
    # the ramp of YaRN keeps the first pair and divides the last ones by 4
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(4)
    assert (np.diff(factors) > -1e-5).all()


@pytest.mark.parametrize("scheme", ["rerope:window=8", "dynamic_yarn"])
def test_only_static_frequencies_can_be_written(plain, tmp_path, scheme):
    with pytest.raises(NotExpressible):
        export_gguf(plain, tmp_path / "out.gguf", scheme, length=64)
    assert not (tmp_path / "out.gguf").exists()


def test_a_length_below_one_is_refused(plain, tmp_path):
    with pytest.raises(NotExpressible, match="length=-3 is not allowed"):
        export_gguf(plain, tmp_path / "out.gguf", "mrrope:factor=4", length=-3)


def test_factors_are_written_once(plain, tmp_path):
    export_gguf(plain, tmp_path / "out.gguf", "pi:factor=2")
    with pytest.raises(NotExpressible, match=r"holds rope_freqs\.weight"):
        export_gguf(tmp_path / "out.gguf", tmp_path / "again.gguf", "pi:factor=2")
    with pytest.raises(FileExistsError):
        export_gguf(plain, tmp_path / "out.gguf", "pi:factor=2")
