"""Who holds up whom, by what each rank's flight recorder has pending: the ranks that others wait for and that wait for nobody. Pure.

Each rank waits at its front, the first operation that it enqueued and that has not completed. It is held up there by the members that
have not entered the operation, and by those that have it queued behind a front of their own. Followed to the end, that leads to

- a rank with nothing pending, or none that it waits for: its program never came to the collective (stopped, in a lock, in its data);
- a rank at an operation that a peer has completed: its device, or the thread that watches it, is stuck (transfers have no common number,
  and are counted from a collective that both ends are in);
- a rank that gave no recording: it is dead, or its node is;
- ranks that are all at one operation which none completes: one of their devices, or the network between them;
- a circle: ranks that called different things. The few among them differ from the many.

A send that nobody wants is the weakest of these reasons, since a rank goes on without waiting for it: where following it leads nowhere
but in circles, the rank's next operation is its front. Other circles are opened by leaving out first what may be on another stream.

Every comparison is of ranks of one group at one number, so no layout has to be known; where a recording was cut down to what is pending,
`entered` tells a collective that a rank has finished from one that it never reached.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from events.finding import PendingOperation, ProcessStack
from events.rank_set import expand

#: Why a rank holds up others, strongest first.
ABSENT, UNSENT, QUEUED, UNWANTED = 4, 3, 2, 1
#: Of these every member has put in its share before any can be done, so one that is done proves that all entered.
_SYMMETRIC = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "alltoall", "barrier")


#: An operation: group and number of a collective; group, number 0 and both ranks (sender first) of a transfer.
class Operation(NamedTuple):
    group: str
    seq: int
    ends: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Stuck:
    """`culprits` hold up others and are held up by none; `because`: a sentence to each kind of reason, with its ranks. `fronts`: where
    each rank waits, in words that are the same for the same place of any group (`` for a rank that waits nowhere)."""

    culprits: frozenset[int]
    because: tuple[tuple[str, frozenset[int]], ...]
    fronts: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class _Rank:
    """`pending` is the process's, or what is left of it. Looked up when asked: most ranks are asked for a single operation."""

    rank: int
    process: ProcessStack
    pending: tuple[PendingOperation, ...]

    def fronts(self) -> tuple[Operation, ...]:
        """The first operation, and with a transfer all of its batch."""
        if not self.pending:
            return ()
        first = self.pending[0]
        batch = 1
        while first.peer >= 0 and batch < len(self.pending) and _batched(first, self.pending[batch]):
            batch += 1
        return tuple(dict.fromkeys(_operation(self.rank, op) for op in self.pending[:batch]))

    def has(self, operation: Operation) -> bool:
        group = operation.group
        return any(op.group == group and _operation(self.rank, op) == operation for op in self.pending)

    def places(self, peer: int, sent: bool) -> dict[tuple[str, int], int]:
        """Of each collective that is known of it: how many of the pending transfers to (from) that peer are before it, less the completed
        ones after it."""
        found = {
            (state.group, state.done): -_since(state.since, peer, sent) for state in self.process.groups if state.done >= 0
        }
        before = 0
        for op in self.process.pending:
            if op.peer < 0:
                found[op.group, op.seq] = before
            elif op.peer == peer and (op.op == "send") == sent:
                before += 1
        return found

    def entered(self, group: str, mixed: bool) -> int:
        """Number of the last collective; -1: not known. Of a group that has transfers too, only from a dump that shows them."""
        told = [state.entered for state in self.process.groups if state.group == group and (state.transfers or not mixed)]
        return max((*told, *(op.seq for op in self.pending if op.group == group and op.peer < 0)), default=-1)


