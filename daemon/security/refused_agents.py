"""Agents that the daemon has refused lately, by address and reason: their runs are not known, and are shown nowhere."""

from __future__ import annotations

import time
from typing import Final

from cachetools import TTLCache

from tidegate.wire.agent import AgentRefusal, RefusedAgents

KEPT_SECONDS: Final = 180.0
"""Time after its last refused request for which an agent counts as refused. Agents try a refused token every 60 s."""
MAX_KEPT: Final = 64
"""Maximum number of pairs of address and reason; above it, the oldest pair is dropped."""


class RefusedAgentsBook:
    """Notes refused requests of agents. Nobody has proved to be an agent, so the memory is bounded."""

    def __init__(self) -> None:
        self._since: TTLCache[tuple[str, AgentRefusal], float] = TTLCache(MAX_KEPT, KEPT_SECONDS)

    def note(self, address: str, reason: AgentRefusal) -> None:
        self._since[address, reason] = self._since.get((address, reason), time.time())

    def current(self) -> list[RefusedAgents]:
        return [
            RefusedAgents(address=address, reason=reason, since=since)
            for (address, reason), since in sorted(self._since.items())
        ]
