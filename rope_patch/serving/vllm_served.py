"""The data that vLLM serves from a checkpoint folder that records a scheme: tables for its rotary modules, or states of
layers.

Static frequencies and scales of queries, such as those of YaRN and log-n, need no special attention: they are rows of a
table, which vLLM's rotary modules read at each token's position. A folder with a scheme for each factor has the tables
of all factors one after another, and each token reads the table of its request; positions on three axes (mRoPE) read a
row for each axis. If a scheme acts by distance, the attention layers score it, from the state of each layer under the
scheme. Layers without rotation, as in hybrid models, have neither.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModel
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from rope_patch.errors import UnsupportedModel
from rope_patch.models.base import RotaryTables
from rope_patch.models.config import length_today
from rope_patch.models.record import RECORD, Record, forget_record
from rope_patch.mounting.layer_state import LayerState
from rope_patch.patching import patch
from rope_patch.saving.readers import refused_by_vllm
from rope_patch.schemes.base import Scheme
from rope_patch.schemes.tools.positions import UNROTATED
from rope_patch.serving.factors import Reaches, ignoring_idle
from rope_patch.serving.paged_attention import Attention, anchor_of
from rope_patch.typing import Frequencies

_SERVED = "_rope_patch_served"
"""The attribute of a model's config in vLLM that holds a `Holder`."""

AXES_ROWS = 4
"""Rows of a table for each token of a text whose positions have three axes: positions of a video may run ahead of its
tokens. vLLM's own tables have as many rows.
"""

States = Mapping[int, LayerState]
"""The state of each layer, by its index."""


@dataclass(frozen=True)
class Tables:
    """Tables for vLLM's rotary modules, one row for each position, factor after factor.

    Attributes:
        cos_sin: `(rows, pairs * 2)`, cosines and sines with the scheme's factor, as vLLM has them.
        scale: scale of the queries, `(rows, heads or 1)`; None without a scale.
        starts: the first row of each factor, `(factors,)`.
    """

    cos_sin: torch.Tensor
    scale: torch.Tensor | None
    starts: torch.Tensor

    @classmethod
    def of(cls, schemes: list[States], lengths: list[int]) -> Tables | None:
        """Compute the tables of one or several schemes for texts of these lengths; None if tables cannot express
        them.
        """
        parts, scales = [], []
        for states, length in zip(schemes, lengths, strict=True):
            state, positions = next(iter(states.values())), torch.arange(length)
            scheme = state.scheme
            others = scheme.slots - {"frequencies", "query_scale"} or scheme.by_layer or scheme.by_head
            if others or scheme.length_dependent or scheme.decays or scheme.learns:
                return None
            if (frequencies := _shared_frequencies(states)) is None:
                return None
            parts.append(_cos_sin(positions, frequencies))
            if "query_scale" in scheme.slots:
                scales.append(scheme.query_scale(positions[None], state.layer.heads.num)[:, 0].T)
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        return cls(torch.cat(parts), torch.cat(scales) if scales else None, starts)

    @classmethod
    def of_anchors(cls, schemes: list[States], lengths: list[int]) -> Tables | None:
        """Compute the tables that rotate queries and keys by `anchor_of`, for attention layers that score; None if
        there is no common anchor.
        """
        parts = []
        for states, length in zip(schemes, lengths, strict=True):
            anchors, frequencies = {anchor_of(state) for state in states.values()}, _shared_frequencies(states)
            anchor = anchors.pop()
            if anchors or anchor is None or frequencies is None:
                return None
            parts.append(_cos_sin(anchor(torch.arange(length)), frequencies))
        return cls(torch.cat(parts), None, torch.tensor([0, *lengths[:-1]]).cumsum(0))


def _shared_frequencies(states: States) -> Frequencies | None:
    """The frequencies that all layers have in common; None if layers differ."""
    cpu = torch.device("cpu")
    found = [state.source.frequencies(None, cpu, anchored=False) for state in states.values()]
    first = found[0]
    same = (torch.equal(one.inv_freq, first.inv_freq) for one in found)
    return first if all(same) and len({float(one.attention_scaling) for one in found}) == 1 else None


def _cos_sin(positions: torch.Tensor, frequencies: Frequencies) -> torch.Tensor:
    """Compute the rows of a table for positions `(rows,)`."""
    angles = torch.outer(positions.float(), frequencies.inv_freq.float())
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * frequencies.attention_scaling


