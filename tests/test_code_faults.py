"""Exceptions that ended a rank: read out of all that can stand around them, and told apart by who causes them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.code_faults import ROWS, Fault, judged, reading, shortened
from processors.tracebacks import Frame, Raised, chains

USER = "/home/me/gpt/train.py"
TORCH = "/usr/lib/python3/dist-packages/torch/nn/modules/module.py"
CASES = Path(__file__).parent.parent.parent / "shared" / "cases" / "logs" / "training.jsonl"


def traceback(line: str, *frames: tuple[str, int, str]) -> str:
    """As Python prints it."""
    frames = frames or ((USER, 9, "<module>"), (USER, 4, "step"))
    told = "".join(
        f'  File "{file}", line {at}, in {function}\n    source = of(this)\n             ^^^^^^^^\n'
        for file, at, function in frames
    )
    return f"Traceback (most recent call last):\n{told}{line}\n"


def read(text: str, rank: int = -1) -> Fault:
    fault = reading(text, rank)
    assert fault is not None
    return fault


def really(script: str, tmp_path: Path) -> str:
    """What the interpreter prints of a script that fails."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, "-S", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr


CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"

# --- who causes it ------------------------------------------------------------------------------------------------------------

CODE = """
TypeError: unsupported operand type(s) for +: 'int' and 'str'
TypeError: init_process_group() got an unexpected keyword argument 'nccl_timeout'
IndexError: list index out of range
IndexError: index 50257 is out of bounds for dimension 0 with size 50257
KeyError: 'attention_mask'
AttributeError: 'NoneType' object has no attribute 'shape'
AttributeError: module 'torch.distributed' has no attribute 'gloo'
NameError: name 'los' is not defined
UnboundLocalError: cannot access local variable 'x' where it is not associated with a value
ImportError: cannot import name 'flash_attn' from 'model' (/home/me/gpt/model.py)
ModuleNotFoundError: No module named 'apex'
ZeroDivisionError: division by zero
RecursionError: maximum recursion depth exceeded while calling a Python object
NotImplementedError
NotImplementedError: Could not run 'aten::x' with arguments from the 'CUDA' backend
AssertionError
AssertionError: hidden size must be divisible by the number of heads
ValueError: not enough values to unpack (expected 3, got 2)
ValueError: Target size (torch.Size([2])) must be the same as input size (torch.Size([3]))
OverflowError: cannot convert float infinity to integer
RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)
RuntimeError: The size of tensor a (4) must match the size of tensor b (3) at non-singleton dimension 1
RuntimeError: Sizes of tensors must match except in dimension 1. Expected size 2 but got size 3 for tensor number 1 in the list.
RuntimeError: shape '[2, 3]' is invalid for input of size 7
RuntimeError: Given groups=1, weight of size [8, 3, 3, 3], expected input[1, 4, 8, 8] to have 3 channels, but got 4 channels instead
RuntimeError: expected scalar type Float but found Half
RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!
RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn
RuntimeError: Trying to backward through the graph a second time
RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation
RuntimeError: "addmm_impl_cpu_" not implemented for 'Half'
RuntimeError: Error(s) in loading state_dict for GPT: Missing key(s) in state_dict: "h.0.ln.weight".
RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.
RuntimeError: dictionary changed size during iteration
einops.EinopsError: Error while processing rearrange-reduction pattern
torch._dynamo.exc.Unsupported: call_function BuiltinVariable(print)
omegaconf.errors.ConfigAttributeError: Key 'lr' is not in struct
pydantic_core._pydantic_core.ValidationError: 1 validation error for Config
"""

