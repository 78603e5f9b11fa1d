"""Kinds of lines by example: what each is and what is to be done first. One or a few a kind; the lines are made up."""

from __future__ import annotations

import pytest

from infra.cli.classify_cases import answer
from tests.telemetry import catalogue

CATALOGUE = catalogue()

FAULTS = [
    ("gpu_init_failure", "evict", "NVRM: kgspWaitForGfwBootOk_TU102: failed to wait for GFW boot complete: 0x65"),
    ("gpu_init_failure", "evict", "NVRM: kfspWaitForSecureBoot_GH100: FSP secure boot timed out"),
    ("gpu_init_failure", "evict", "nv-fabricmanager[9]: fabric manager NVIDIA GPU driver interface version 550.1 don't match with driver version 550.2"),
    ("gpu_init_failure", "diagnose", "ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 'initialization error'"),
    ("gpu_init_failure", "evict", "pynvml.NVMLError_DriverNotLoaded: Driver Not Loaded"),
    ("gpu_ecc_uncorrected", "evict", "XID event received: code=172 pci=0000:81:00 msg=SM, Uncorrectable SRAM error in GPC 1"),
    ("nic_error", "diagnose", "ice 0000:4b:00.0: Firmware recovery mode detected. Limiting functionality."),
    ("nic_error", "diagnose", "i40e 0000:86:00.0 eth4: VSI_seid 390, Hung TX queue 12, tx_pending_hw: 1"),
    ("nic_down", "diagnose", "mlx5_core 0000:3b:00.0: lag map: port 1:2 port 2:2"),
    ("nic_down", "diagnose", "ib_device.c:482  UCX  WARN  IB Async event on mlx5_2: port error on port 1"),
    ("host_oom", "restart", 'kubelet[9]: "Eviction manager: must evict pod(s) to reclaim" resourceName="memory"'),
    ("container_error", "diagnose", "kubelet[9]: eviction_manager.go:331] eviction manager: attempting to reclaim nodefs"),
    ("task_hung", "diagnose", "INFO: task jbd2/sda2-8:77 blocked in I/O wait for more than 120 seconds."),
    ("cpu_overload", "diagnose", "systemd[1]: systemd-logind.service: Watchdog timeout (limit 3min)!"),
    ("disk_error", "diagnose", "qla2xxx [0000:81:00.1]-500b:9: LOOP DOWN detected (2 7 0 0)."),
    ("disk_error", "diagnose", "lpfc 0000:3b:00.0: 0:1305 Link Down Event x2 received Data: x2 x20 x80000"),
    ("disk_error", "diagnose", "mpt3sas_cm0: log_info(0x31120303): originator(PL), code(0x12), sub_code(0x0303)"),
    ("pcie_error", "diagnose", "pcieport 0000:00:02.0:    [ 5] SDES                   (First)"),
    ("pcie_corrected", "record", "pcieport 0015:00:00.0: pciehp: Slot(7): Link Down/Up ignored"),
    ("pcie_corrected", "record", "pcieport 0000:3a:00.0:    [ 0] RxErr                  (First)"),
    ("gpu_oom", "rollback", "ResourceExhaustedError: Graph execution error: OOM when allocating tensor with shape[64,4096]"),
    ("gpu_oom", "rollback", "XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm."),
    ("cuda_error", "diagnose", "XlaRuntimeError: INTERNAL: Core halted unexpectedly"),
    ("cuda_error", "diagnose", "RuntimeError: ACL stream synchronize failed, error code:507011"),
    ("nccl_timeout", "diagnose", "/job:jax_worker/replica:0/task:3 has been set to ERROR in coordination service: UNAVAILABLE: heartbeat timeout"),
    ("nccl_timeout", "diagnose", "rendezvous.cc:57] This thread has been waiting for `collective` for 40 seconds and may be stuck."),
    ("nccl_timeout", "diagnose", "[Rank 2] Work WorkNCCL(SeqNum=7, OpType=REDUCE_SCATTER, Timeout(ms)=600000) timed out in blocking wait."),
    ("nccl_timeout", "diagnose", "One or more tensors were submitted to be reduced by subset of ranks and are waiting for remainder of ranks"),
    ("nccl_error", "diagnose", "NCCL WARN NET/IB : mlx5_0:1 Got async event : local access violation work queue error"),
    ("nccl_error", "diagnose", "ncclSystemError: System call failed.\nsocketStartConnect: Connect to 10.0.0.9<43217> failed : Software caused connection abort"),
    ("nccl_error", "diagnose", "F0404 parallel.cpp:210] Check failed: result == ncclSuccess (1 vs. 0)  unhandled cuda error"),
    ("nccl_error", "diagnose", "libfabric:2:efa:cq:efa_rdm_txe_handle_error():804<warn> err: 113, message: Unresponsive receiver"),
    ("nccl_error", "diagnose", "UnavailableError: Collective ops is aborted by: failed to connect to all addresses"),
    ("nan_loss", "diagnose", "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 2.0, reducing to 1.0"),
    ("nan_loss", "diagnose", "iteration    12010/  100000 | consumed samples: 61 | learning rate: 2.4E-04 | loss scale: 512.0 | number of skipped iterations:  10 |"),
    ("nan_loss", "diagnose", "FloatingPointError: Loss became infinite or NaN at iteration=1201!"),
    ("nan_loss", "diagnose", "step 15310 | loss 2.88 | gnorm 0.41\nstep 15320 | loss inf | gnorm inf"),
    ("nan_loss", "diagnose", "\tTrain metrics/train/loss: nan"),
    ("nan_loss", "diagnose", "FloatingPointError: invalid value (nan) encountered in jit(train_step)"),
    ("storage_error", "restart", "gcsfs.retry.HttpError: We encountered an internal error. Please try again., 503"),
    ("storage_error", "rollback", 'ValueError: NOT_FOUND: Error opening "zarr" driver: Metadata at "gs://b/ckpt/1/.zarray" does not exist'),
    ("storage_error", "rollback", "DataLossError: truncated record at 1234"),
    ("storage_error", "diagnose", "OSError: [Errno 117] Structure needs cleaning: '/scratch/x.bin'"),
    ("storage_error", "restart", "ERROR: Failed to upload checkpoint to gs://b/ckpt: 503 Backend Error"),
    ("process_killed", "diagnose", "mpirun noticed that process rank 3 with PID 0 on node n3 exited on signal 9 (Killed)."),
    ("process_killed", "diagnose", "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly"),
    ("code_exception", "rollback", "omegaconf.errors.MissingMandatoryValue: Missing mandatory value: data.path"),
]  # fmt: skip

