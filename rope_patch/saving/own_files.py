"""Files that belong to a checkpoint: in its folder, or in the Hub's cache of it.

A link or an index of weights can name any file of this computer. Such a file is neither read as weights nor copied.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, cached_file

from rope_patch.errors import InvalidField, NoCheckpoint
from rope_patch.saving.checkpoint_kind import OPTIONAL, read_json


def own_file(file: Path, folder: Path) -> Path:
    """Resolve a path in a checkpoint's folder to its regular file, through however many links.

    In the Hub's cache, `snapshots/REVISION/file` is a link to `blobs/HASH`, so files directly in `blobs` belong to the
    folder of a revision.

    Raises:
        NoCheckpoint: the file lies outside, a link in the path is broken, or the path is not a regular file.
    """
    home = folder.resolve()
    blobs = next((above.parent / "blobs" for above in home.parents if above.name == "snapshots"), None)
    try:
        real = file.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise NoCheckpoint(f"{file} is a broken link; put the file itself there, or remove the link") from error
    if not (real.is_relative_to(home) or real.parent == blobs):
        raise NoCheckpoint(
            f"{file} leads to {real}, outside of the checkpoint {folder}; if you trust it, put the file itself there"
        )
    if not real.is_file():
        raise NoCheckpoint(f"{file} is not a file but a device, a pipe or a folder; remove it from the checkpoint")
    return real


def shards_of(index: Path) -> dict[str, str]:
    """Read the `weight_map` of an index of weights: the file of each weight, beside the index.

    Raises:
        NoCheckpoint: the index is damaged, or names a file that does not belong to the checkpoint.
    """
    try:
        shards: Any = read_json(index).get("weight_map")
    except InvalidField as error:
        raise NoCheckpoint(f"{index} cannot be loaded: {error}") from error
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise NoCheckpoint(f"{index} cannot be loaded: weight_map must be an object that names a file for each weight")
    for shard in sorted(set(shards.values())):
        if _leads_out(shard):
            raise NoCheckpoint(
                f"{index} cannot be loaded: weight_map names {shard!r:.200}; it must name files beside the index, such "
                "as 'model-00001-of-00002.safetensors'"
            )
        if os.path.lexists(index.parent / shard):
            own_file(index.parent / shard, index.parent)
    return shards


def check_weights(path: str | Path, **location: Any) -> None:
    """Check every index of weights of a checkpoint by `shards_of`, before anything reads the weights.

    Args:
        path: a folder or a Hub ID.
        **location: arguments of `from_pretrained` that locate a file, such as `subfolder`.

    Raises:
        NoCheckpoint: see `shards_of`.
    """
    folder, names = Path(path, location.get("subfolder") or ""), (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
    if os.fspath(path) and folder.is_dir():  # an index of a variant has one more word in its name
        stems = (name.removesuffix(".json") for name in names)
        found = [index for stem in stems for index in folder.glob(f"{stem}*.json")]
    else:
        cached = (cached_file(path, name, **OPTIONAL, **location) for name in names)
        found = [Path(file) for file in cached if file is not None]
    for index in sorted(found):
        shards_of(index)


def _leads_out(name: str) -> bool:
    """Whether the name of a shard leads out of the folder on some system, or is not a plain path."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    outside = posix.is_absolute() or bool(windows.anchor) or ".." in posix.parts
    return outside or not posix.parts or "\\" in name or "\0" in name