SURROUNDINGS = """
OSError: [Errno 5] Input/output error: '/data/shard-1.bin'
OSError: [Errno 28] No space left on device
OSError: [Errno 116] Stale file handle
FileNotFoundError: [Errno 2] No such file or directory: '/mnt/data/train.bin'
PermissionError: [Errno 13] Permission denied: '/mnt/ckpt'
ConnectionResetError: [Errno 104] Connection reset by peer
BrokenPipeError: [Errno 32] Broken pipe
TimeoutError: The read operation timed out
socket.gaierror: [Errno -3] Temporary failure in name resolution
requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded
urllib3.exceptions.ReadTimeoutError: AWSHTTPSConnectionPool(host='s3'): Read timed out.
botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the GetObject operation
huggingface_hub.errors.HfHubHTTPError: 503 Server Error
wandb.errors.CommError: Run initialization has timed out after 90.0 sec
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 55.88 GiB.
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB
MemoryError
RuntimeError: [enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.
RuntimeError: CUDA error: an illegal memory access was encountered
RuntimeError: CUDA error: device-side assert triggered
RuntimeError: CUDA error: uncorrectable ECC error encountered
RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`
RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED
RuntimeError: No CUDA GPUs are available
RuntimeError: Found no NVIDIA driver on your system.
torch.AcceleratorError: CUDA error: unspecified launch failure
torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1331, internal error - please report
torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500).
torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 7/8 clients joined.
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2231
RuntimeError: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE)
RuntimeError: Socket Timeout
RuntimeError: NCCL communicator was aborted on rank 3.
RuntimeError: The server socket has failed to listen on any local network address. useIpv6: 0, code: -98, name: EADDRINUSE
RuntimeError: DataLoader worker (pid 1285) is killed by signal: Killed.
RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly
RuntimeError: unable to mmap 1024 bytes from file </torch_1_2>: Cannot allocate memory (12)
RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory
RuntimeError: [enforce fail at inline_container.cc:595] . PytorchStreamWriter failed writing file data/12: file write failed
safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge
_pickle.UnpicklingError: pickle data was truncated
EOFError: Ran out of input
zipfile.BadZipFile: File is not a zip file
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer.
ImportError: libcuda.so.1: cannot open shared object file: No such file or directory
ImportError: /home/me/ext.so: undefined symbol: _ZN3c105ErrorC1E
AssertionError: Rank 13: found NaN in local grad norm in backward pass before data-parallel communication collective.
ValueError: loss is nan, stopping training
FloatingPointError: underflow encountered in exp
RuntimeError: raising error at iteration 337071: Inf grad norm
ValueError: Failed to load configuration from https://config after 4 attempts.
KeyboardInterrupt
torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15
"""

UNCLEAR = """
RuntimeError: something went wrong
__main__.ShardMissing: shard 12
Exception: stop here
megatron.core.Surprise
"""


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        (v, line)
        for v, text in (("code", CODE), ("surroundings", SURROUNDINGS), ("unclear", UNCLEAR))
        for line in text.strip().split("\n")
    ],
)
def test_who_causes_an_exception(verdict: str, line: str) -> None:
    fault = read("step 7\n" + traceback(line))
    assert (fault.verdict, fault.raised.line) == (verdict, line.rstrip()), fault.because
    assert fault.frame == Frame(USER, 4, "step")
    assert fault.evidence == f"{line} ({USER}:4 in step)"


def test_every_row_is_of_use() -> None:
    hit = {judged(read(traceback(line)).raised)[1] for line in (CODE + SURROUNDINGS).strip().split("\n") if line}
    assert hit == {row.because for row in ROWS}


@pytest.mark.skipif(not CASES.exists(), reason="no shared cases")
def test_no_recorded_failure_of_a_machine_or_a_network_is_the_codes() -> None:
    told = {}
    for line in CASES.read_text().splitlines():
        case = json.loads(line)
        raised = [one for chain in chains(case["text"]) for one in chain.raised]
        if raised:
            told[case["id"]] = ({case["expect"]["class"], *case["expect"]["class_also_ok"]}, {judged(one)[0] for one in raised})
    assert len(told) >= 25
    for name, (classes, verdicts) in told.items():
        assert "code" not in verdicts or "code_exception" in classes, name
    assert all(told[name][1] == {"code"} for name in ("t-020", "t-021", "t-053"))