def stuck(recorded: Mapping[int, ProcessStack], ranks: Iterable[int]) -> Stuck:
    """`recorded`: the process of each rank that has a recording; `ranks`: all of the job's, so that those without are known."""
    members, kinds = _members(recorded)
    everyone = frozenset(ranks)
    found = {rank: _Rank(rank, process, process.pending) for rank, process in recorded.items()}
    mixed = {op.group for process in recorded.values() for op in process.pending if op.peer >= 0}
    mixed |= {group.group for process in recorded.values() for group in process.groups if group.transfers}
    behind = _behind(found, members, mixed) | _overtaken(found)
    while True:
        waiting = _waiting(found, members, everyone, mixed, behind)
        unwanted = {rank for rank in waiting.circling() if waiting.only(rank, UNWANTED)}
        if not unwanted:
            break
        found |= {rank: replace(found[rank], pending=found[rank].pending[1:]) for rank in unwanted}
    culprits = waiting.ends()
    culprits -= _started(culprits - waiting.at_fault, waiting.crowds, found)
    return Stuck(
        frozenset(culprits), _because(culprits, waiting), {rank: _words(process, kinds) for rank, process in recorded.items()}
    )


def _behind(found: Mapping[int, _Rank], members: Mapping[str, tuple[int, ...]], mixed: set[str]) -> frozenset[int]:
    """Ranks for which a collective is pending that another of its group has completed, be it the first or not: their devices, or the
    threads that watch them, have stopped."""
    first: dict[str, dict[int, PendingOperation]] = defaultdict(dict)
    for rank, state in found.items():
        for op in state.pending:
            if op.peer < 0:
                first[op.group].setdefault(rank, op)
    behind: set[int] = set()
    for group, waiting in first.items():
        done = max(op.seq for op in waiting.values()) - 1
        for member in members.get(group, ()):
            if member in found and member not in waiting:
                done = max(done, found[member].entered(group, group in mixed))
        behind.update(rank for rank, op in waiting.items() if op.seq <= done and _symmetric(op.op))
    return frozenset(behind)


def _overtaken(found: Mapping[int, _Rank]) -> set[int]:
    """Ranks for which a transfer is pending that its other end has completed: a send that was received, at any place, since nobody receives
    what was not sent; a receive of what was sent, if nothing is before it, since small things are sent before anyone is there to receive.
    Their devices, or the threads that watch them, have stopped."""
    counted: dict[int, _Counts] = {}
    for rank, state in found.items():
        if any(op.peer >= 0 for op in state.pending):
            counted[rank] = {(group.group, group.done): group.since for group in state.process.groups if group.done >= 0}
    behind: set[int] = set()
    for rank, state in found.items():
        seen: set[tuple[int, str]] = set()
        for op in state.pending:
            if op.peer not in found or (op.op != "send" and op is not state.pending[0]) or (op.peer, op.op) in seen:
                continue
            seen.add((op.peer, op.op))  # of one kind all are as far
            if not _level(counted, rank, op) and _ahead(found, rank, op) > 0:
                behind.add(rank)
                break
    return behind


#: Of the last completed collective of each group: transfers since, as peer, direction and how many.
_Counts = dict[tuple[str, int], tuple[tuple[int, int, int], ...]]


def _level(counted: Mapping[int, _Counts], rank: int, op: PendingOperation) -> bool:
    """Whether both ends have completed as many since a collective that is the last completed one of both: nearly all have, so it is
    looked at first."""
    sent = int(op.op == "send")
    theirs = counted.get(op.peer, {})
    for collective, since in counted[rank].items():
        if collective in theirs:
            return _since(since, op.peer, sent) == _since(theirs[collective], rank, 1 - sent)
    return False


def _since(counts: tuple[tuple[int, int, int], ...], peer: int, sent: int) -> int:
    return next((n for to, out, n in counts if to == peer and out == sent), 0)


def _ahead(found: Mapping[int, _Rank], rank: int, op: PendingOperation) -> int:
    """How many more transfers of this one's kind, between the same two ranks, its other end has completed than this rank. They have no
    number that both ends share, but between two collectives that both are in, both have the same ones. 0: not known, too."""
    sent = op.op == "send"
    mine, theirs = found[rank].places(op.peer, sent), found[op.peer].places(rank, not sent)
    ahead = {mine[collective] - theirs[collective] for collective in mine.keys() & theirs.keys()}
    return ahead.pop() if len(ahead) == 1 else 0


