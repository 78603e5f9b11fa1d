"""Which ranks are out of line, by the stacks of all processes of a job and its flight recordings. Pure.

As ByteRobust has it (section 5 of the paper): equal stacks together, the dominant ones healthy, the others outliers. Three things go
before that, since what hangs is not always what looks different:

1. Where flight recordings of most ranks are there, they say who waits for whom (processors.collectives); nothing has to be guessed.
2. A rank that waits for others explains nothing. Where most ranks wait in communication, the few that do not are the cause, and the
   ranks that wait elsewhere than most, in a send to the stuck stage or a broadcast from the rank that still reads its data, are not.
   Only where every rank waits are those in other places than most the outliers, as in the paper's figure 7.
3. A rank without a stack (stopped, dead, on a node that does not answer) is one of those few; not so one that could not be read for a
   reason of the reader's, as where py-spy is missing: of it nothing is known.

Children belong to their rank. A data loader in a lock makes its own rank wait in next(), which point 2 sees; children are compared
with those of other ranks only when the ranks themselves look all alike, since healthy workers differ from moment to moment.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from events.envelope import NAME_MAX
from events.finding import ProcessStack, StackRound
from events.rank_set import compact
from processors import collectives, frames
from processors.frames import Place
from processors.policy import STACKS, Stacks

#: States in which a process is not running its program: stopped, traced, dead, gone.
_NOT_RUNNING = frozenset("TtZX-")
_LINES_MAX, _LINE_CHARS_MAX = 32, 1_000
_LOADER = re.compile(r"_worker_loop\b")
_WRITER = re.compile(r"checkpoint|save|writer", re.IGNORECASE)
_HELPERS = re.compile(r"resource_tracker|forkserver|compile_worker|semaphore_tracker|nvidia-smi|tensorboard|wandb")


@dataclass(slots=True)
class _Rank:
    main: ProcessStack | None = None
    children: list[ProcessStack] = field(default_factory=list)
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """`says_nothing`: why there are no outliers although not all is alike."""

    outliers: frozenset[int]
    because: tuple[tuple[str, frozenset[int]], ...]
    dominant: int
    says_nothing: str = ""


def aggregate(
    processes: Iterable[ProcessStack], world_size: int, cut: Stacks = STACKS, among: Iterable[int] | None = None
) -> StackRound:
    """`processes`: of all ranks 0 to `world_size` - 1, in any order; a rank without any, or of whose main process there is no stack, is
    silent. Processes of no rank of the job (-1 included) are ignored. `among`: the ranks that are looked at, if not all."""
    ranks = _trees(processes, range(world_size) if among is None else sorted(set(among)))
    world_size = len(ranks)
    recorded = {rank: state.main for rank, state in ranks.items() if state.main is not None and state.main.recorded}
    unread = {rank for rank, state in ranks.items() if _unread(state)}
    silent = {rank for rank, state in ranks.items() if not _speaks(state)} - unread
    seen = {rank: state.place for rank, state in ranks.items() if rank not in silent and state.place is not None}
    by_record = len(recorded) >= cut.recorded_share_min * world_size and len(recorded) > 0
    words = dict[int, str]()
    verdict: _Verdict | None = None
    if by_record:
        found = collectives.stuck(recorded, ranks)
        words = dict(found.fronts)
        verdict = _by_recordings(found, silent, seen, world_size, cut)
    if verdict is None and len(unread) > cut.outliers_share_max * world_size:
        verdict = _Verdict(frozenset(), (), 0, f"{len(unread)} of {world_size} ranks could not be read")
    if verdict is None:
        verdict = _by_stacks(ranks, seen, silent, world_size, cut)
    places = {rank: _written(place) for rank, place in seen.items()} | {
        rank: front or "in no collective" for rank, front in words.items() if rank not in seen and rank not in silent
    }
    return StackRound(
        outliers=tuple(sorted(verdict.outliers)),
        silent=tuple(sorted(verdict.outliers & silent)),
        groups_seen=len(set(places.values())),
        dominant=verdict.dominant,
        ranks=world_size,
        stuck_at=(*_lines(verdict, ranks, places, silent), *_of_unread(unread, ranks))[:_LINES_MAX],
    )


def _trees(processes: Iterable[ProcessStack], ranks: Iterable[int]) -> dict[int, _Rank]:
    """The rank's own process is the one whose parent is not among its processes; the others are its children."""
    by_rank: dict[int, list[ProcessStack]] = {rank: [] for rank in ranks}
    for process in processes:
        if process.rank in by_rank:
            by_rank[process.rank].append(process)
    made: dict[int, _Rank] = {}
    for rank, own in by_rank.items():
        state = made[rank] = _Rank()
        if not own:
            continue
        if len(own) == 1:
            state.main = own[0]
        else:
            pids = {process.pid for process in own}
            roots = [process for process in own if process.parent_pid not in pids]
            state.main = min(roots or own, key=lambda process: process.pid)
            state.children = [process for process in own if process is not state.main]
        if state.main.threads:
            state.place = frames.of_threads(state.main.threads)
    return made