# --- where it points ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        ([(USER, 9, "<module>"), (TORCH, 1751, "_call_impl")], Frame(USER, 9, "<module>")),
        ([(USER, 9, "main"), ("/opt/conda/lib/python3.11/json/__init__.py", 3, "loads")], Frame(USER, 9, "main")),
        ([("/opt/venv/lib/python3.11/site-packages/x.py", 1, "f")], None),
        ([("<frozen runpy>", 88, "_run_code"), ("/workspace/Megatron-LM/megatron/core/a.py", 2, "f")], Frame("/workspace/Megatron-LM/megatron/core/a.py", 2, "f")),
        ([(USER, 9, "main"), ("/tmp/hook/keepstep/_group.py", 31, "init")], Frame(USER, 9, "main")),
        ([("train.py", 3, "<module>"), ("<string>", 1, "f")], Frame("train.py", 3, "<module>")),
        ([(USER, 9, "main"), ("/opt/pytorch/torch/nn/modules/linear.py", 117, "forward")], Frame(USER, 9, "main")),
    ],
)  # fmt: skip
def test_the_frame_is_the_innermost_in_user_code(frames: list[tuple[str, int, str]], where: Frame | None) -> None:
    fault = read(traceback("TypeError: x", *frames))
    assert fault.frame == where and fault.verdict == ("code" if where else "unclear")


def test_a_root_makes_an_installed_package_the_users_and_a_worktree_stands_for_the_checkout() -> None:
    installed = "/venv/lib/python3.11/site-packages/ours/model.py"
    assert reading(
        traceback("TypeError: x", (installed, 1, "f")), roots=("/venv/lib/python3.11/site-packages/ours",)
    ).frame == Frame(installed, 1, "f")  # type: ignore[union-attr]
    tree = "/var/lib/keepstep/n1/revisions/0123456789abcdef/trees/0123456789ab-89abcdef/jobs/gpt/train.py"
    assert shortened(tree) == "jobs/gpt/train.py" and shortened(USER) == USER
    assert read(traceback("TypeError: x", (tree, 3, "f"))).evidence == "TypeError: x (jobs/gpt/train.py:3 in f)"


