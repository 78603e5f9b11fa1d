"""Whether an exception that ended a rank is one that code causes, and where in the user's code. Pure; the rules are one table.

Code causes what comes back the same with the same code: a name that is not there, shapes that do not fit. What a machine, a network, a
disk or a peer does surfaces in user code, too, and no rollback helps against it: if anything of that kind hangs on the exception, it
counts. What is neither (an exception of the user's own, an error without a tell-tale message) is unclear. ByteRobust, section 3, step 2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from processors.tracebacks import Chain, Frame, Raised, chains

Verdict = Literal["code", "surroundings", "unclear"]
WORD_BYTES_MAX = 300
#: Of a message, what is judged.
JUDGED_CHARACTERS_MAX = 1500


class Fault(NamedTuple):
    """What ended a rank. `raised`: the exception that counts; `frame`: the innermost in user code (None: there is none, or it was cut off);
    `because`: the rule. `rank`: whose lines it stood in, where several wrote (-1: not said)."""

    verdict: Verdict
    because: str
    raised: Raised
    frame: Frame | None
    rank: int = -1

    @property
    def by_code(self) -> bool:
        return self.verdict == "code"

    @property
    def evidence(self) -> str:
        """The exception's line and the place that it points at."""
        if self.frame is None:
            return self.raised.line
        function = f" in {self.frame.function}" if self.frame.function else ""
        return f"{self.raised.line} ({shortened(self.frame.file)}:{self.frame.line}{function})"


class _Row(NamedTuple):
    """`names`: exceptions by the last part of their names, or by a module that the name begins with; none: any. `message`: what must be
    found in "name: message"; none: anything."""

    verdict: Verdict
    because: str
    names: tuple[str, ...] = ()
    message: re.Pattern[str] | None = None


def _words(*parts: str) -> re.Pattern[str]:
    return re.compile("|".join(parts))