def _speaks(state: _Rank) -> bool:
    """Whether its main process runs and told something: a stack, or a flight recording."""
    main = state.main
    return main is not None and main.state not in _NOT_RUNNING and (bool(main.threads) or main.recorded)


def _unread(state: _Rank) -> bool:
    """Whether there is no stack for a reason of the reader's alone: a process that does not run is known by its state all the same."""
    main = state.main
    return main is not None and main.unread and not main.threads and not main.recorded and main.state not in _NOT_RUNNING


def _by_recordings(
    found: collectives.Stuck, silent: set[int], seen: Mapping[int, Place], world_size: int, cut: Stacks
) -> _Verdict | None:
    """None: the recordings name nobody, or too many."""
    culprits = found.culprits
    # A rank that is stuck in nothing that is recorded may still wait for others, over the store or a CPU group; its stack says so.
    busy = frozenset(rank for rank in culprits if rank in silent or rank not in seen or not seen[rank].waits)
    if busy and any(not state for rank, state in found.fronts.items() if rank in culprits):
        culprits = busy
    outliers = culprits | _stopped(silent, found)
    if not culprits or len(outliers) > cut.outliers_share_max * world_size:
        return None
    because = tuple((why, ranks & culprits) for why, ranks in found.because if ranks & culprits)
    return _Verdict(frozenset(outliers), because, world_size - len(outliers))


def _stopped(silent: set[int], found: collectives.Stuck) -> frozenset[int]:
    """Silent ranks that had no part in the recordings: those that had are judged by them."""
    return frozenset(rank for rank in silent if rank not in found.fronts)


def _halted(ranks: Mapping[int, _Rank]) -> frozenset[int]:
    """Ranks whose main process is known not to run. Nobody gets past them, so wherever the others stand, they wait; and some of those
    are one collective further than the rest, which looks like standing apart."""
    return frozenset(rank for rank, state in ranks.items() if state.main is not None and state.main.state in _NOT_RUNNING)


def _by_stacks(
    ranks: Mapping[int, _Rank], seen: Mapping[int, Place], silent: set[int], world_size: int, cut: Stacks
) -> _Verdict:
    if (halted := _halted(ranks)) and len(halted) <= cut.outliers_share_max * world_size:
        return _Verdict(halted, (), world_size - len(halted))
    groups: dict[Place, set[int]] = defaultdict(set)
    for rank, place in seen.items():
        groups[place].add(rank)
    largest = max((len(held) for held in groups.values()), default=0)
    dominant = {place for place, held in groups.items() if len(held) > cut.dominant_ratio * largest}
    waiting = sum(len(held) for place, held in groups.items() if place.waits)
    others = [(place, held) for place, held in groups.items() if place not in dominant]
    if waiting >= cut.waiting_share_min * max(1, len(seen)):
        busy = [(place, held) for place, held in groups.items() if not place.waits]
        others = busy or ([] if silent else others)
    outliers = frozenset(silent).union(*(held for _, held in others))
    because = [(_written(place), frozenset(held)) for place, held in others]
    if not outliers:
        because = _odd_children(ranks, seen, cut)
        outliers = frozenset().union(*(held for _, held in because))
    if len(outliers) > cut.outliers_share_max * world_size:
        why = "no stack" if len(silent) > cut.outliers_share_max * world_size else "a stack that is not the others'"
        text = f"{len(outliers)} of {world_size} ranks have {why}: too many to call the rest healthy"
        return _Verdict(frozenset(), (), 0, text)
    return _Verdict(outliers, tuple(because), sum(len(groups[place] - outliers) for place in dominant))


