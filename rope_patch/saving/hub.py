"""One request to the Hub: whether it answers, and why it did not provide a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import errors as hub_errors
from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode
from transformers.utils import CONFIG_NAME

from rope_patch.errors import NoCheckpoint

UNKNOWN = "it was not found on the Hub (typo?), is gated (run `hf auth login`), or out of reach"
"""The reason if Transformers gives none."""

_GATED = "it is gated on the Hub: accept its terms on its page, then run `hf auth login`"
_NOT_FOUND = "it was not found on the Hub (typo?), or it is private (run `hf auth login`)"
_NO_COPY = "the cache has no copy; pass the path of a folder"
_ANSWERS: dict[Any, str] = {  # the first that fits: a gated repository is also one that was not found
    hub_errors.GatedRepoError: _GATED,
    hub_errors.RepositoryNotFoundError: _NOT_FOUND,
    hub_errors.RevisionNotFoundError: "it has no such revision on the Hub",
    (hub_errors.OfflineModeIsEnabled, hub_errors.LocalEntryNotFoundError): f"the Hub was not reached and {_NO_COPY}",
}
_ANSWERED = (hub_errors.HfHubHTTPError, hub_errors.HFValidationError, hub_errors.LocalTokenNotFoundError)
"""Errors that Transformers meets again at once; they say more than that the Hub was not reached."""


def within_reach(path: str | Path, location: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that locate the files of a Hub ID: unchanged, or for the cache alone if the Hub does not answer one
    request. Transformers makes six for each file that the cache lacks, and waits 23 s between them.

    Args:
        path: the Hub ID.
        location: arguments of `from_pretrained` that locate a file, such as `revision`.
    """
    is_decided = location.get("local_files_only") or location.get("force_download")
    if is_decided or _answers(str(path), location):
        return {**location}
    return {**location, "local_files_only": True}


def _answers(name: str, location: Mapping[str, Any]) -> bool:
    """Whether the Hub answers a request about the config of a checkpoint, whatever the answer."""
    place = {key: location.get(key) or None for key in ("subfolder", "revision")}
    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG_NAME, **place), token=location.get("token"))
    except _ANSWERED:
        return True
    except Exception:  # of httpx, which huggingface_hub imports under a name that depends on its version
        return False
    return True


def _reason(error: BaseException | None) -> str | None:
    """The reason why the Hub did not provide a checkpoint, and what to do, from the error that Transformers raised;
    None if the error has another cause.
    """
    while error is not None:
        for kind, answer in _ANSWERS.items():
            if isinstance(error, kind):
                is_set = answer.endswith(_NO_COPY) and is_offline_mode()
                return f"HF_HUB_OFFLINE is set and {_NO_COPY}" if is_set else answer
        error = error.__cause__ or error.__context__
    return None


def tell_absence(path: str | Path, error: OSError, otherwise: str | None = None) -> None:
    """If a name is not local, raise an error that says why the Hub did not provide it. For a local file the original
    `error` already names the fault.

    Args:
        otherwise: the reason if Transformers gives none.

    Raises:
        NoCheckpoint: the name is not local, and the reason is known; the message has it.
    """
    if not Path(path).exists() and (reason := _reason(error) or otherwise):
        raise NoCheckpoint(
            f"there is no checkpoint {str(path)!r}: no folder here has this name, and {reason}"
        ) from error