#: The first that fits counts.
ROWS: tuple[_Row, ...] = (
    _Row("surroundings", "it was asked to end", ("KeyboardInterrupt", "SystemExit", "SignalException", "GeneratorExit", "CancelledError")),
    # Whatever such an exception says, it is about code.
    _Row(
        "code", "a name, type or index that the code has wrong",
        ("TypeError", "AttributeError", "NameError", "UnboundLocalError", "IndexError", "KeyError", "SyntaxError", "IndentationError",
         "TabError", "ZeroDivisionError", "RecursionError", "NotImplementedError", "ModuleNotFoundError", "StopIteration",
         "BdbQuit", "UnsupportedOperatorException", "LookupError"),
    ),
    _Row(
        "surroundings", "a number that is not finite: the metrics' rules judge it", ("FloatingPointError",),
    ),
    _Row(
        "surroundings", "memory ran out",
        ("OutOfMemoryError", "MemoryError"),
    ),
    _Row(
        "surroundings", "memory ran out", (),
        _words("out of memory", "[Cc]annot allocate memory", "can't allocate memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED",
               "unable to mmap", "can't start new thread", "Too many open files", "shared memory"),
    ),
    _Row(
        "surroundings", "a GPU or its driver", ("AcceleratorError", "CudaError", "CUDAError", "NVMLError", "HIPError"),
    ),
    _Row(
        "surroundings", "a GPU or its driver", (),
        _words(r"CUDA (?:driver |runtime |kernel )?[Ee]rror", r"\bcuda(?:Error|_error)", "device-side assert", "CUBLAS_", "CUDNN_", "CUSOLVER_", "CUFFT_", "CUSPARSE_",
               r"(?i:\bcudnn error|\bcublas error)", "NVML", "HIP error", r"\bhipError", "uncorrectable", r"\bECC\b", r"\bXid\b", "NVLink", "NVIDIA driver", "No CUDA GPUs",
               "no CUDA-capable", "CUDA initialization", "CUDA unknown", "libcuda", "illegal memory access"),
    ),
    _Row(
        "surroundings", "a collective or a peer",
        ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "NCCLError", "RendezvousError", "RendezvousConnectionError",
         "RendezvousTimeoutError", "RendezvousClosedError", "ChildFailedError", "ProcessExitedException"),
    ),
    _Row(
        "surroundings", "a collective or a peer", (),
        _words(r"\bNCCL\b", r"\bnccl[A-Z]\w+", r"\bRCCL\b", r"\bHCCL\b", r"\b[Gg]loo\b", "ProcessGroup", "TCPStore", "recvValue", r"store->\w+\(", "[Ww]atchdog",
               "collective operation", "[Rr]endezvous", "connectFullMesh", r"[Cc]onnection (?:was )?(?:closed|reset|refused|aborted|lost)", "[Bb]roken pipe",
               "[Ss]ocket [Tt]imeout", "[Aa]ddress already in use", "EADDRINUSE", "[Tt]imed out", r"(?i:\bwait timeout)"),
    ),
    _Row(
        "surroundings", "numbers that are not finite: the metrics' rules judge them", (),
        _words(r"(?i:\b(?:nan|inf|infinite|non-?finite|not finite)\b.{0,40}\b(?:loss|grad\w*|norm|values?|tensor|output|activations?)\b)",
               r"(?i:\b(?:loss|grad\w*|norm|output|activations?)\b.{0,40}\b(?:nan|infs?|infinite|non-?finite|not finite)\b)"),
    ),
    _Row(
        "surroundings", "a worker process of the data loader", (),
        _words(r"DataLoader worker .{0,60}(?:killed|exited)", "worker.{0,40}exited unexpectedly", "received 0 items of ancdata"),
    ),
    _Row(
        "surroundings", "the network or a service",
        ("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError", "TimeoutError",
         "timeout", "gaierror", "herror", "SSLError", "SSLEOFError", "SSLCertVerificationError", "HTTPError", "URLError", "RemoteDisconnected",
         "IncompleteRead", "ProtocolError", "ChunkedEncodingError", "MaxRetryError", "ReadTimeout", "ConnectTimeout", "HfHubHTTPError",
         "LocalEntryNotFoundError", "CommError", "RpcError", "InactiveRpcError",
         "requests.", "urllib3.", "http.client.", "botocore.", "boto3.", "aiobotocore.", "google.api_core.", "google.auth.", "google.cloud.", "azure.",
         "aiohttp.", "httpx.", "httpcore.", "grpc.", "wandb.errors.", "mlflow.", "redis.", "pymongo.", "psycopg2.", "sqlalchemy.", "paramiko.", "gcsfs.", "s3fs.", "etcd3."),
    ),
    _Row(
        "surroundings", "storage, a disk or a file",
        ("OSError", "IOError", "EnvironmentError", "FileNotFoundError", "FileExistsError", "PermissionError", "IsADirectoryError", "NotADirectoryError",
         "BlockingIOError", "InterruptedError", "ChildProcessError", "ProcessLookupError", "EOFError", "UnpicklingError", "PickleError", "BadZipFile", "BadGzipFile", "ReadError", "LZMAError",
         "SafetensorError", "JSONDecodeError", "UnicodeDecodeError", "CheckpointException", "ArrowInvalid", "ArrowIOError", "HDF5ExtError",
         "zlib.error", "lzma.", "zipfile.", "tarfile.", "pyarrow.", "lmdb.", "h5py.", "sqlite3.", "zarr.errors.", "tensorstore.", "safetensors_rust.", "zstandard."),
    ),
    _Row(
        "surroundings", "storage, a disk or a file", (),
        _words(r"\[Errno \d+\]", r"\(os error \d+\)", "PytorchStreamReader", "PytorchStreamWriter", "central directory", "deserializing header", "[Cc]hecksum", "[Dd]isk quota",
               "No space left", "Input/output error", "Stale file handle", "Read-only file system", "iostream error", "Transport endpoint", "[Uu]nable to open file",
               "truncated", "[Cc]orrupt", r"[Ff]ailed to (?:read|load|open|download|fetch|write|save)", "[Uu]nexpected end of"),
    ),
    _Row(
        "surroundings", "a library of the environment", ("ImportError",),
        _words("cannot open shared object", "undefined symbol", "GLIBC", "libstdc", "DLL load failed", "cannot allocate memory in static TLS"),
    ),
    _Row("code", "an import that the code has wrong", ("ImportError",)),
    _Row("code", "a check of the code's own", ("AssertionError", "ValidationError")),
    _Row(
        "code", "a value that the code has wrong",
        ("ValueError", "OverflowError", "ArithmeticError", "BufferError", "omegaconf.", "hydra.", "yaml.", "argparse.", "einops.", "torch._dynamo.exc.", "jsonschema."),
    ),
    _Row(
        "code", "tensors that do not fit",
        ("RuntimeError", "EinopsError", "TorchRuntimeError", "InternalTorchDynamoError", "Unsupported", "BackendCompilerFailed"),
        _words(r"shapes? .{0,80}(?:cannot|can't|must|invalid|mismatch|not)", "(?:size|shape|dimension|dtype|type)s?[ -][Mm]ismatch", r"The size of tensor", r"Sizes of tensors must match",
               r"must match", r"must have the same", r"is invalid for input of size", r"not aligned", r"Given groups=", r"[Ee]xpected .{0,200}(?:but|to (?:be|have)|got)", r"Input type .{0,80}should be the same",
               r"not implemented for '", r"[Dd]imension .{0,60}out of range", r"index .{0,60}out of (?:range|bounds)", r"does not require grad", r"backward through the graph a second time",
               r"modified by an inplace operation", r"[Ii]n-?place operation", r"only for scalar outputs", r"Could not infer dtype", r"view size is not compatible", r"state_dict",
               r"Expected to have finished reduction", r"marked (?:as )?ready (?:only once|twice)", r"unused parameters", r"No backend type associated", r"changed size during iteration", r"generator raised StopIteration",
               r"dtype", r"one of the variables needed for gradient", r"a leaf Variable", r"can't convert|cannot convert", r"[Ii]nvalid (?:argument|device string|type|index|combination)", r"number of dims", r"too many indices", r"equal number of dimensions",
               r"event loop", r"super\(\).__init__", r"context has already been set", r"on the same device", r"unexpected keyword", r"positional argument", r"mat1 and mat2", r"einsum\(\)", r"stack expects each tensor"),
    ),
)  # fmt: skip