class Rows:
    """The factor of each request in vLLM's batch, and the row of the tables at which each token's factor begins.

    Attributes:
        by_request: index of the factor of each place in the batch, `(places,)`.
        by_token: first row of each token's factor, `(tokens of the longest step,)`; 0 beyond the step's tokens.
        counted: the row of each token, counted in tokens, in the same shape; None if positions give the row.
    """

    def __init__(self, starts: torch.Tensor, places: int, tokens: int, counts: bool) -> None:
        self._starts = starts
        self.by_request = torch.zeros(places, dtype=torch.long)
        self.by_token = torch.zeros(tokens, dtype=torch.long, device=current_platform.device_type)
        self.counted = torch.zeros_like(self.by_token) if counts else None

    def lay_out(self, query_starts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Set the rows for the tokens of a step.

        Args:
            query_starts: the first token of each request, `(requests + 1,)`, on the CPU.
            lengths: lengths of the requests with these tokens, `(requests,)`.
        """
        counts = query_starts.diff()
        rows = self._starts[self.by_request[: len(counts)]].repeat_interleave(counts)
        self.by_token[: len(rows)].copy_(rows)
        self.by_token[len(rows) :] = 0
        if self.counted is not None:
            before = (lengths[: len(counts)].cpu() - query_starts[1:]).repeat_interleave(counts)
            self.counted[: len(rows)].copy_(rows + before + torch.arange(len(rows)))
            self.counted[len(rows) :] = 0


@dataclass
class Served:
    """The computation that this plugin takes over for a folder.

    Attributes:
        scheme: the recorded scheme; the scheme of the largest factor if there are several.
        states: states of each factor in ascending order; one entry without factors.
        scores: whether the attention layers score.
        tables: tables for rotary modules; None if these do not rotate.
        anchored: whether the cache holds keys in the rotation that `paged_attention` reads; if False they are
            unrotated.
        rows: the rows of the tokens; None if each token's position is its row.
        reaches: lengths that the factors cover; None without factors.
        has_rotary: whether vLLM's model has rotary modules, which then leave rotation to the attention layers.
        attention: attention objects by groups of layers that share one.
    """

    scheme: Scheme
    states: list[States]
    scores: bool = True
    tables: Tables | None = None
    anchored: bool = False
    rows: Rows | None = None
    reaches: Reaches | None = None
    has_rotary: bool = False
    attention: dict[Any, Attention] = field(default_factory=dict)


@dataclass
class Holder:
    """A holder of `Served` in a config. vLLM copies the config for the text model inside an image model; the copies
    share the holder.
    """

    found: Served | None = None
    is_known: bool = False

    def __deepcopy__(self, memo: Any) -> Holder:
        return self


def hold(model: Any) -> Holder:
    """Get the holder in a model's config of vLLM, or put one there."""
    return cast(Holder, vars(model).setdefault(_SERVED, Holder()))


def served_of(config: VllmConfig) -> Served | None:
    """The computation that this plugin takes over under an engine's config; None if vLLM's own positions suffice.

    Raises:
        UnsupportedModel: the scheme needs more than queries, keys and positions, or does not change all layers; or it
            reads positions on one axis, and the engine takes images.
    """
    model = config.model_config
    if getattr(model.hf_config, RECORD, None) is None:
        return None  # models without a record must not be read again
    held = hold(model)
    if not held.is_known:
        held.found, held.is_known = _served(config), True
    return held.found


def _served(config: VllmConfig) -> Served | None:
    model, places = config.model_config, config.scheduler_config
    states = _states_of(model.model, model.revision)
    if not states:
        return None
    scheme = next(iter(states[-1].values())).scheme
    reaches = reaches_of(model)
    lengths = list(reaches.by_factor.values()) if reaches else [0]
    lengths[-1] = max(lengths[-1], model.max_model_len)
    takes_images = model.uses_mrope and model.is_multimodal_model and not model.multimodal_config.language_model_only
    rows_per_token = AXES_ROWS if takes_images else 1
    tables, anchored = Tables.of(states, [rows_per_token * length for length in lengths]), False
    if tables is None and takes_images:
        raise UnsupportedModel(
            f"{scheme} in vLLM: images are not supported, for the scheme reads positions on one axis; start it with "
            "--language-model-only"
        )
    if scores := tables is None:
        anchors = {anchor_of(state) for by_layer in states for state in by_layer.values()}
        tables = Tables.of_anchors(states, lengths) if current_platform.is_cpu() and anchors != {UNROTATED} else None
        anchored = current_platform.is_cpu() and (tables is not None or anchors == {UNROTATED})
    rows, counts = None, model.uses_mrope and tables is not None and tables.scale is not None
    if reaches or counts:
        starts = tables.starts if tables else torch.zeros(len(states), dtype=torch.long)
        rows = Rows(starts, places.max_num_seqs, places.max_num_batched_tokens, counts)
    return Served(scheme, states, scores, tables, anchored, rows, reaches)


def reaches_of(model: Any) -> Reaches | None:
    """The lengths that the factors in the record of a vLLM model's config reach; None without factors."""
    record = Record.read(model.hf_config)
    if record is None or not record.per_request:
        return None
    config = AutoConfig.from_pretrained(model.model, revision=model.revision, trust_remote_code=False)
    text = config.get_text_config()
    record.restore(text)
    trained = length_today(text)
    limit = min(model.max_model_len, max(record.per_request) * trained)
    return Reaches(limit, {factor: min(limit, factor * trained) for factor in record.per_request})


def recorded_schemes(record: Record) -> Mapping[int, Scheme]:
    """The schemes in a record by factor; without factors it is the only scheme, under 0."""
    return record.per_request or {0: record.scheme}


@functools.cache
def _states_of(path: str, revision: str | None) -> list[States]:
    """The states of each recorded scheme; empty if vLLM's own positions suffice."""
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    record = Record.read(config)
    if record is None:
        return []
    forget_record(config)
    text = config.get_text_config()
    is_stated = record.is_stated(text)
    record.restore(text)
    schemes = recorded_schemes(record)
    states: list[States] = []
    for factor, scheme in schemes.items():
        with torch.device("meta"):
            model = AutoModel.from_config(text, attn_implementation="sdpa")
        if what := refused_by_vllm(scheme):
            raise UnsupportedModel(f"{scheme} in vLLM: {what} are not supported")
        with ignoring_idle(factor):
            handle = patch(model, scheme)
            if not factor and is_stated:
                return []  # rope_parameters express the scheme, and vLLM reads them itself
            handle.remove()
            handle = patch(model, scheme, mount="late")
        states.append({state.layer.index: state for state in handle.layer_states})
        for state in states[-1].values():  # the model was read on the meta device, but these modules compute
            cast(RotaryTables, state.layer.rotary).module.to(current_platform.device_type)
        if missing := [layer.name for layer in handle.stack.layers if layer.index not in states[-1]]:
            raise UnsupportedModel(f"{scheme} in vLLM: it does not change {', '.join(missing)}, which is not supported")
    return states
