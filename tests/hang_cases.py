"""Hangs with known culprits, for the tests and the accuracy benchmark: stacks after published descriptions (the ByteRobust paper's
figure 7, the BLOOM and OPT chronicles, PyTorch's and Megatron-LM's bug reports), and flight recordings of simulated jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from actuators.flight_recorder import recording
from events.finding import ProcessStack
from processors.parallel_groups import Layout
from tests.hang_simulation import Fault, dumps, job_of, program, run

C10D = "torch/distributed/distributed_c10d.py"
MAIN = "<module> (pretrain.py:301);pretrain (megatron/training/training.py:512);train (megatron/training/training.py:1544)"
STEP = f"{MAIN};train_step (megatron/training/training.py:871)"
EVALUATE = f"{MAIN};evaluate_and_print_results (training/training.py:2210);evaluate (training/training.py:2121)"
SCHEDULE = f"{STEP};forward_backward_pipelining (pipeline_parallel/schedules.py:1920)"
REDUCE = f"{STEP};finalize_model_grads (distributed/finalize_model_grads.py:240);finish_grad_sync (distributed/param_and_grad_buffer.py:301);wait ({C10D}:520)"
NORM = f"{STEP};get_grad_norm_fp32 (optimizer/clip_grads.py:101);all_reduce ({C10D}:2810)"
RECV = f"{SCHEDULE};recv_forward (pipeline_parallel/p2p_communication.py:411);_communicate (pipeline_parallel/p2p_communication.py:342);wait ({C10D}:520)"
RECV_BACK = f"{SCHEDULE};recv_backward (pipeline_parallel/p2p_communication.py:461);_communicate (pipeline_parallel/p2p_communication.py:342);wait ({C10D}:520)"
SEND_BACK = f"{SCHEDULE};send_backward (pipeline_parallel/p2p_communication.py:561);_communicate (pipeline_parallel/p2p_communication.py:342);wait ({C10D}:520)"
ISEND = f"{SCHEDULE};backward_step (schedules.py:390);isend ({C10D}:2410)"
IRECV = f"{SCHEDULE};forward_step (schedules.py:250);irecv ({C10D}:2460)"
GATHER = (
    f"{SCHEDULE};forward_step (schedules.py:250);forward (tensor_parallel/layers.py:870);all_gather_into_tensor ({C10D}:3790)"
)
FORWARD = f"{SCHEDULE};forward_step (schedules.py:250);forward (transformer/attention.py:512);core_attention (transformer/dot_product_attention.py:141)"
BACKWARD = f"{SCHEDULE};backward_step (schedules.py:390);backward (torch/autograd/__init__.py:347);_engine_run_backward (torch/autograd/graph.py:823)"
SYNC = f"{SCHEDULE};forward_step (schedules.py:260);synchronize (torch/cuda/__init__.py:1040);cudaDeviceSynchronize (libcudart.so.12)"
NEXT = f"{EVALUATE};__next__ (torch/utils/data/dataloader.py:733);_get_data (torch/utils/data/dataloader.py:1420);_try_get_data (torch/utils/data/dataloader.py:1251);get (queue.py:180);wait (threading.py:331)"
BROADCAST_DATA = (
    f"{EVALUATE};forward_step (schedules.py:250);broadcast_data (tensor_parallel/data.py:80);broadcast ({C10D}:2721)"
)
BARRIER = f"{MAIN};save_checkpoint (training/checkpointing.py:610);barrier ({C10D}:4620)"
WRITING = f"{MAIN};save_checkpoint (training/checkpointing.py:550);save (dist_checkpointing/serialization.py:390);write_data (filesystem_async.py:310)"
COMPILING = f"{STEP};forward_step (schedules.py:250);_fn (torch/_dynamo/eval_frame.py:830);compile_fx (torch/_inductor/compile_fx.py:1500);codegen (torch/_inductor/graph.py:2010)"
LOCKED = f"{STEP};log_metrics (metrics/sink.py:88);flush (metrics/sink.py:41);acquire (threading.py:168)"
WORKER_IDLE = "<module> (pretrain.py:301);_worker_loop (torch/utils/data/_utils/worker.py:320);get (multiprocessing/queues.py:113);poll (multiprocessing/connection.py:257)"
WORKER_LOCKED = "<module> (pretrain.py:301);_worker_loop (torch/utils/data/_utils/worker.py:349);fetch (_utils/fetch.py:52);__getitem__ (data/gpt_dataset.py:190);_open (data/indexed_dataset.py:260);acquire (filelock/_api.py:340)"
WORKER_READS = "<module> (pretrain.py:301);_worker_loop (torch/utils/data/_utils/worker.py:349);fetch (_utils/fetch.py:52);__getitem__ (data/gpt_dataset.py:190);pread (data/indexed_dataset.py:300)"


@dataclass(frozen=True, slots=True)
class Case:
    """`expected`: the ranks at fault; none where nobody can be told from the others. `exact`: the answer must be just those, and `alike`: ranks
    at which the same fault leaves the very same evidence, byte for byte, so that whoever names the culprit must name them, too."""

    name: str
    processes: tuple[ProcessStack, ...]
    layout: Layout
    expected: frozenset[int]
    exact: bool = True
    alike: frozenset[int] = frozenset()


def processes(world: int, where: Callable[[int], str | None], children: Callable[[int], tuple[str, ...]] = lambda rank: (), state: Callable[[int], str] = lambda rank: "S") -> tuple[ProcessStack, ...]:  # fmt: skip
    """`where`: a rank's main thread; None: no process at all; "": no stack, by its state."""
    made = []
    for rank in range(world):
        stack = where(rank)
        if stack is None:
            continue
        error = "" if stack else "Failed to suspend process"
        made.append(ProcessStack(rank=rank, pid=1000 * (rank + 1), parent_pid=7, state=state(rank), threads=(stack,) if stack else (), error=error))  # fmt: skip
        for index, child in enumerate(children(rank)):
            made.append(ProcessStack(rank=rank, pid=1000 * (rank + 1) + index + 1, parent_pid=1000 * (rank + 1), state="S", threads=(child,)))  # fmt: skip
    return tuple(made)


