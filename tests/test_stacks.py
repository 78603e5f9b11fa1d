"""Who is out of line, by stacks and flight recordings: hangs with known culprits, and what must not change the answer."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actuators import flight_recorder, py_spy
from actuators.flight_recorder import BadDump, recording
from actuators.py_spy import BadStacks
from events.finding import ProcessStack
from events.rank_set import compact, expand
from processors import frames
from processors.collectives import stuck
from processors.parallel_groups import Layout, smallest_cover
from processors.policy import Stacks
from processors.stacks import aggregate
from tests.hang_cases import LOCKED, MAIN, NORM, Case, cases, figure_7, processes
from tests.hang_simulation import dumps, job_of, program

RECORDED = Path(__file__).parents[2] / "shared" / "cases" / "flight-recorder"
EVERY = cases()


@pytest.mark.parametrize("case", [case for case in EVERY if case.exact], ids=lambda case: case.name)
def test_a_known_culprit_is_named_and_nobody_else(case: Case) -> None:
    """And those alone whose evidence is the same to the byte: a device that hangs in a collective which everyone entered looks like its
    peers' devices, unless kernels are timed."""
    found = aggregate(case.processes, case.layout.world)
    assert set(found.outliers) == case.expected | case.alike, found.stuck_at
    assert set(found.silent) <= set(found.outliers)


