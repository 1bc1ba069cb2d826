"""Copy a GGUF file with the frequencies of a scheme in it, as llama.cpp reads them."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np

from rope_patch.errors import NotExpressible
from rope_patch.models.rope_parameters import export_rope_parameters
from rope_patch.saving.export import check_length, extended_length
from rope_patch.saving.gguf import load_gguf_config
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.registry import get_scheme

_FREQUENCIES = "rope_freqs.weight"


def export_gguf(source: str | Path, output: str | Path, scheme: str | Scheme, length: int | None = None) -> int:
    """Write a copy of a GGUF file whose tensor `rope_freqs.weight` divides the frequencies of the file, as llama.cpp's
    graph for Llama does (`src/models/llama.cpp`), and whose `rope.scaling.attn_factor` multiplies cos and sin.

    Args:
        source: a GGUF file of the architecture `llama`.
        output: a new file.
        scheme: a scheme with static frequencies.
        length: the context to serve in tokens; default the scheme's factor times L.

    Returns:
        the context length of the new file in tokens.

    Raises:
        NotExpressible: the file has another architecture or its own factors, or see `equal_lists`.
        NoCheckpoint, UnsupportedModel: see `load_gguf`.
        FileExistsError: `output` exists.
    """
    if Path(output).exists():
        raise FileExistsError(errno.EEXIST, "it already exists; choose another output, or remove it", str(output))
    check_length(length)
    scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
    config = load_gguf_config(source)
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    if arch != "llama" or any(tensor.name == _FREQUENCIES for tensor in reader.tensors):
        raise NotExpressible(
            f"{source} has the architecture {arch!r}, or already holds {_FREQUENCIES}; llama.cpp reads factors only in "
            "files of 'llama', and only one set of them"
        )
    length = length or extended_length(scheme, config)
    if length is None:
        raise NotExpressible(f"{scheme} does not define a context length; set a length in tokens")
    parameters = export_rope_parameters(scheme, config, as_lists=length)
    factors = np.array(parameters["long_factor"], dtype=np.float32)
    written = {
        f"{arch}.context_length": (length, GGUFValueType.UINT32),
        f"{arch}.rope.scaling.attn_factor": (parameters["attention_factor"], GGUFValueType.FLOAT32),
    }
    writer = GGUFWriter(output, arch)
    for name, field in reader.fields.items():
        if name not in written and name != "general.architecture" and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for name, (value, kind) in written.items():
        writer.add_key_value(name, value, kind)
    writer.add_tensor(_FREQUENCIES, factors)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return length
