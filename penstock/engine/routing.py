"""Which engine gets which request: that of its group, because it has computed the prompt; else the least loaded.

Requests that find every engine full wait in one line, first come, first served, and no clock runs. Those of judges have
a line of their own, which goes first, and places that nobody else gets: finished rollouts wait for them. While the
fleet is paused only those that are served are seated, and a frozen request holds no place; before it sleeps, those that
are here are seated, and none that comes later.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection

from penstock.engine.health import Fleet, Member, RequestClock
from penstock.errors import PenstockError
from penstock.ports import OnPause

REMEMBERED_GROUPS = 4096


class Ticket:
    """One request, for as long as it waits or is served. Given from engine to engine it stays the same."""

    def __init__(self, request_id: str, group_id: str, on_pause: OnPause, judging: bool = False) -> None:
        self.request_id = request_id
        self.group_id = group_id
        self.on_pause = on_pause
        self.judging = judging
        self.avoid: list[str] = []
        """Engines that failed it; another is asked if there is any."""
        self.waited_s = 0.0
        """In line."""
        self.place: asyncio.Future[Member | None] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        """Whoever made it sets this."""


class Router:
    def __init__(self, fleet: Fleet, max_requests_per_engine: int, judge_places: int = 0) -> None:
        """Of the places of each engine, `judge_places` are for judges only, from the first that asks on; at least one
        is for everybody."""
        self._fleet = fleet
        self._limit = self._open_limit = max_requests_per_engine
        self._judge_places = judge_places
        self._line: deque[Ticket] = deque()
        self._judges: deque[Ticket] = deque()
        self._seated: defaultdict[Member, dict[Ticket, RequestClock]] = defaultdict(dict)
        """Of engines that have any."""
        self._kept: Counter[Member] = Counter()
        """How many of those seated are kept: frozen, while the fleet is paused."""
        self._judging: Counter[Member] = Counter()
        """How many of those seated are judges'."""
        self._groups: OrderedDict[str, Member] = OrderedDict()
        self.last: frozenset[Ticket] = frozenset()
        """While the fleet drains: those that are seated still."""

    @property
    def everyone(self) -> list[Ticket]:
        """Seated or in line."""
        return [*(ticket for seated in self._seated.values() for ticket in seated), *self._judges, *self._line]

    def seated(self, member: Member) -> list[Ticket]:
        return list(self._seated.get(member, ()))

    @property
    def waiting(self) -> int:
        return len(self._judges) + len(self._line)

    async def take_place(self, ticket: Ticket) -> Member | None:
        """Wait for an engine with room. None when aborted meanwhile.

        Raises EngineUnavailable when no engine is active for too long. Give the place back with `leave`.
        """
        line = self._judges if ticket.judging else self._line
        if ticket.judging:
            self._open_limit = max(1, self._limit - self._judge_places)
        if ticket.place.done():  # it had a place before, and does not queue up again
            ticket.place = asyncio.get_running_loop().create_future()
            line.appendleft(ticket)
        else:
            line.append(ticket)
        if self._may_sit(ticket) or self._fleet.unavailable is not None:
            self.assign()
        try:
            return await ticket.place
        except asyncio.CancelledError:
            line = self._judges if ticket.judging else self._line
            if ticket in line:
                line.remove(ticket)
            if ticket.place.done() and not ticket.place.cancelled() and ticket.place.exception() is None:
                member = ticket.place.result()
                if member is not None:
                    self.leave(member, ticket)
            raise

    def clock(self, member: Member, ticket: Ticket) -> RequestClock:
        """Of a request that was given a place: it begins with it."""
        return self._seated[member][ticket]

    def leave(self, member: Member, ticket: Ticket) -> None:
        clock = self._seated[member].pop(ticket)
        member.clocks.pop(clock, None)
        self._kept[member] -= ticket.on_pause == "keep"
        self._judging[member] -= ticket.judging
        if not self._seated[member]:
            del self._seated[member], self._kept[member], self._judging[member]
            member.emptied.set()
        self.assign()

    def assign(self) -> None:
        """Seat those who wait, as far as there is room. Called whenever there may be."""
        if self.waiting and (unavailable := self._fleet.unavailable) is not None:
            self.fail(lambda ticket: True, unavailable)
        self._seat_from(self._judges, judging=True)
        self._seat_from(self._line, judging=False)

    def _seat_from(self, line: deque[Ticket], *, judging: bool) -> None:
        passed_over = []
        room = self._room(judging) if line else []
        while line and room:
            ticket = line.popleft()
            if self._may_sit(ticket):
                self._seat(ticket, self._choose(ticket, room))
                room = self._room(judging)
            else:
                passed_over.append(ticket)
        line.extendleft(reversed(passed_over))

    def abort(self, chosen: Callable[[Ticket], bool]) -> None:
        """Those of the line that are chosen."""
        for ticket in self._take_out(chosen):
            if not ticket.place.done():
                ticket.place.set_result(None)

    def fail(self, chosen: Callable[[Ticket], bool], error: PenstockError) -> None:
        for ticket in self._take_out(chosen):
            if not ticket.place.done():
                ticket.place.set_exception(error)

    def _take_out(self, chosen: Callable[[Ticket], bool]) -> list[Ticket]:
        taken = [ticket for ticket in (*self._judges, *self._line) if chosen(ticket)]
        gone = set(taken)
        self._judges = deque(ticket for ticket in self._judges if ticket not in gone)
        self._line = deque(ticket for ticket in self._line if ticket not in gone)
        return taken

    def _may_sit(self, ticket: Ticket) -> bool:
        if not self._fleet.paused:
            return True
        if self._fleet.draining:
            return ticket in self.last
        return ticket.on_pause == "serve" and not self._fleet.asleep

    def _seat(self, ticket: Ticket, member: Member) -> None:
        if ticket.place.done():
            return
        clock = RequestClock(ticket.on_pause, self._fleet.config.request_timeout_s)
        clock.start()
        member.clocks[clock] = None
        self._seated[member][ticket] = clock
        self._kept[member] += ticket.on_pause == "keep"
        self._judging[member] += ticket.judging
        ticket.place.set_result(member)

    def _load(self, member: Member) -> int:
        seated = len(self._seated.get(member, ()))
        if not self._fleet.paused or self._fleet.draining:
            return seated
        return seated - self._kept[member]

    def _room(self, judging: bool) -> list[Member]:
        """Those that can be given another."""
        return [member for member in self._fleet.serving if self._has_room(member, judging)]

    def _has_room(self, member: Member, judging: bool) -> bool:
        load = self._load(member)
        return load < self._limit and (judging or load - self._judging[member] < self._open_limit)

    def _choose(self, ticket: Ticket, room: list[Member]) -> Member:
        room = _others(room, ticket.avoid)
        group = ticket.group_id
        member = self._groups.get(group)
        if member is None or member not in room:
            member = min(room, key=self._load)
        if group:
            self._groups[group] = member
            self._groups.move_to_end(group)
            if len(self._groups) > REMEMBERED_GROUPS:
                self._groups.popitem(last=False)
        return member


def _others(room: list[Member], avoid: Collection[str]) -> list[Member]:
    return [member for member in room if member.name not in avoid] or room