def figure_7(rank: int) -> str:
    return {15: GATHER, 14: ISEND, 13: IRECV, 12: IRECV}.get(rank // 2, REDUCE)


def _described() -> Iterator[Case]:
    paper, plain = Layout(2, 4, 4, 2), Layout(dp=8)
    some = frozenset

    def one(rank: int, at: str | None, others: str, state: str = "S", layout: Layout = plain, name: str = "") -> Case:
        where = lambda r: at if r == rank else others  # noqa: E731
        return Case(name, processes(layout.world, where, state=lambda r: state if r == rank else "S"), layout, some({rank}))

    yield Case("the paper's figure 7: a pipeline stuck in its last stage", processes(32, figure_7), paper, some(range(24, 32)))
    yield Case("BLOOM, 18 May 2022: a lock in one data loader during evaluation, 384 ranks in four places", *_bloom())
    yield one(5, "", NORM, "T", name="a rank stopped by SIGSTOP, py-spy fails on it")
    yield one(5, FORWARD, NORM, "T", name="a rank stopped by SIGSTOP, its Python frames read without suspending it")
    yield one(5, None, NORM, name="a rank died and left nothing")
    yield one(5, "", NORM, "Z", name="a rank is a zombie")
    yield one(2, LOCKED, NORM, name="a rank in a lock of its own logging")
    yield one(7, COMPILING, NORM, name="a rank still compiles while the others wait")
    yield one(3, WRITING, BARRIER, "D", name="a rank writes its checkpoint to a file system that hangs")
    yield one(6, NEXT, NORM, name="a rank's data does not come")
    yield one(1, SYNC, NORM, name="a rank waits for its own device, the others for it")
    yield one(
        4, f"{EVALUATE};all_reduce ({C10D}:2810)", NORM, name="a rank went into evaluation, the others into the next step"
    )
    stage = lambda rank: FORWARD if rank in (20, 21) else {0: SEND_BACK, 1: SEND_BACK, 3: RECV}.get(rank // 2 % 4, RECV_BACK) if rank // 8 == 2 else REDUCE  # noqa: E731  # fmt: skip
    yield Case(
        "one machine stuck in a pipeline stage's forward, its neighbours in send and receive",
        processes(32, stage),
        paper,
        some({20, 21}),
    )
    stages = [RECV, RECV_BACK, SEND_BACK, NORM, REDUCE, FORWARD, GATHER, BARRIER]
    many = lambda rank: stages[rank // 8]  # noqa: E731
    yield Case("as many ranks compute as wait in any one place", processes(64, many), Layout(8, 8, 1, 8), some(range(40, 48)))
    pair = lambda rank: LOCKED if rank == 1 else NORM  # noqa: E731
    yield Case("one of two ranks is in a lock", processes(2, pair), Layout(dp=2), some({1}))
    two = lambda rank: LOCKED if rank in (3, 12) else NORM  # noqa: E731
    yield Case("two ranks of two pipelines in a lock", processes(32, two), paper, some({3, 12}))
    half = lambda rank: {7: GATHER, 6: ISEND, 5: IRECV, 4: IRECV}.get(rank // 2, REDUCE)  # noqa: E731
    yield Case("one pipeline of two is stuck", processes(16, half), Layout(2, 4, 2, 2), some(range(8, 16)))
    node = lambda rank: None if rank // 8 == 3 else NORM  # noqa: E731
    yield Case("a node does not answer", processes(64, node), Layout(tp=8, dp=8, ranks_per_node=8), some(range(24, 32)))
    yield Case("all wait in one collective and nobody stands out", processes(16, lambda rank: NORM), Layout(dp=16), some())
    busy = [FORWARD, BACKWARD, NORM, f"{STEP};step (optimizer/optimizer.py:512)"]
    yield Case("a healthy step, ranks here and there", processes(16, lambda rank: busy[rank % 4]), Layout(dp=16), some())
    yield Case("py-spy is not allowed anywhere", processes(16, lambda rank: ""), Layout(dp=16), some())
    child = lambda rank: (WORKER_IDLE, WORKER_LOCKED if rank == 9 else WORKER_IDLE)  # noqa: E731
    yield Case(
        "all ranks look alike, one has a data loader in a lock",
        processes(16, lambda rank: NORM, child),
        Layout(dp=16),
        some({9}),
    )
    work = lambda rank: (WORKER_READS if rank % 3 else WORKER_IDLE, WORKER_IDLE)  # noqa: E731
    both = lambda rank: LOCKED if rank == 11 else NORM  # noqa: E731
    yield Case("healthy data loaders differ, one rank is in a lock", processes(16, both, work), Layout(dp=16), some({11}))
    yield Case("spins, addresses and depths differ, one rank is stuck", processes(16, _moments), Layout(dp=16), some({13}))
    slow = lambda rank: FORWARD if rank in (8, 9) else BACKWARD if rank == 3 else REDUCE  # noqa: E731
    yield Case("fail-slow: a machine computes while most wait, a healthy rank is late by a moment", processes(32, slow), paper, some({8, 9}), False)  # fmt: skip
    store = f"<module> (train.py:9);init_process_group ({C10D}:1710);_store_based_barrier ({C10D}:900)"
    slow_start = lambda rank: "<module> (train.py:3);_call_with_frames_removed (<frozen importlib._bootstrap>:241);exec_module (lib.py:1)" if rank == 2 else store  # noqa: E731  # fmt: skip
    yield Case("a rank still imports while the others are at the rendezvous", processes(8, slow_start), plain, some({2}))


def _bloom() -> tuple[tuple[ProcessStack, ...], Layout, frozenset[int]]:
    """TP 4, PP 12, DP 8. The first TP rank of a replica's first stage reads the data; its peers wait in its broadcast, other replicas'
    first stages wait to send, the rest for the reduction."""

    def where(rank: int) -> str:
        stage = rank // 4 % 12
        if rank == 96:
            return NEXT
        if rank // 48 == 2 and stage == 0:
            return BROADCAST_DATA
        if rank // 48 == 2:
            return f"{EVALUATE};broadcast ({C10D}:2721)"
        return f"{EVALUATE};all_reduce ({C10D}:2810)"

    found = processes(384, where, lambda rank: (WORKER_LOCKED,) if rank == 96 else (WORKER_IDLE,) if rank % 4 == 0 else ())
    return found, Layout(4, 12, 8, 8), frozenset({96})


def _moments(rank: int) -> str:
    """Native frames of healthy waits: another depth and address each, a library's spin loop at another line."""
    if rank == 13:
        return f"{STEP};forward (model.py:{80 + rank});_spin (model.py:{200 + rank});0x7f{rank:04x}a0 (libc.so.6)"
    below = [
        "",
        ";c10d::Work::wait (libtorch_cpu.so)",
        f";c10d::Work::wait (libtorch_cpu.so);pthread_cond_wait (libc.so.6);0x7fdd{rank:04x} (libc.so.6)",
    ]
    inside = f"{C10D}:{2810 + rank % 2}"
    return f"0x7f00{rank:04x} (libc.so.6);{STEP};get_grad_norm_fp32 (optimizer/clip_grads.py:101);wrapper (torch/distributed/c10d_logger.py:{81 + rank % 3});all_reduce ({inside}){below[rank % 3]}"


#: Layouts and faults of the simulated jobs: (tp, pp, dp), Megatron's order?, fault, rank, at what part of its program, whole dumps?
SIMULATED: tuple[tuple[tuple[int, int, int], bool, Fault, int, float, bool], ...] = (
    ((2, 2, 2), False, "stopped", 5, 0.3, True), ((4, 2, 2), True, "stopped", 9, 0.6, False), ((2, 4, 2), False, "stopped", 0, 0.5, False),
    ((1, 1, 8), False, "stopped", 3, 0.5, True), ((1, 4, 4), True, "stopped", 14, 0.4, False), ((8, 1, 2), False, "stopped", 11, 0.7, False),
    ((1, 8, 1), False, "stopped", 4, 0.5, True), ((2, 4, 4), True, "stopped", 30, 0.2, False),
    ((2, 2, 2), True, "killed", 6, 0.4, False), ((4, 2, 2), False, "killed", 1, 0.5, True), ((2, 4, 2), True, "killed", 12, 0.3, False),
    ((1, 1, 8), False, "killed", 7, 0.6, False), ((2, 4, 4), False, "killed", 17, 0.5, True), ((1, 4, 4), False, "killed", 2, 0.2, False),
    ((4, 2, 2), True, "error", 12, 0.5, False), ((2, 4, 2), False, "error", 7, 0.4, False), ((4, 1, 4), False, "error", 10, 0.6, True),
    ((8, 1, 2), True, "error", 3, 0.5, False), ((2, 2, 2), False, "error", 1, 0.4, False), ((1, 4, 4), False, "error", 9, 0.5, True),
    ((4, 2, 2), False, "other_call", 6, 0.5, False), ((8, 1, 2), False, "other_call", 13, 0.4, True), ((1, 1, 8), False, "other_call", 5, 0.5, False),
    ((2, 4, 2), False, "hung", 5, 0.5, True), ((4, 2, 2), True, "hung", 10, 0.4, False), ((1, 4, 4), False, "hung", 7, 0.6, False),
    ((4, 1, 4), False, "hung", 2, 0.3, True),
    # Devices that fail at transfers, which have no number that both ends share.
    ((1, 4, 4), True, "error", 6, 0.45, False), ((1, 8, 1), False, "error", 3, 0.65, False), ((1, 8, 2), False, "error", 2, 0.2, False),
    ((2, 4, 2), False, "error", 5, 0.85, True), ((1, 8, 2), True, "error", 10, 0.3, True), ((1, 4, 4), False, "error", 10, 0.4, True),
)  # fmt: skip


def _simulated() -> Iterator[Case]:
    for index, ((tp, pp, dp), megatron, fault, rank, part, whole) in enumerate(SIMULATED):
        layout = Layout(tp, pp, dp, 1, "tp-dp-pp" if megatron else "tp-pp-dp")
        at = _at(layout, fault, rank, part)
        for timed in (False, True) if fault == "hung" else (False,):
            found = tuple(
                ProcessStack(rank=of, pid=0, **recording(told).fields())
                for of, told in dumps(layout, {rank: (fault, at)}, whole=whole, timed=timed, ahead=(3, 6, 12)[index % 3])
            )
            name = f"{fault} rank {rank} of tp {tp} pp {pp} dp {dp} ({layout.rank_order}), {'all' if whole else 'pending'} operations recorded{', kernels timed' if timed else ''}"
            alike = (
                _alike(layout, rank, at, whole=whole, timed=timed, ahead=(3, 6, 12)[index % 3])
                if fault == "hung"
                else frozenset[int]()
            )
            yield Case(name, found, layout, frozenset({rank}), exact=fault != "error" or whole, alike=alike)


def _alike(layout: Layout, rank: int, at: int, *, whole: bool, timed: bool, ahead: int) -> frozenset[int]:
    """Other ranks whose devices, hung at the same collective, leave the same dumps on all ranks."""
    job = job_of(layout)
    op = program(job, rank, 3, 3)[at]
    seen = list(dumps(layout, {rank: ("hung", at)}, whole=whole, timed=timed, ahead=ahead))
    return frozenset(
        other
        for other in job.groups[op.group][1]
        if other != rank and op in (own := program(job, other, 3, 3))
        and list(dumps(layout, {other: ("hung", own.index(op))}, whole=whole, timed=timed, ahead=ahead)) == seen
    )  # fmt: skip


def _at(layout: Layout, fault: Fault, rank: int, part: float) -> int:
    job = job_of(layout)
    own = program(job, rank, 3, 3)
    at = int(len(own) * part)
    if fault == "other_call":
        at = next(i for i in range(at, len(own)) if own[i].peer < 0 and len(job.groups[own[i].group][1]) > 2)
    assert run(job, {rank: (fault, at)})[rank].enqueued
    return at


def cases() -> list[Case]:
    return [*_described(), *_simulated()]