#: What only passes on what happened elsewhere, and says nothing by itself.
WRAPPERS = frozenset(
    {"ExceptionGroup", "BaseExceptionGroup", "RemoteTraceback", "ProcessRaisedException", "RayTaskError", "_RemoteTraceback"}
)
#: A launcher's own, which it dies of after a rank.
LAUNCHERS = frozenset({"ChildFailedError", "SignalException"})
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d[\d.]*/|/python\d[\d.]*/lib/|^<|python\d+\.zip/"
    r"|/torch/(?:nn|utils|autograd|optim|distributed|cuda|amp|multiprocessing|_\w+)/|/keepstep/(?:parked|_\w+|__init__|checkpoint)\.py$"
)
_COLLECTIVES = re.compile(r"/torch/distributed/|/torch/cuda/nccl\.py|/deepspeed/comm/")
#: A revision's worktree stands for the checkout.
_TREE = re.compile(r"^.*/revisions/[0-9a-f]{16}/trees/[0-9a-f]{12}-[0-9a-f]{8}/")


def shortened(path: str) -> str:
    """A file's path without what is only keepstep's."""
    return _TREE.sub("", path)[-200:]


def judged(raised: Raised) -> tuple[Verdict, str]:
    """By the table. An error of no known kind that a collective raised is a collective's."""
    text = f"{raised.name}: {raised.message}"[:JUDGED_CHARACTERS_MAX]
    for row in ROWS:
        if row.names and not any(
            raised.kind == name or (name[-1] == "." and raised.name.startswith(name)) or raised.name == name
            for name in row.names
        ):
            continue
        if row.message is None or row.message.search(text):
            if (
                row.verdict == "code"
                and raised.kind == "RuntimeError"
                and raised.frames
                and _COLLECTIVES.search(raised.frames[-1].file)
            ):
                return "surroundings", "a collective or a peer"
            return row.verdict, row.because
    if raised.frames and _COLLECTIVES.search(raised.frames[-1].file):
        return "surroundings", "a collective or a peer"
    return "unclear", "no rule knows it"


def is_users(frame: Frame, roots: Sequence[str] = ()) -> bool:
    """Whether a frame is in user code: below one of `roots`, or in no place where libraries are installed."""
    return any(frame.file.startswith(root.rstrip("/") + "/") for root in roots) or not _LIBRARY.search(frame.file)


def reading(text: str, rank: int = -1, roots: Sequence[str] = ()) -> Fault | None:
    """The exception that ended a process, out of what it printed; None if it shows none. `rank`: whose lines count where several ranks
    wrote; else the first that was not a peer's echo. `roots`: folders of user code, as far as they are known."""
    found = [chain for chain in chains(text) if not chain.ignored]
    found = [chain for chain in found if chain.raised[-1].kind not in LAUNCHERS] or found
    own = [chain for chain in found if chain.rank == rank] or [chain for chain in found if chain.rank < 0]
    if own:
        return _fault(own[-1], roots)
    others = [_fault(chain, roots) for chain in found]
    return next((fault for fault in others if fault.verdict != "surroundings"), others[-1] if others else None)


def _fault(chain: Chain, roots: Sequence[str]) -> Fault:
    links = [one for one in chain.raised if one.kind not in WRAPPERS] or list(chain.raised)
    verdicts = [judged(one) for one in links]
    at = next((i for i, (verdict, _) in enumerate(verdicts) if verdict == "surroundings"), None)
    if at is None:
        at = next((i for i, (verdict, _) in enumerate(verdicts) if verdict == "code"), len(links) - 1)
    verdict, because = verdicts[at]
    frame = next((frame for frame in reversed(links[at].frames) if is_users(frame, roots)), None)
    if frame is None:  # raised by a library on its own thread or in its own worker: who called it is in what followed
        later = [frame for one in links[at + 1 :] for frame in one.frames if is_users(frame, roots)]
        frame = later[-1] if later else None
    if verdict == "code" and frame is None:
        verdict, because = "unclear", "it points at no user code"
    return Fault(verdict, because, links[at], frame, chain.rank)