@pytest.mark.parametrize("case", [case for case in EVERY if not case.exact], ids=lambda case: case.name)
def test_where_evidence_does_not_tell_the_culprit_from_its_group_both_are_named(case: Case) -> None:
    """Of a failed device the recorder notes nothing more, and in dumps of what is pending transfers can't always be counted."""
    found = aggregate(case.processes, case.layout.world)
    assert case.expected <= set(found.outliers)
    assert len(found.outliers) <= max(
        len(case.layout.group(kind, rank).ranks) for kind in ("tp", "pp", "dp") for rank in case.expected
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lock_gil_1st", "gpu_error_1st"])
def test_the_recorded_cases_name_their_faulty_ranks(name: str) -> None:
    file = RECORDED / f"{name}.json.gz"
    if not file.exists():
        pytest.skip("the recorded cases are not here")
    told = json.loads(gzip.decompress(file.read_bytes()))
    found = [ProcessStack(rank=int(rank), pid=0, **recording(dump).fields()) for rank, dump in told["dumps"].items()]
    assert list(aggregate(found, len(found)).outliers) == told["faulty_ranks"]


def test_the_papers_example_in_full() -> None:
    found = aggregate(processes(32, figure_7), 32)
    assert (found.groups_seen, found.dominant, found.ranks, found.silent) == (4, 24, 32, ())
    group = smallest_cover(Layout(2, 4, 4, 2), found.outliers)
    assert group is not None and (group.kind, group.machines) == ("pp", (12, 13, 14, 15))
    assert found.stuck_at[0].startswith("ranks 28-29: isend < backward_step (schedules.py:390) < ")


def test_384_ranks_collapse_to_four_places() -> None:
    bloom = next(case for case in EVERY if case.name.startswith("BLOOM"))
    assert aggregate(bloom.processes, 384).groups_seen == 4


@given(st.sampled_from(EVERY), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_the_order_of_processes_changes_nothing(case: Case, dice: random.Random) -> None:
    mixed = list(case.processes)
    dice.shuffle(mixed)
    assert aggregate(mixed, case.layout.world) == aggregate(case.processes, case.layout.world)


@given(st.integers(0, 10_000), st.sampled_from(["stopped", "killed"]), st.sampled_from([1, 3, 8]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_rank_that_stops_anywhere_in_any_layout_is_found_by_its_peers_recordings(
    seed: int, fault: Any, ahead: int, whole: bool
) -> None:
    dice = random.Random(seed)
    tp, pp, dp = dice.choice([(2, 2, 2), (4, 2, 1), (1, 1, 6), (1, 3, 3), (2, 1, 4), (1, 5, 1), (3, 2, 2)])
    layout = Layout(tp, pp, dp, 1, dice.choice(["tp-pp-dp", "tp-dp-pp"]))  # type: ignore[arg-type]
    rank = dice.randrange(layout.world)
    at = dice.randrange(1, len(program(job_of(layout), rank, 3, 3)))
    found = {of: ProcessStack(rank=of, pid=0, **recording(told).fields()) for of, told in dumps(layout, {rank: (fault, at)}, whole=whole, ahead=ahead)}  # fmt: skip
    assert stuck(found, range(layout.world)).culprits == {rank}


@given(st.integers(0, 10_000), st.sampled_from([3, 6, 12]))
@settings(max_examples=60, deadline=None)
def test_a_device_that_fails_anywhere_is_named_where_the_dumps_show_what_was_completed(seed: int, ahead: int) -> None:
    """Its recorder notes nothing more, at a transfer or a collective; its peers have completed what is pending for it."""
    dice = random.Random(seed)
    tp, pp, dp = dice.choice([(2, 2, 2), (1, 4, 4), (1, 8, 1), (1, 8, 2), (2, 4, 2), (1, 1, 8), (4, 2, 2)])
    layout = Layout(tp, pp, dp, 1, dice.choice(["tp-pp-dp", "tp-dp-pp"]))  # type: ignore[arg-type]
    rank = dice.randrange(layout.world)
    at = dice.randrange(1, len(program(job_of(layout), rank, 3, 3)) - 3)
    found = {of: ProcessStack(rank=of, pid=0, **recording(told).fields()) for of, told in dumps(layout, {rank: ("error", at)}, whole=True, ahead=ahead)}  # fmt: skip
    assert stuck(found, range(layout.world)).culprits == {rank}


def test_transfers_are_counted_between_collectives_and_only_where_all_counts_agree() -> None:
    """Rank 1 has received three times since the second collective, rank 0 noted two sends: its watchdog, or its device, has stopped. And a
    receive of what was sent ahead says nothing as long as something is before it."""

    def dump(rank: int, *ops: str, last: int = 2) -> ProcessStack:
        entries, seq, transfers = list[dict[str, Any]](), 1, 0
        for at, op in enumerate(ops):
            name, _, state = op.partition("/")
            seq, transfers = seq + (name == "all_reduce"), transfers + (name != "all_reduce")
            called = {"send": "send 0->1", "recv": "recv 1<-0"}.get(name, name)
            entries.append(
                {"record_id": 900 + at, "profiling_name": f"nccl:{called}", "process_group": ["0", "default_pg"], "collective_seq_id": seq,
                 "p2p_seq_id": transfers, "is_p2p": name != "all_reduce", "state": "scheduled" if state else "completed"}
            )  # fmt: skip
        told = {"entries": entries, "pg_config": {"0": {"desc": "default_pg", "ranks": "[0, 1]"}}}
        return ProcessStack(rank=rank, pid=0, **recording(told).fields())

    def culprits(zero: ProcessStack, one: ProcessStack) -> set[int]:
        return set(stuck({0: zero, 1: one}, range(2)).culprits)

    sent, got, step = "send", "recv", "all_reduce"
    ahead = dump(1, got, step, got, got, got, "all_reduce/p")
    assert culprits(dump(0, sent, step, sent, sent, "send/p", "all_reduce/p"), ahead) == {0}
    assert culprits(dump(0, step, sent, sent, sent, "all_reduce/p"), dump(1, step, got, got, "recv/p", "all_reduce/p")) == {1}
    # counted from a pending collective alone, as in dumps of what is pending
    assert culprits(dump(0, "send/p", "all_reduce/p"), dump(1, "all_reduce/p")) == {0}
    # the third was never sent
    assert culprits(dump(0, step, sent, sent), dump(1, step, got, got, "recv/p")) == {0}
    zero = dump(0, step, sent, sent, sent)
    assert (zero.groups[0].done, zero.groups[0].since) == (2, ((1, 1, 3),))
    before = dump(1, step, got, "all_reduce/p", "recv/p")
    assert before.groups[0].since == ((0, 0, 1),)
    assert culprits(zero, before) == {
        0
    }  # it never entered the collective that the other waits in; what it sent ahead is no matter


def test_a_stack_and_a_recording_of_one_job_agree_and_the_recording_leads() -> None:
    layout = Layout(2, 2, 2)
    recorded = {of: recording(told).fields() for of, told in dumps(layout, {5: ("stopped", 9)})}
    both = [ProcessStack(rank=rank, pid=rank + 1, state="S", threads=(NORM,), **recorded[rank]) for rank in range(8)]
    found = aggregate(both, 8)
    assert found.outliers == (5,)
    assert found.stuck_at == ("rank 5: never entered the operation that others wait in",)


def test_numbers_of_transfers_are_not_taken_for_those_of_collectives() -> None:
    """pg_status counts both: that a rank has done 14,145 transfers does not mean that it has entered the 195th collective."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}

    def entry(name: str, number: int, transfer: int, state: str = "scheduled") -> dict[str, Any]:
        return {"record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number, "p2p_seq_id": transfer,
                "profiling_name": name, "state": state, "is_p2p": "send" in name}  # fmt: skip

    waits = {
        "pg_config": config,
        "pg_status": {"0": {"last_enqueued_collective": 195}},
        "entries": [entry("nccl:all_reduce", 195, 14145)],
    }
    absent = {"pg_config": config, "pg_status": {"0": {"last_enqueued_collective": 14145}}, "entries": []}
    whole = absent | {"entries": [entry("nccl:send 2->3", 194, 14145, "completed")]}
    for last in (absent, whole):
        told = {0: waits, 1: waits, 2: waits, 3: last}
        found = {rank: ProcessStack(rank=rank, pid=0, **recording(dump).fields()) for rank, dump in told.items()}
        assert stuck(found, range(4)).culprits == {3}


def test_most_ranks_silent_says_nothing_and_says_so() -> None:
    found = aggregate(processes(8, lambda rank: NORM if rank == 0 else ""), 8)
    assert found.outliers == found.silent == ()
    assert found.stuck_at[0] == "7 of 8 ranks have no stack: too many to call the rest healthy"


def test_ranks_that_the_reader_could_not_read_are_neither_outliers_nor_healthy() -> None:
    """A node without py-spy would go with every hang. One that is stopped there is known by its state."""

    def rank(number: int, **more: Any) -> ProcessStack:
        fields = {"rank": number, "pid": 10 + number, "state": "S", "threads": (NORM,)}
        return ProcessStack.model_validate(fields | more)

    def unread(number: int, **more: Any) -> ProcessStack:
        return rank(number, threads=(), error="there is no py-spy", unread=True, **more)

    node = [unread(number) for number in range(4, 8)]
    others = [rank(number) for number in range(8, 16)]
    found = aggregate([*(rank(number) for number in range(3)), rank(3, threads=(LOCKED,)), *node, *others], 16)
    assert (found.outliers, found.silent, found.dominant) == ((3,), (), 11)
    assert found.stuck_at[-1] == "ranks 4-7: not read, so nothing is known: there is no py-spy"
    found = aggregate([*(rank(number) for number in range(4)), *node[:3], unread(7, state="T"), *others], 16)
    assert found.outliers == found.silent == (7,)
    found = aggregate([unread(number) for number in range(12)] + others[4:], 16)
    assert (found.outliers, found.dominant) == ((), 0) and found.stuck_at[0] == "12 of 16 ranks could not be read"
    assert aggregate([rank(number) for number in range(12)] + [unread(number) for number in range(12, 16)], 16).outliers == ()


def test_ranks_that_are_not_the_jobs_are_ignored_and_missing_ones_are_silent() -> None:
    found = aggregate(
        [*processes(4, lambda rank: NORM if rank != 2 else None), ProcessStack(rank=-1, pid=5), ProcessStack(rank=9, pid=6)], 4
    )
    assert found.outliers == found.silent == (2,)


def test_two_pipelines_halves_are_as_often_as_each_other_and_no_outliers() -> None:
    """Of a stack that half of the ranks have, the other half's is no outlier; with the ratio at 1 the smaller one is."""
    where = lambda rank: f"{MAIN};a (m.py:1)" if rank < 5 else f"{MAIN};b (m.py:1)"  # noqa: E731
    assert aggregate(processes(9, where), 9).outliers == ()
    assert aggregate(processes(9, where), 9, Stacks(dominant_ratio=0.9)).outliers == (5, 6, 7, 8)


def test_9600_ranks_in_under_200_ms() -> None:
    """Of processor time, the best of five: the machine may be busy."""
    whole = [
        ProcessStack.model_validate(p.model_dump())
        for p in processes(9600, lambda rank: figure_7(rank if rank < 32 else rank % 24))
    ]
    took = []
    for _ in range(5):
        start = time.process_time()
        found = aggregate(whole, 9600)
        took.append(time.process_time() - start)
    assert found.outliers == tuple(range(24, 32))
    assert min(took) < 0.2


# Frames


def test_a_wait_is_a_wait_at_any_depth_and_by_any_name() -> None:
    waits = {
        f"{MAIN};all_reduce (torch/distributed/distributed_c10d.py:1);c10d::Work::wait (libtorch_cpu.so)": "peers",
        f"{MAIN};backward (torch/autograd/__init__.py:3);gloo::transport::tcp::Buffer::waitRecv (libtorch_cpu.so)": "peers",
        f"{MAIN};item (model.py:3);at::_ops::_local_scalar_dense::call (libtorch_cpu.so)": "device",
        f"{MAIN};recv (multiprocessing/connection.py:250)": "",
        f"{MAIN};wait (threading.py:327)": "",
        f"{MAIN};get (multiprocessing/queues.py:113);select_poll_poll (selectmodule.c.h:223);poll (libc.so.6)": "",
        f"{MAIN};c10d::Reducer::prepare_for_backward (libtorch_cpu.so)": "",
    }
    assert {thread: frames.place(thread).waits for thread in waits} == waits
    assert frames.place(f"{MAIN};get (queues.py:1);select_poll_poll (selectmodule.c.h:223)").frames[-1] == "get (queues.py)"


def test_of_a_backward_pass_the_thread_that_runs_its_hooks_counts() -> None:
    main = f"{MAIN};_engine_run_backward (torch/autograd/graph.py:823)"
    hook = "_post_backward_hook (fsdp/_runtime_utils.py:700);reduce_scatter_tensor (torch/distributed/distributed_c10d.py:4200)"
    assert frames.of_threads((main, "_feed (multiprocessing/queues.py:231)", hook)).waits == "peers"
    assert frames.of_threads((main,)).waits == ""


# Files of others


def test_a_recording_is_read_from_json_and_from_a_pickle_alike() -> None:
    told = dict(dumps(Layout(2, 2, 2), {5: ("stopped", 9)}))[0]
    assert recording(flight_recorder.loads(pickle.dumps(told))) == recording(flight_recorder.loads(json.dumps(told).encode()))
    assert recording(told).pending


def test_a_pickle_with_a_class_is_refused_before_it_is_made(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "made",))

    with pytest.raises(BadDump, match="holds no classes"):
        flight_recorder.loads(pickle.dumps({"entries": [Bomb()]}))
    assert not (tmp_path / "made").exists()


def test_a_pickle_of_lists_in_lists_or_of_itself_is_read_as_far_as_a_dump_goes() -> None:
    """A hundred bytes that are ten to the thirtieth values when they are written out; and a value that is in itself."""
    many: Any = [1] * 10
    for _ in range(29):
        many = [many] * 10
    for told in (
        {"entries": many},
        {"entries": [{"process_group": [many, many], "profiling_name": many, "record_id": many}]},
        {"pg_config": {"0": {"desc": many, "ranks": many}}, "pg_status": {"0": {"last_enqueued_collective": many}}},
    ):
        found = recording(flight_recorder.loads(pickle.dumps(told)))
        assert [group.ranks for group in found.groups] in ([], [""]) and len(found.pending) < 2
    own: dict[str, Any] = {}
    own["entries"] = [{"process_group": own, "profiling_name": own}]
    assert recording(flight_recorder.loads(pickle.dumps(own))).pending[0].op == "unknown"


_TUPLES = b")" + b"".join(b"q\x00h\x00\x86" for _ in range(200))  # ((..., ...), (..., ...)): 2**200 of them to hash


@pytest.mark.parametrize(
    "raw", [
        b"\x80\x02}" + _TUPLES + b"K\x01s.", b"\x80\x02}(" + _TUPLES + b"K\x01u.", b"\x80\x02(" + _TUPLES + b"K\x01d.",
        b"\x80\x04\x8f(" + _TUPLES + b"\x90.", b"\x80\x04(" + _TUPLES + b"\x91.", b"\x80\x02)(K\x01e.", b"\x80\x02NK\x01a.",
        b"\x80\x02cposix\nsystem\nX\x01\x00\x00\x00a\x85R.", b"\x80\x02N}b.", b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"x.",
        b"\x80\x02" + b"]" * (16 << 20), b"\x80\x02X\xff\xff\xff\x7fa.",
    ],
)  # fmt: skip
def test_a_pickle_that_asks_for_more_than_a_dump_needs_is_refused(raw: bytes) -> None:
    with pytest.raises(BadDump, match=r"^it is "):
        flight_recorder.loads(raw)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_each_protocol_of_pickles_gives_what_json_gives(protocol: int) -> None:
    told = dict(dumps(Layout(2, 2, 2), {5: ("stopped", 9)}, whole=True))[0]
    told |= {
        "entries": [{**entry, "frames": told["pg_config"]} for entry in told["entries"]],
        "version": "2.9",
        "sizes": (1, 2.5, None),
    }
    assert flight_recorder.loads(pickle.dumps(told, protocol)) == told


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\x80\x04garbage", b"[" * 100_000, b"{}", b'{"entries": 5}', b'"text"', b"\xff\xfe\x00"]
)
def test_what_is_no_dump_is_one_sentence(raw: bytes) -> None:
    with pytest.raises(BadDump, match=r"^it "):
        recording(flight_recorder.loads(raw))
    with pytest.raises(BadStacks, match=r"^it "):
        py_spy.processes(raw, 0)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["entries", "pg_config", "pg_status", "process_group", "ranks", "state", "profiling_name", "record_id", "0", "frames", "name", "pid"]), inner, max_size=4), max_leaves=20))  # fmt: skip