def _odd_children(ranks: Mapping[int, _Rank], seen: Mapping[int, Place], cut: Stacks) -> list[tuple[str, frozenset[int]]]:
    """Ranks of which a data loader or a checkpoint writer does not run, or stands where no other rank's of its sort does."""
    places: dict[str, dict[Place, set[int]]] = defaultdict(lambda: defaultdict(set))
    odd: dict[str, set[int]] = defaultdict(set)
    for rank in seen:
        for child in ranks[rank].children:
            sort = _sort(child)
            if not sort:
                continue
            if child.state in _NOT_RUNNING or child.state == "D":
                odd[f"its {sort} is in state {child.state}"].add(rank)
            elif child.threads:
                places[sort][frames.of_threads(child.threads)].add(rank)
    for sort, groups in places.items():
        largest = max(map(len, groups.values()))
        for place, held in groups.items():
            if len(held) <= cut.dominant_ratio * largest:
                odd[f"its {sort}: {_written(place)}"] |= held
    return [(why, frozenset(held)) for why, held in odd.items()]


def _sort(child: ProcessStack) -> str:
    """What a child of a rank is there for; '' for a helper, whose stack means nothing."""
    text = ";".join(child.threads)
    if _LOADER.search(text):
        return "data loader"
    if _HELPERS.search(child.command) or _HELPERS.search(text):
        return ""
    if _WRITER.search(text) or _WRITER.search(child.command):
        return "checkpoint writer"
    return "child"


def _written(place: Place) -> str:
    return " < ".join(reversed(place.frames)) or "no Python code"


def _lines(verdict: _Verdict, ranks: Mapping[int, _Rank], places: Mapping[int, str], silent: set[int]) -> tuple[str, ...]:
    """Ranks, then where: the few first, since those are looked for."""
    if verdict.says_nothing:
        return (verdict.says_nothing, *_census(places)[: _LINES_MAX - 1])
    lines: list[tuple[frozenset[int], str]] = [(held, why) for why, held in verdict.because]
    mute: dict[str, set[int]] = defaultdict(set)
    told = {rank for _, held in verdict.because for rank in held}
    for rank in verdict.outliers & silent - told:
        mute[_why_silent(ranks[rank])].add(rank)
    lines += [(frozenset(held), why) for why, held in mute.items()]
    lines.sort(key=lambda line: (len(line[0]), min(line[0], default=0)))
    return tuple(_line(held, why) for held, why in lines[:_LINES_MAX])


def _why_silent(state: _Rank) -> str:
    main = state.main
    if main is None:
        return "nothing is known of it"
    if main.state in _NOT_RUNNING:
        return {"T": "stopped (state T)", "t": "stopped by a tracer (state t)"}.get(
            main.state, f"not running (state {main.state})"
        )
    return f"no stack: {main.error or 'none was given'}" + (f" (state {main.state})" if main.state else "")


def _of_unread(unread: set[int], ranks: Mapping[int, _Rank]) -> list[str]:
    held: dict[str, set[int]] = defaultdict(set)
    for rank in unread:
        main = ranks[rank].main
        held[main.error if main is not None else ""].add(rank)
    return [_line(frozenset(some), f"not read, so nothing is known: {why}") for why, some in sorted(held.items())]


def _census(places: Mapping[int, str]) -> list[str]:
    held: dict[str, set[int]] = defaultdict(set)
    for rank, where in places.items():
        held[where].add(rank)
    return [
        _line(frozenset(ranks), where) for where, ranks in sorted(held.items(), key=lambda item: (len(item[1]), min(item[1])))
    ]


def _line(ranks: frozenset[int], why: str) -> str:
    where = compact(ranks)
    shown = where if len(where) <= NAME_MAX else f"{where[:NAME_MAX].rsplit(',', 1)[0]},…"
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}: {why}"[:_LINE_CHARS_MAX]


def groups_of(processes: Sequence[ProcessStack], world_size: int) -> list[tuple[str, int]]:
    """Each place with the number of ranks in it, the most frequent first: what a person asks for before anything else."""
    ranks = _trees(processes, range(world_size))
    counts = Counter(_written(state.place) for state in ranks.values() if state.place is not None and _speaks(state))
    return counts.most_common()
