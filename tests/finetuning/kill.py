"""Kill a fine-tuning for good, again and again, and compare what it leaves with an undisturbed one.

python -m tests.finetuning.kill [CONFIG] [KILLS]
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from rope_patch.finetuning.experiment import folder_name
from rope_patch.training.loop import read_log
from rope_patch.training.state import STATE

ROOT = Path(__file__).parents[2]


def finetune(config: Path, output: Path) -> subprocess.Popen[bytes]:
    """The command line in a process of its own, which sums in the order in which this one does."""
    threads = str(torch.get_num_threads())
    command = [sys.executable, "-m", "rope_patch.cli", "finetune", str(config), "--output", str(output)]
    with (output.parent / "messages.txt").open("ab") as messages:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=messages,
            stderr=messages,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads},
        )


def kill_while_training(process: subprocess.Popen[bytes], folder: Path, choice: random.Random) -> str:
    """SIGKILL after a few more states, at any moment or in the middle of a save; "ended" where it was over before."""
    state, aside = folder / STATE, folder / f"{STATE}.tmp"
    in_a_save, wanted, seen, last = choice.random() < 0.5, choice.randint(2, 6), 0, _time_of(state)
    while seen < wanted or (in_a_save and not aside.exists()):
        if process.poll() is not None:
            return "ended"
        if (now := _time_of(state)) != last:
            seen, last = seen + 1, now
        time.sleep(0.0005)
    if not in_a_save:
        time.sleep(choice.random() * 0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return "killed in a save" if aside.exists() else "killed"


def _time_of(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def run_to_the_end(config: Path, output: Path) -> None:
    if (status := finetune(config, output).wait()) != 0:
        raise RuntimeError(f"exit status {status}: {(output.parent / 'messages.txt').read_text()[-2000:]}")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = (folder / "checkpoint").glob("*.safetensors")
    return load_file(file)


def log_without_clock(folder: Path) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read_log(folder)]


def differences(left: Path, right: Path, folder: str) -> list[str]:
    """What two outputs disagree on: nothing, if the kills left no trace."""
    ours, theirs = weights(left / folder), weights(right / folder)
    found = [name for name in ours.keys() | theirs.keys() if not torch.equal(ours[name], theirs[name])]
    if log_without_clock(left / folder) != log_without_clock(right / folder):
        found.append("log.jsonl")
    if (left / "points.jsonl").read_text() != (right / "points.jsonl").read_text():
        found.append("points.jsonl")
    return found


def main() -> None:
    config, kills = Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 5
    folder = folder_name(yaml.safe_load(config.read_text())["schemes"][0])
    choice, ends = random.Random(0), []
    with tempfile.TemporaryDirectory() as name:
        undisturbed, killed = Path(name, "undisturbed"), Path(name, "killed")
        run_to_the_end(config, undisturbed)
        for _ in range(kills):
            ends.append(kill_while_training(finetune(config, killed), killed / folder, choice))
        run_to_the_end(config, killed)
        found = differences(undisturbed, killed, folder)
    print(f"{', '.join(ends)}: {found or 'weights, log and points are the same'}")
    sys.exit(bool(found or "ended" in ends))


if __name__ == "__main__":
    main()
