"""Fair turns in a batch: a request for many answers leaves places for the others."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Turns:
    """The places in a batch, which answers take and give back.

    A request never holds more places than it leaves free. So one request takes at most half of the places, two requests
    take a third each, and a new request begins at once. Among waiting requests, the request that holds the fewest
    places comes first; of equal ones, the earliest.
    """

    def __init__(self, places: int) -> None:
        self.free = places
        self._held: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[tuple[int, asyncio.Future[None]]]] = {}  # requests as they came

    @asynccontextmanager
    async def taken(self, request: Hashable, places: int) -> AsyncIterator[None]:
        """Wait for a number of places, for one answer to a request, and hold them inside the block."""
        turn = (places, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(request, deque()).append(turn)
        self._give()
        try:
            await turn[1]
            yield
        finally:
            if not turn[1].cancelled():
                self._held[request] -= places
                self.free += places
                if not self._held[request]:
                    del self._held[request]
            self._give()

    def _give(self) -> None:
        """Give free places to waiting answers, as long as the next answer may take them."""
        while self._waiting:
            request = min(self._waiting, key=self._held.__getitem__)
            places, ready = self._waiting[request][0]
            held = self._held[request]
            if not ready.cancelled():
                if places > self.free or (held and held + places > self.free - places):
                    return
                self._held[request] += places
                self.free -= places
                ready.set_result(None)
            self._waiting[request].popleft()
            if not self._waiting[request]:
                del self._waiting[request]