HARMLESS = [
    "sshd[19]: error: kex_exchange_identification: Connection closed by remote host",
    "smartd[10]: Device: /dev/nvme0, number of Error Log entries increased from 12 to 13",
    "systemd[34]: apt-daily.service: Failed with result 'exit-code'.",
    'kubelet[18]: prober.go:107] "Probe failed" probeType="Readiness" pod="a/b" probeResult="failure"',
    'kubelet[18]: dns.go:153] "Nameserver limits exceeded" err="some nameservers have been omitted"',
    "[    6.113557] Bluetooth: hci0: Failed to read codec capabilities (-22)",
    "kernel: usb 1-9: can't set config #1, error -71",
    "kernel: snd_hda_intel 0000:00:1f.3: azx_get_response timeout, switching to polling mode",
    "BTRFS info (device sdc3): bdev /dev/sdd3 errs: wr 0, rd 0, flush 0, corrupt 0, gen 0",
    "kernel: nvme nvme1: failed to set APST feature (2)",
    "kernel: perf: Dynamic interrupt throttling disabled, can hang your system!",
    "NCCL WARN NET/IB : mlx5_3:1 Got non-fatal async event: GID table change(18)",
    "ib_device.c:482  UCX  WARN  IB Async event on mlx5_0: client reregistration on port 1",
    "{'loss': 1.8873, 'grad_norm': 0.5521, 'learning_rate': 1.87e-05, 'epoch': 1.42, 'num_nan': 0}",
    "iteration       10/ 1000000 | consumed samples: 40 | learning rate: 0.000E+00 | loss scale: 8388608.0 | number of skipped iterations:  10 |",
    "{'train_loss': 1.9, 'nan_steps': 0, 'inf_steps': 0, 'overflow': 0}",
    "eval_error_rate: 0.0123 eval_loss: 2.11",
    "bfc_allocator.cc:290] Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.1GiB. The caller indicates that this is not a failure",
    "Could not load dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open shared object file",
]  # fmt: skip


@pytest.mark.parametrize(("kind", "action", "text"), FAULTS)
def test_faults(kind: str, action: str, text: str) -> None:
    got = answer(CATALOGUE, "", text)
    assert (got.class_, got.first_action) == (kind, action), got.row


@pytest.mark.parametrize("text", HARMLESS)
def test_what_looks_alarming_and_is_not(text: str) -> None:
    got = answer(CATALOGUE, "", text)
    assert (got.class_, got.first_action) == ("benign", "record"), got.row


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: input tensor has the wrong shape, see github input: x",
        "ValueError: login: the token of the hub was refused",
        "Exception: Could not find any checkpoint shard in /ckpt/global_step100",
        "loss: 2.1, errors: 0\nRuntimeError: CUDA error: an illegal memory access was encountered",
        "dropped: 12, failed: 3, killed=1",
    ],
)
def test_a_row_of_harmless_ones_takes_no_fault(text: str) -> None:
    assert answer(CATALOGUE, "", text).class_ != "benign"


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("XID event received: code=172 pci=0000:75:00 msg=x", "0000:75:00"),
        ("NCCL WARN NET/IB : mlx5_bond_1:1 Got non-fatal async event: port error(10)", "mlx5_bond_1"),
        ("NCCL WARN Call to ibv_open_device failed\nNCCL WARN NET/IB : Unable to open device mlx5_6", "mlx5_6"),
        ("qla2xxx [0000:81:00.1]-500b:10: LOOP DOWN detected (2 7 0 0).", "0000:81:00.1"),
    ],
)
def test_the_device_that_the_text_names(text: str, device: str) -> None:
    assert answer(CATALOGUE, "", text).device == device