def test_an_error_that_a_collective_raised_is_none_of_the_codes_unless_its_kind_says_so() -> None:
    inside = ("/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2810, "all_reduce")
    assert read(traceback("RuntimeError: expected x but got y", (USER, 1, "f"), inside)).verdict == "surroundings"
    assert read(traceback("TypeError: 'NoneType' object is not iterable", (USER, 1, "f"), inside)).verdict == "code"


# --- how it stands in the text ------------------------------------------------------------------------------------------------


def test_chains_as_the_interpreter_prints_them(tmp_path: Path) -> None:
    text = really(
        """
        def load():
            try:
                raise KeyError("weights")
            except KeyError as error:
                raise ValueError("no\\nsuch thing") from error
        try:
            load()
        except ValueError:
            {}["again"]
        """,
        tmp_path,
    )
    (chain,) = chains(text)
    assert [one.line for one in chain.raised] == ["KeyError: 'weights'", "ValueError: no", "KeyError: 'again'"]
    assert chain.raised[1].message == "no\nsuch thing"
    fault = read(text)
    assert (
        fault.by_code
        and fault.raised.line == "KeyError: 'weights'"
        and fault.frame == Frame(str(tmp_path / "train.py"), 4, "load")
    )


@pytest.mark.parametrize("link", [CAUSE, CONTEXT])
def test_what_a_machine_did_counts_wherever_it_stands_in_a_chain(link: str) -> None:
    storage = traceback("OSError: [Errno 5] Input/output error", (USER, 2, "read"))
    wrong = traceback("AttributeError: 'NoneType' object has no attribute 'close'", (USER, 5, "clean_up"))
    for text in (storage + link + wrong, wrong + link + storage, wrong + link + storage + link + wrong):
        fault = read(text)
        assert (fault.verdict, fault.raised.kind, fault.frame) == ("surroundings", "OSError", Frame(USER, 2, "read"))
    assert read(wrong + link + wrong).by_code
    # Not linked: the last is what it died of.
    assert read(storage + "retrying\n" + wrong).by_code and not read(wrong + "retrying\n" + storage).by_code


def test_syntax_errors(tmp_path: Path) -> None:
    text = really("def f(:\n    pass\n", tmp_path)
    assert "Traceback" not in text
    assert read(text).frame == Frame(str(tmp_path / "train.py"), 1, "") and read(text).by_code
    (tmp_path / "model.py").write_text("def f():\npass\n")
    text = really("import model\n", tmp_path)
    fault = read(text)
    assert (fault.raised.kind, fault.frame) == ("IndentationError", Frame(str(tmp_path / "model.py"), 2, ""))
    assert fault.evidence.endswith("model.py:2)")


def test_exception_groups(tmp_path: Path) -> None:
    script = """
        def one():
            raise TypeError("a")
        def two():
            raise {}
        found = []
        for f in (one, two):
            try:
                f()
            except Exception as error:
                found.append(error)
        raise ExceptionGroup("many", found)
    """
    text = really(script.format('IndexError("b")'), tmp_path)
    (chain,) = chains(text)
    assert [one.line for one in chain.raised] == ["ExceptionGroup: many (2 sub-exceptions)", "TypeError: a", "IndexError: b"]
    fault = read(text)
    assert fault.by_code and fault.raised.line == "TypeError: a" and fault.frame == Frame(str(tmp_path / "train.py"), 3, "one")
    fault = read(really(script.format('OSError(5, "Input/output error")'), tmp_path))
    assert (fault.verdict, fault.raised.kind) == ("surroundings", "OSError")
    assert read("before\n" + text + "\nafter\n" + traceback("KeyError: 'x'")).raised.kind == "KeyError"


def test_a_data_loaders_worker_is_read_where_it_failed() -> None:
    loader = "/opt/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py"
    outer = traceback(
        "IndexError: Caught IndexError in DataLoader worker process 0.", (USER, 50, "main"), (TORCH, 3, "reraise")
    )
    inner = traceback(
        "IndexError: list index out of range", (loader, 349, "_worker_loop"), ("/home/me/gpt/data.py", 7, "__getitem__")
    )
    fault = read(outer + "Original " + inner)
    assert fault.by_code and fault.raised.line == "IndexError: list index out of range"
    assert fault.frame == Frame("/home/me/gpt/data.py", 7, "__getitem__")
    lost = (
        outer.replace("IndexError", "OSError")
        + "Original "
        + inner.replace("IndexError: list index out of range", "OSError: [Errno 116] Stale file handle")
    )
    assert read(lost).verdict == "surroundings"
    # One that only libraries were in: who asked for it is in what followed.
    inside = traceback("KeyError: 7", (loader, 349, "_worker_loop"))
    assert read(outer.replace("IndexError", "KeyError") + "Original " + inside).frame == Frame(USER, 50, "main")


def test_a_pools_and_a_spawned_processs_traceback() -> None:
    inner = traceback("ValueError: bad row", ("/home/me/gpt/data.py", 3, "parse"))
    pool = (
        f'multiprocessing.pool.RemoteTraceback: \n"""\n{inner}"""\n{CAUSE}{traceback("ValueError: bad row", (USER, 8, "main"))}'
    )
    fault = read(pool)
    assert fault.by_code and fault.frame in (Frame("/home/me/gpt/data.py", 3, "parse"), Frame(USER, 8, "main"))
    spawned = (
        traceback("torch.multiprocessing.spawn.ProcessRaisedException: ", (USER, 8, "<module>"))
        + f"\n-- Process 0 terminated with the following error:\n{inner}"
    )
    assert read(spawned).frame == Frame("/home/me/gpt/data.py", 3, "parse")


SUMMARY = """
E1130 06:28:01.123000 4242 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 0 (pid: 4243) of binary: /usr/bin/python
{launcher}============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_06:28:01
  host      : node-3
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4243)
  error_file: /tmp/torchelastic_x/error.json
  traceback : Traceback (most recent call last):
    File "/opt/venv/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 357, in wrapper
      return f(*args, **kwargs)
    File "/home/me/gpt/train.py", line 12, in main
      step(batch[3])
  TypeError: step() missing 1 required positional argument: 'lr'

============================================================
"""
LAUNCHER = traceback(
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    ("/opt/venv/bin/torchrun", 8, "<module>"),
    ("/opt/venv/lib/python3.11/site-packages/torch/distributed/run.py", 892, "main"),
)


def test_a_launchers_summary_and_its_own_end() -> None:
    printed = SUMMARY.format(launcher=LAUNCHER)
    fault = read(printed)
    assert fault.raised.line == "TypeError: step() missing 1 required positional argument: 'lr'"
    assert fault.by_code and fault.frame == Frame(USER, 12, "main")
    rank = traceback("KeyError: 'x'").replace("\n", "\n[rank0]: ").rstrip("[rank0]: ")
    fault = read("[rank0]: " + rank + LAUNCHER)
    assert fault.by_code and fault.rank == 0 and fault.raised.kind == "KeyError"
    assert read(LAUNCHER).verdict == "surroundings"


def test_ranks_that_wrote_at_once() -> None:
    """Line by line, as a launcher merges them."""
    mine = traceback("IndexError: list index out of range").split("\n")
    echo = traceback(
        "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer",
        (USER, 9, "<module>"),
        (USER, 88, "all_reduce"),
    ).split("\n")
    lines = [
        f"{prefix}{line}"
        for pair in zip(echo, mine, strict=True)
        for prefix, line in zip(("[rank0]: ", "[rank3]: "), pair, strict=True)
    ]
    text = "\n".join(lines)
    assert (read(text, 3).by_code, read(text, 0).verdict) == (True, "surroundings")
    fault = read(text)  # no rank is asked for: the first that is no echo
    assert fault.rank == 3 and fault.by_code and fault.frame == Frame(USER, 4, "step")
    for prefix in ("[default3]:", "3: ", "3: [rank3]: ", "[1,3]<stderr>:", "[3]: "):
        assert read(text.replace("[rank3]: ", prefix), 3).frame == Frame(USER, 4, "step")


@pytest.mark.parametrize(
    "noise",
    [
        "[rank0]:[W1130 06:28:01.123 ProcessGroupNCCL.cpp:1250] Warning: process group has NOT been destroyed before we destruct\n",
        "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: an illegal memory access was encountered\n",
        "node-1:4242:4300 [0] NCCL INFO [Service thread] Connection closed by localRank 0\n",
        "2026-11-30 06:28:01,123 ERROR Connection reset by peer\n",
        "srun: error: node-1: task 0: Exited with exit code 1\n",
        "\nConnection closed by peer\n",
        "Exception ignored in: <function Loader.__del__ at 0x7f>\n" + traceback("OSError: [Errno 9] Bad file descriptor", (USER, 70, "__del__")),
        "Exception in thread Thread-3 (_watch):\n" + traceback("ConnectionResetError: [Errno 104] Connection reset by peer", (USER, 71, "_watch")),
    ],
)  # fmt: skip
def test_what_is_printed_after_an_exception_does_not_change_what_it_was(noise: str) -> None:
    assert read(traceback("KeyError: 'x'") + noise).by_code
    assert read(traceback("ValueError: x") + noise).by_code


def test_colours_as_they_come_and_as_they_are_shown() -> None:
    coloured = (
        'Traceback (most recent call last):\n  File \x1b[35m"/home/me/gpt/train.py"\x1b[0m, line \x1b[35m4\x1b[0m, in \x1b[35mstep\x1b[0m\n'
        "    x\n\x1b[1;35mTypeError\x1b[0m: \x1b[35mbad\x1b[0m\n"
    )
    for text in (coloured, coloured.replace("\x1b", "\\x1b")):
        fault = read(text)
        assert fault.evidence == "TypeError: bad (/home/me/gpt/train.py:4 in step)"


def test_a_cut_beginning() -> None:
    whole = traceback("TypeError: x", (USER, 9, "<module>"), (TORCH, 12, "_call"), (USER, 4, "step"))
    for at in range(len(whole) - len("TypeError: x\n")):
        fault = reading(whole[at:])
        assert fault is not None and fault.raised.line == "TypeError: x"
        assert fault.verdict == ("code" if f'File "{USER}", line 4' in whole[at:] else "unclear"), whole[at:]


def test_messages_of_several_lines() -> None:
    message = 'RuntimeError: Error(s) in loading state_dict for GPT:\n\tMissing key(s) in state_dict: "a". \n\tsize mismatch for b: copying a param'
    fault = read(traceback(message))
    assert fault.by_code and fault.raised.message.count("\n") == 2
    cuda = "RuntimeError: Triton launch failed\nCUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
    assert read(traceback(cuda)).verdict == "surroundings"


@pytest.mark.parametrize(
    "text",
    [
        "", "\n\n", "Killed", "step 3 loss 2.1", "UserWarning: CUDA initialization: Unexpected error", "Failures:", "error: unrecognized arguments: --lrr",
        "Traceback (most recent call last):", 'Traceback (most recent call last):\n  File "x.py", line 1, in f', "  TypeError", "Exception ignored in: <x>\n" + traceback("KeyError: 1"),
    ],
)  # fmt: skip
def test_what_is_no_exception(text: str) -> None:
    assert reading(text) is None


def test_a_dump_of_where_threads_stand_lends_no_frames() -> None:
    dump = 'Timeout (0:00:10)!\nThread 0x00007f (most recent call first):\n  File "/home/me/gpt/wait.py", line 3 in poll\n  File "/home/me/gpt/wait.py", line 4, in run\n'
    assert read(dump + traceback("TypeError: x")).frame == Frame(USER, 4, "step")
    assert read(dump + "TypeError: x\n").frame is None


def test_an_endless_recursion_points_at_where_it_ended() -> None:
    frames = "".join(f'  File "{USER}", line {n}, in deep\n    deep()\n' for n in range(1, 990))
    fault = read(
        f"Traceback (most recent call last):\n{frames}  [Previous line repeated 971 more times]\nRecursionError: maximum recursion depth exceeded\n"
    )
    assert fault.by_code and fault.frame == Frame(USER, 989, "deep") and len(fault.raised.frames) <= 200


PIECES = st.sampled_from(
    [*traceback("TypeError: x").splitlines(), "  | x", "  + Exception Group Traceback (most recent call last):", "    +---------------- 1 ----------------",
     "", CAUSE.strip(), CONTEXT.strip(), "Original Traceback (most recent call last):", "[rank1]: TypeError: y", "Exception ignored in: x", "RuntimeError", "\x1b[31m", "3: "]
)  # fmt: skip


@given(st.lists(PIECES | st.text(max_size=40), max_size=60))
def test_anything_at_all_is_read_without_a_fault(lines: list[str]) -> None:
    fault = reading("\n".join(lines))
    assert fault is None or (fault.verdict != "code" or fault.frame is not None)
    reading("\n".join(lines), 1)


@given(
    st.lists(
        st.text(alphabet=st.characters(blacklist_categories=("Cs",), blacklist_characters="\n\r\x1b"), max_size=60), max_size=20
    )
)
def test_text_before_does_not_hide_what_it_died_of(lines: list[str]) -> None:
    before = "\n".join(line for line in lines if not re.search(r"Traceback|File|Exception|\[|\d: |Task|above|\|", line))
    assert read(f"{before}\n\n" + traceback("TypeError: x")).raised == Raised(
        "TypeError", "x", (Frame(USER, 9, "<module>"), Frame(USER, 4, "step"))
    )
