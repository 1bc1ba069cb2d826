from __future__ import annotations

import contextlib
import io
import shutil
import subprocess

import pytest

from rope_patch.cli import main
from rope_patch.cli.completion import SHELLS

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 ))
_shtab_rope_patch rope-patch "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
echo "${COMPREPLY[*]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert main(["completion", shell]) == 0
        (folder / shell).write_text(said.getvalue())
    return folder


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_accept_their_script(shell, scripts):
    text = (scripts / shell).read_text()
    assert "rope-patch" in text
    assert "leaky_rerope" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", scripts / shell], check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("pe", "perplexity"),
        ("perplexity --proto", "--protocol"),
        ("perplexity --protocol yarn_", "yarn_compat yarn_truncate"),
        ("perplexity --scheme leaky", "leaky_rerope"),
        ("compare --schemes rope kerp", "kerple"),
        ("finetune --method lora_", "lora_norms_embeddings"),
        ("plot wave", "wavelengths"),
        ("recipes co", "copy"),
        ("recipes copy passkey_", "passkey_llama passkey_tiny"),
        ("sweep desc", "description.yaml"),
        ("describe --model check", "checkpoints"),
        ("completion z", "zsh"),
    ],
)
def test_bash_completes(typed, offered, scripts, tmp_path):
    (tmp_path / "description.yaml").touch()
    (tmp_path / "description.txt").touch()
    (tmp_path / "checkpoints").mkdir()
    command = ["bash", "-c", ASK, "bash", scripts / "bash", "rope-patch", *typed.split()]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.strip() == offered
