"""One process's stack, made comparable across machines: what of a frame is the place in the code, and what only the moment. Pure.

Two healthy ranks in the same wait differ in addresses, thread ids, the line of a spin loop, and in how deep inside the library the
sample caught them. So: frames without a name or of the interpreter, libc and binding code go; a frame that is known to wait for other
ranks or for the device ends the stack, whatever lies below it; native frames that say nothing go; the innermost frame loses its line.
Lines of the callers stay: two collectives of one training step are two places.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

#: What a process is held up by: other ranks, its own device (which may hold up others, or be held up by a collective on it), or
#: nothing of the kind: it is busy, or stuck, on its own.
Waits = Literal["peers", "device", ""]


class Place(NamedTuple):
    """Where a thread is: frames, outermost first, and what it waits for there."""

    frames: tuple[str, ...]
    waits: Waits


#: Longer ones are nobody's: py-spy's are cut to a fraction of it when they are read.
_FRAME_CHARS_MAX = 4_000
_FRAME = re.compile(r"(?P<name>.*?)(?: \((?P<file>[^()]*?)(?::(?P<line>\d+))?\))?\Z", re.DOTALL)
_UNNAMED = re.compile(r"0x[0-9a-f]+ \([^;]*\);?")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_DIGEST = re.compile(r"(?<![A-Za-z])[0-9a-z]{24,}(?![A-Za-z])|\d{5,}")
_TEMPLATE = re.compile(r"<[^<>]*>")
#: Native frames stand in a library, or where it has debug information in a source file.
_LIBRARY = re.compile(r"\.so(?:\.\d+)*\Z|\.(?:dylib|pyd|dll|c|h|cc|cpp|cxx|hpp|cu|cuh|inl|rs|S)\Z")
#: Libraries in every stack that say nothing about the place.
_PLUMBING = re.compile(
    r"(?:libpython|libc\b|libc[-.]|libpthread|ld-linux|libstdc\+\+|libgomp|libm[-.]|linux-vdso|\[vdso\]|python3?(?:\.\d+)?\Z)"
)
_PLUMBING_FILES = re.compile(r"(?:c10d_logger|torch/_tensor|utils/_contextlib|_decorators|functools|contextlib)\.py\Z")

#: Native frames that wait for other ranks, and for the device.
_NATIVE_PEERS = re.compile(
    r"c10d::(?!Reducer|Logger)|ProcessGroup|gloo::|\bp?nccl[A-Z]|\bnccl[A-Z]|horovod|\bMPI_|\bPMPI_|\bucp_|\bucc_|\brccl|TCPStore|tensorpipe"
)
_NATIVE_DEVICE = re.compile(
    r"\b(?:cuda|cu|hip)(?:Stream|Device|Event|Ctx)(?:Synchronize|Query)|\bcu(?:da)?MemcpyDtoH|\bcudaMemcpy\b|_local_scalar_dense|"
    r"synchronize_with_|stream_synchronize"
)
#: Python functions that are nothing but communication, by name alone.
_COLLECTIVES = re.compile(
    r"_?(?:all_?reduce|all_?gather|reduce_scatter|all_?to_?all|broadcast_object|all_gather_object|gather_object|scatter_object)"
    r"(?:_(?:coalesced|into_tensor|tensor|base|single|list|v|async|object))*(?:_op)?\Z|"
    r"(?:i(?:send|recv)|batch_isend_irecv|monitored_barrier|_store_based_barrier|synchronize_ranks|start_grad_sync|finish_grad_sync|"
    r"wait_all_p2p|_communicate(?:_shapes)?|_batched_p2p_ops|_p2p_ops|"
    r"(?:send|recv)_(?:forward|backward)(?:_(?:send|recv)_(?:forward|backward))*(?:_\w*)?)\Z"
)
#: These mean communication only in a file that is about it.
_IN_SUCH_FILES = re.compile(
    r"(?:barrier|broadcast|reduce|gather|scatter|send|recv|wait|_wait|synchronize|get|wait_tensor|rendezvous|_rendezvous_helper|"
    r"init_process_group|_new_process_group_helper|new_group|exchange|next_rendezvous|\w*allreduce\w*|\w*all_reduce\w*)\Z"
)
_COMMUNICATION_FILES = re.compile(
    r"(?:torch/distributed/|distributed_c10d|torch/_C/_distributed|c10d|deepspeed/comm|horovod/|mpi4py|p2p_communication|"
    r"pipeline_parallel|tensor_parallel/mappings|param_and_grad_buffer|rendezvous|_functional_collectives|nccl|gloo|collectives?\.py)"
)
_DEVICE_WAITS = re.compile(r"(?:synchronize|current_stream|item|_sync|cpu)\Z")
_DEVICE_FILES = re.compile(r"torch/(?:cuda|xpu|npu|mtia|accelerator)/|_tensor\.py|cuda/streams")
#: The autograd engine runs a node's hooks in threads of its own; the main thread only shows that a backward pass runs.
BACKWARD = re.compile(r"(?:_engine_run_backward|run_backward)\b")


def name_of(frame: str) -> str:
    """A frame's function: `all_reduce (torch/distributed/distributed_c10d.py:3252)` is `all_reduce`."""
    match = _FRAME.match(frame)
    return match["name"] if match else frame