@settings(max_examples=200)
def test_any_json_is_a_dump_or_refused(value: Any) -> None:
    for read in (recording, lambda told: py_spy.from_threads(told, 0)):
        try:
            read(value)
        except (BadDump, BadStacks) as error:
            assert str(error).startswith("it ")


@given(st.sets(st.integers(0, 3000)) | st.builds(range, st.integers(0, 50), st.integers(50, 900), st.integers(1, 40)).map(set))
def test_sets_of_ranks_go_through_text(ranks: set[int]) -> None:
    assert expand(compact(ranks)) == tuple(sorted(ranks))


def test_even_steps_are_short() -> None:
    assert compact(range(0, 9600, 8)) == "0-9592:8"
    assert compact([0, 1, 2, 3, 8, 16, 24, 31]) == "0-3,8-24:8,31"
    for bad in ("1-", "a", "0-5:0", "0-999999999"):
        with pytest.raises(ValueError, match="no run of ranks"):
            expand(bad)


def test_a_process_dumped_as_text_is_the_one_dumped_as_json() -> None:
    text = b"""Process 41: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 41 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    main (job.py:15)
    <module> (job.py:17)
Thread 43 (idle): "QueueFeederThread"
    _feed (multiprocessing/queues.py:231)
"""
    told = [
        {"pid": 41, "thread_name": "QueueFeederThread", "os_thread_id": 43, "frames": [{"name": "_feed", "short_filename": "multiprocessing/queues.py", "line": 231}]},
        {"pid": 41, "thread_name": "MainThread", "os_thread_id": 41, "frames": [
            {"name": "all_reduce", "short_filename": "torch/distributed/distributed_c10d.py", "line": 3252},
            {"name": "main", "short_filename": "job.py", "line": 15}, {"name": "<module>", "short_filename": "job.py", "line": 17},
        ]},
    ]  # fmt: skip
    (by_text,), (by_json,) = py_spy.processes(text, 3), py_spy.processes(json.dumps(told).encode(), 3)
    assert by_text.threads == by_json.threads
    assert by_text.threads[0] == "<module> (job.py:17);main (job.py:15);all_reduce (torch/distributed/distributed_c10d.py:3252)"
    assert (by_text.rank, by_text.pid, by_text.command) == (3, 41, "python train.py")