def _waiting(
    found: Mapping[int, _Rank],
    members: Mapping[str, tuple[int, ...]],
    everyone: frozenset[int],
    mixed: set[str],
    certainly_behind: frozenset[int],
) -> _Waiting:
    # Who is behind is at none of its operations with the others: they wait for it there.
    fronts = {rank: () if rank in certainly_behind else state.fronts() for rank, state in found.items()}
    crowds: dict[Operation, list[int]] = defaultdict(list)
    for rank, operations in fronts.items():
        for operation in operations:
            crowds[operation].append(rank)
    held_up: dict[Operation, dict[int, int]] = {}
    behind, disagreeing = set(certainly_behind), set[int]()
    for operation, crowd in crowds.items():
        reasons, done = _standing(operation, set(crowd), members, found, everyone, mixed)
        few = _few_names(crowd, found) if operation.ends is None else set[int]()
        if done and not reasons:
            behind.update(crowd)
        else:
            held_up[operation] = reasons | dict.fromkeys(few, ABSENT)
            disagreeing |= few
    fronts |= dict.fromkeys(behind | disagreeing, ())
    return _Waiting(found, fronts, held_up, crowds, frozenset(behind), frozenset(disagreeing))


def _batched(first: PendingOperation, op: PendingOperation) -> bool:
    return op.peer >= 0 and op.seq == first.seq and op.group == first.group


def _operation(rank: int, op: PendingOperation) -> Operation:
    if op.peer < 0:
        return Operation(op.group, op.seq, None)
    return Operation(op.group, 0, (rank, op.peer) if "send" in op.op else (op.peer, rank))


def _symmetric(op: str) -> bool:
    return op.lstrip("_").startswith(_SYMMETRIC)


