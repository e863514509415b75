"""Which engine gets which request: that of its group, because it has computed the prompt; else the least loaded.

Requests that find every engine full wait in one line, first come, first served.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Collection
from typing import NamedTuple

from penstock.engine.health import Fleet, Member
from penstock.errors import PenstockError
from penstock.ports import GenerateRequest

REMEMBERED_GROUPS = 4096


class _Ticket(NamedTuple):
    request: GenerateRequest
    avoid: Collection[str]
    place: asyncio.Future[Member | None]


class Router:
    def __init__(self, fleet: Fleet, max_requests_per_engine: int) -> None:
        self._fleet = fleet
        self._limit = max_requests_per_engine
        self._line: deque[_Ticket] = deque()
        self._groups: OrderedDict[str, Member] = OrderedDict()

    @property
    def waiting(self) -> int:
        return len(self._line)

    async def take_place(self, request: GenerateRequest, avoid: Collection[str]) -> Member | None:
        """Wait for an engine with room, one not in `avoid` if there is any. None when aborted meanwhile.

        Raises EngineUnavailable when no engine is active for too long. Give the place back with `leave`.
        """
        ticket = _Ticket(request, avoid, asyncio.get_running_loop().create_future())
        self._line.append(ticket)
        self.assign()
        try:
            return await ticket.place
        except asyncio.CancelledError:
            if ticket in self._line:
                self._line.remove(ticket)
            if ticket.place.done() and not ticket.place.cancelled() and ticket.place.exception() is None:
                member = ticket.place.result()
                if member is not None:
                    self.leave(member)
            raise

    def leave(self, member: Member) -> None:
        member.running -= 1
        self.assign()

    def assign(self) -> None:
        """Seat those who wait, as far as there is room. Called whenever there may be."""
        if self._fleet.unavailable is not None:
            self.fail_all(self._fleet.unavailable)
        while self._line:
            member = self._choose(self._line[0])
            if member is None:
                return
            ticket = self._line.popleft()
            if not ticket.place.done():
                member.running += 1
                ticket.place.set_result(member)

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Those of the line with these ids, or all."""
        for ticket in [t for t in self._line if request_ids is None or t.request.request_id in request_ids]:
            self._line.remove(ticket)
            if not ticket.place.done():
                ticket.place.set_result(None)

    def fail_all(self, error: PenstockError) -> None:
        line, self._line = self._line, deque()
        for ticket in line:
            if not ticket.place.done():
                ticket.place.set_exception(error)

    def _choose(self, ticket: _Ticket) -> Member | None:
        room = [member for member in self._fleet.serving if member.running < self._limit]
        room = [member for member in room if member.name not in ticket.avoid] or room
        if not room:
            return None
        group = ticket.request.group_id
        member = self._groups.get(group)
        if member is None or member not in room:
            member = min(room, key=lambda member: member.running)
        if group:
            self._groups[group] = member
            self._groups.move_to_end(group)
            if len(self._groups) > REMEMBERED_GROUPS:
                self._groups.popitem(last=False)
        return member
