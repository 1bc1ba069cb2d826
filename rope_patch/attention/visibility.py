"""The rule by which a query sees keys, whatever the region."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Visibility:
    """The mask, segment ids and causality that decide which keys each query of a call may see.

    Attributes:
        mask: `(batch or 1, heads or 1, q_len, kv_len)`, boolean (True is attended) or added to the scores. None means
            causal by slot if `causal`, else all pairs.
        groups: segment ids, only without a mask: integer, `(batch or 1, kv_len)`. A query sees the keys of its own
            group. Values below zero are pads, which no token sees and which see all tokens. None for one group.
        causal: whether keys after the query are hidden, by the mask or without one.
        query_start: slot of the first query among the keys.
        q_length, kv_length: numbers of queries and of keys.
    """

    mask: torch.Tensor | None
    groups: torch.Tensor | None
    causal: bool
    query_start: int | torch.Tensor
    q_length: int
    kv_length: int

    def pairs(self, device: torch.device) -> torch.Tensor | None:
        """The mask, or without one a boolean by slot and group, `(batch or 1, 1, q_len, kv_len)`; None if every query
        sees every key.
        """
        if self.mask is not None:
            return self.mask
        queries = torch.arange(self.q_length, device=device) + self.query_start
        causal = None
        if self.causal and self.kv_length > 1:
            causal = (torch.arange(self.kv_length, device=device) <= queries[:, None])[None, None]
        if self.groups is None:
            return causal
        of_keys = self.groups[:, None, None, :]
        of_queries = self.groups[:, None, queries, None]
        # a pad sees every token before it, as in Transformers
        same = ((of_queries == of_keys) | (of_queries < 0)) & (of_keys >= 0)
        return same if causal is None else causal & same