@pytest.mark.parametrize(
    ("process", "line", "read"),
    [("1", "7", "f (a.py:7)"), ("1", "1" * 5000, None), ("1", "\u00b2", None), ("1" * 5000, "7", ""), ("\u00b2", "7", "")],
)
def test_numbers_in_text_are_numbers_or_text(process: str, line: str, read: str | None) -> None:
    raw = f'Process {process}: x\nThread 1 (idle): "MainThread"\n    f (a.py:{line})\n'.encode()
    if read == "":
        with pytest.raises(BadStacks, match=r"^it "):
            py_spy.processes(raw, 0)
    else:
        assert py_spy.processes(raw, 0)[0].threads == (read or f"f ({f'a.py:{line}'[-160:]})",)


def test_transfers_to_very_many_peers_take_no_time() -> None:
    """Counted anew for each collective they would take minutes."""
    group = {"process_group": ["0", "default_pg"], "state": "completed"}
    sends = [{"record_id": n, "profiling_name": f"nccl:send 0->{n}", **group} for n in range(90_000)]
    steps = [
        {"record_id": 90_000 + n, "profiling_name": "nccl:all_reduce", "collective_seq_id": n, **group} for n in range(90_000)
    ]
    begun_s = time.monotonic()
    assert recording({"entries": sends + steps}).groups[0].done == 89_999
    assert time.monotonic() - begun_s < 5