@lru_cache(maxsize=65536)
def _place_of(frame: str) -> tuple[str, str, Waits]:
    """(with its line, without, waits); ("", "", "") for what says nothing."""
    if len(frame) > _FRAME_CHARS_MAX:
        frame = frame[:_FRAME_CHARS_MAX]
    match = _FRAME.match(frame)
    name, file, line = (match["name"], match["file"] or "", match["line"] or "") if match else (frame, "", "")
    native = bool(_LIBRARY.search(file)) or (not line and "::" in name)
    while (
        (bare := _TEMPLATE.sub("", name)) != name
        and "<module>" not in name
        and "<lambda>" not in name
        and "<locals>" not in name
    ):
        name = bare
    name = name.strip()
    if not name or _ADDRESS.fullmatch(name) or name == "??":
        return "", "", ""
    base = file.rsplit("/", 1)[-1]
    plain = name.rsplit(".", 1)[-1]  # py-spy puts the class before a method's name
    if native:
        if _NATIVE_PEERS.search(name) or _NATIVE_PEERS.search(base):
            return "communication", "communication", "peers"
        if _NATIVE_DEVICE.search(name):
            return "device", "device", "device"
        return "", "", ""
    if _PLUMBING.match(base) or _PLUMBING_FILES.search(file):
        return "", "", ""
    if _COLLECTIVES.match(plain) or (_IN_SUCH_FILES.match(plain) and _COMMUNICATION_FILES.search(file)):
        return plain, plain, "peers"
    if _DEVICE_WAITS.match(plain) and _DEVICE_FILES.search(file):
        return plain, plain, "device"
    short = "/".join(file.split("/")[-2:])
    short = _DIGEST.sub("#", _ADDRESS.sub("#", short))
    name = _DIGEST.sub("#", _ADDRESS.sub("#", name))
    return (f"{name} ({short}:{line})" if line else f"{name} ({short})" if short else name), (
        f"{name} ({short})" if short else name
    ), ""  # fmt: skip


def place(thread: str) -> Place:
    """Of one thread's stack (events.finding.ProcessStack.threads)."""
    return _place(_UNNAMED.sub("", thread) if "0x" in thread else thread)  # the rest is mostly the same, and looked up


@lru_cache(maxsize=8192)
def _place(thread: str) -> Place:
    frames: list[str] = []
    bare = ""
    for frame in thread.split(";"):
        full, without, waits = _place_of(frame)
        if waits:
            # Native waits under a Python caller keep that caller's line: it says which of its collectives it is.
            frames.append(full)
            return Place(tuple(frames), waits)
        if full and not (frames and frames[-1] == full):
            frames.append(full)
            bare = without
    if frames:
        frames[-1] = bare
    return Place(tuple(frames), "")


def of_threads(threads: tuple[str, ...]) -> Place:
    """Of a process: its main thread's place; where that only shows a backward pass, the thread's that waits for others in it."""
    main = place(threads[0])
    if main.waits or not main.frames or not any(BACKWARD.match(frame) for frame in main.frames[-2:]):
        return main
    for thread in threads[1:]:
        found = place(thread)
        if found.waits:
            return Place((*main.frames, *found.frames[-1:]), found.waits)
    return main