def _members(recorded: Mapping[int, ProcessStack]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Of each group, as anyone tells it; of one that nobody tells, those that speak of it. And what it is called."""
    told: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    for process in recorded.values():
        for group in process.groups:
            if group.group in told:
                continue
            kinds[group.group] = group.description
            with contextlib.suppress(ValueError):
                if ranks := expand(group.ranks):
                    told[group.group] = ranks
    seen: dict[str, set[int]] = defaultdict(set)
    for rank, process in recorded.items():
        for group in process.groups:
            if group.group not in told:
                seen[group.group].add(rank)
        for op in process.pending:
            if op.group not in told:
                seen[op.group].add(rank)
    return told | {name: tuple(sorted(ranks)) for name, ranks in seen.items()}, kinds


def _standing(
    operation: Operation,
    crowd: set[int],
    members: Mapping[str, tuple[int, ...]],
    found: Mapping[int, _Rank],
    everyone: frozenset[int],
    mixed: set[str],
) -> tuple[dict[int, int], set[int]]:
    """Who holds an operation up and how certainly, and who is done with it; `crowd` is at it."""
    reasons, done = dict[int, int](), set[int]()
    for member in operation.ends or members.get(operation.group, ()):
        if member in crowd:
            continue
        state = found.get(member)
        if state is None:
            if member in everyone:
                reasons[member] = ABSENT
        elif state.has(operation):
            reasons[member] = QUEUED
        elif operation.ends is not None:
            reasons[member] = UNSENT if member == operation.ends[0] else UNWANTED
        elif state.entered(operation.group, operation.group in mixed) >= operation.seq:
            done.add(member)
        else:
            reasons[member] = ABSENT
    return reasons, done


def _few_names(crowd: list[int], found: Mapping[int, _Rank]) -> set[int]:
    """Ranks that call another collective than most of their group at the same number."""
    called = Counter(found[rank].pending[0].op for rank in crowd)
    if len(called) == 1:
        return set()
    (most, count), (_, second) = called.most_common(2)
    return {rank for rank in crowd if count == second or found[rank].pending[0].op != most}


def _started(culprits: set[int], crowds: Mapping[Operation, list[int]], found: Mapping[int, _Rank]) -> set[int]:
    """Where a whole crowd is at fault for its operation and the recorder times kernels: those whose kernel runs wait for the others,
    whose devices have not come to it."""
    cleared: set[int] = set()
    for waiting in crowds.values():
        run = {rank for rank in waiting if found[rank].pending[0].started}
        if run and run < set(waiting) <= culprits:
            cleared |= run
    return cleared


class _Waiting(NamedTuple):
    """Ranks wait at operations, operations for ranks: kept apart, since thousands of ranks may be at one. `behind` have not completed
    what a peer has, `disagreeing` called something else than the others of their group: they wait for nobody."""

    found: Mapping[int, _Rank]
    fronts: Mapping[int, tuple[Operation, ...]]
    held_up: Mapping[Operation, Mapping[int, int]]
    crowds: Mapping[Operation, list[int]]
    behind: frozenset[int]
    disagreeing: frozenset[int]

    @property
    def at_fault(self) -> frozenset[int]:
        return self.behind | self.disagreeing

    def reasons(self, rank: int) -> Iterator[int]:
        for operation in self.fronts.get(rank, ()):
            yield from self.held_up.get(operation, {}).values()

    def free(self, rank: int, weakest: int = 0) -> bool:
        """Whether it waits for nobody, by reasons at least so strong."""
        return all(reason < weakest for reason in self.reasons(rank))

    def only(self, rank: int, reason: int) -> bool:
        return set(self.reasons(rank)) == {reason}

    def awaited(self, by: set[int] | None = None, weakest: int = 0) -> set[int]:
        return {
            other
            for operation, reasons in self.held_up.items()
            if by is None or any(rank in by and operation in self.fronts[rank] for rank in self.crowds[operation])
            for other, reason in reasons.items()
            if reason >= weakest
        }

    def there(self) -> set[int]:
        return self.awaited() | {rank for rank, state in self.found.items() if state.pending}

    def first_ends(self) -> set[int]:
        return {rank for rank in self.there() if self.free(rank)} | self.at_fault

    def circling(self, ends: set[int] | None = None) -> set[int]:
        """Those from whom no chain of waiting leads to any of `ends`."""
        return self.there() - self._leading_to(self.first_ends() if ends is None else ends)

    def ends(self) -> set[int]:
        """The ranks that every chain of waiting ends at; circles are opened by leaving out the weaker reasons."""
        ends = self.first_ends()
        for weakest in (UNSENT, ABSENT):
            circling = self.circling(ends)
            ends |= {rank for rank in self.awaited(circling, weakest) & circling if self.free(rank, weakest)}
        circling = self.circling(ends)
        return ends | _few_places(circling & self.awaited(circling), self.fronts)

    def _leading_to(self, ends: set[int]) -> set[int]:
        back: dict[int, list[Operation]] = defaultdict(list)
        for operation, reasons in self.held_up.items():
            for other in reasons:
                back[other].append(operation)
        reached, left, through = set(ends), list(ends), set[Operation]()
        while left:
            for operation in back[left.pop()]:
                if operation not in through:
                    through.add(operation)
                    new = [rank for rank in self.crowds[operation] if rank not in reached]
                    reached.update(new)
                    left.extend(new)
        return reached


def _few_places(circling: set[int], fronts: Mapping[int, tuple[Operation, ...]]) -> set[int]:
    """Of ranks that wait for each other in a circle, those that are at another operation than most of them; all, if no most are."""
    at = Counter(fronts[rank][0] for rank in circling)
    if len(at) > 1:
        (most, count), (_, second) = at.most_common(2)
        if count > second:
            return {rank for rank in circling if fronts[rank][0] != most}
    return circling


def _words(process: ProcessStack, kinds: Mapping[str, str]) -> str:
    if not process.pending:
        return ""
    first = process.pending[0]
    return f"{first.op} of {kinds.get(first.group) or first.group}"


def _because(culprits: set[int], waiting: _Waiting) -> tuple[tuple[str, frozenset[int]], ...]:
    reasons: dict[str, set[int]] = defaultdict(set)
    for rank in culprits:
        state = waiting.found.get(rank)
        if state is None:
            reasons["left no recording, and others wait for it"].add(rank)
        elif rank in waiting.disagreeing:
            reasons[f"called {state.pending[0].op} where the others of its group called something else"].add(rank)
        elif rank in waiting.behind:
            reasons["has not completed what its peers have"].add(rank)
        elif not state.pending:
            reasons["never entered the operation that others wait in"].add(rank)
        else:
            reasons[f"is in {state.pending[0].op}, and is not held up by a rank outside it"].add(rank)
    return tuple((why, frozenset(ranks)) for why, ranks in sorted(reasons.items()))