def test_of_more_peers_than_are_kept_nothing_is_counted() -> None:
    """One that was left out would be taken for one to which nothing was sent."""
    entries = [
        {"profiling_name": "nccl:all_reduce", "collective_seq_id": 1},
        *({"profiling_name": f"nccl:send 0->{n}"} for n in range(1, 66)),
    ]
    entries = [
        {"record_id": n, "process_group": ["0", "default_pg"], "state": "completed", **entry} for n, entry in enumerate(entries)
    ]
    counted = [recording({"entries": entries[:length]}).groups[0] for length in (65, 66)]
    assert [(len(group.since), group.done) for group in counted] == [(64, 1), (0, -1)]


def test_names_of_templates_in_templates_take_no_time() -> None:
    """A pass over the name for each level of a hundred thousand would take an hour."""
    deep = "<" * 100_000 + ">" * 100_000
    begun_s = time.monotonic()
    (found,) = py_spy.processes(json.dumps([{"frames": [{"name": f"f{deep}", "line": 1}]}]).encode(), 0)
    assert len(found.threads[0]) < 200
    aggregate([ProcessStack(rank=0, pid=1, threads=(f"main (a.py:1);f{deep} (b.so)",))], 1)
    assert time.monotonic() - begun_s < 5


def test_a_long_stack_keeps_both_ends() -> None:
    told = [{"pid": 1, "thread_name": "MainThread", "frames": [{"name": f"f{i}", "short_filename": "deep.py", "line": i} for i in range(500, 0, -1)]}]  # fmt: skip
    (made,) = py_spy.processes(json.dumps(told).encode(), 0)
    stack = made.threads[0].split(";")
    assert len(stack) == py_spy.FRAMES_MAX + 1
    assert stack[0] == "f1 (deep.py:1)" and stack[-1] == "f500 (deep.py:500)"
