"""The catalogue: that the shipped one reads lines rightly, that a bad one is refused in a sentence."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.job import CatalogueAdopted
from infra.catalogue_files import catalogue_text
from processors.catalogue import BadCatalogue, digest, parse, pci_address
from tests.telemetry import CATALOGUE_TEXT, XID_79

CATALOGUE = parse(CATALOGUE_TEXT)


@pytest.mark.parametrize(
    ("line", "row", "xid", "device", "confidence"),
    [
        (XID_79, "xid-79", 79, "0000:03:00.0", "high"),
        ("kern  :err   : [Tue] NVRM: Xid (PCI:0008:01:00.0): 79, GPU has fallen off the bus.", "xid-79", 79, "0008:01:00.0", "high"),
        ("Okt 06 17:59:27 w kernel: NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.", "off-the-bus", -1, "0000:01:00.0", "high"),
        ("NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: fallen off the bus and", "off-the-bus", -1, "0000:b3:00.0", "high"),
        ("GPU has fallen off the bus", "off-the-bus", -1, "", "high"),
        ("[17179779.4] NVRM: Xid (0003:00): 13, COCOD 0000001e", "xid-13", 13, "0000:03:00.0", "low"),
        ("NVRM: Xid (0000:af:00): 48, pid='<unknown>'", "xid-48", 48, "0000:af:00.0", "high"),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained", "xid-94", 94, "0000:01:00.0", "low"),
        ("NVRM: Xid (PCI:0000:35:00): 31, pid=3, name=a: Xid (0): 79, b [c], ch", "xid-31", 31, "0000:35:00.0", "low"),
        ("NVRM: Xid (PCI:0000:10:1c): 64, Row Remapper Error - already pending", "xid-64-pending", 64, "0000:10:1c.0", "low"),
        ("NVRM: Xid (PCI:0000:10:1c): 64, Row Remapper Error", "xid-64", 64, "0000:10:1c.0", "high"),
        ("NVRM: Xid (PCI:0000:10:1c): 74, NVLink: Non-fatal error, fatal error", "xid-74", 74, "0000:10:1c.0", "low"),
        ("NVRM: Xid (PCI:0000:10:1c): 7900, x", "xid-unknown", 7900, "0000:10:1c.0", "low"),
        ("<0>[3.2] Kernel panic - not syncing: Fatal exception", "kernel-panic", -1, "", "high"),
        ("Out of memory: Killed process 2092 (node) total-vm:1kB", "oom-kill", -1, "", "low"),
        ("Xid (PCI:0000:01:00): 62, 02\nNVRM: Xid (PCI:0000:02:00): 95, pid=9\nNVRM: Xid (PCI:0000:01:00): 45", "xid-95", 95, "0000:02:00.0", "high"),
    ],
)  # fmt: skip
def test_lines(line: str, row: str, xid: int, device: str, confidence: str) -> None:
    found = CATALOGUE.classify(line)
    assert found is not None
    assert (found.row.id, found.xid, found.device, found.row.confidence) == (row, xid, device, confidence)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "pci_bus 0000:04: extended config space not accessible",
        "nvidia-nvswitch0: SXid (PCI:0000:06:00.0): 20009, Non-fatal, Link 04 RX Short Error Rate",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "ata7: SATA link down (SStatus 0 SControl 300)",
        "pcieport 0000:00:1c.0: AER: Corrected error received: 0000:02:00.0",
        "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15",
        "ACPI: bus type PCI registered",
    ],
)
def test_lines_that_claim_nothing_about_a_node(line: str) -> None:
    assert CATALOGUE.classify(line) is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("PCI:0000:03:00", "0000:03:00.0"),
        ("0000:03:00.1", "0000:03:00.1"),
        ("00000000:C1:00.0", "0000:c1:00.0"),
        ("0001:00", "0000:01:00.0"),
        ("03:00", "0000:03:00.0"),
        ("mlx5_0", "mlx5_0"),
        ("x" * 100, "x" * 64),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert pci_address(text) == address
    assert pci_address(address) == address


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300), st.sampled_from([e for row in CATALOGUE.rows for e in row.examples]), st.text(max_size=50))
def test_the_filter_passes_whatever_is_found_and_nothing_raises(before: str, example: str, after: str) -> None:
    line = before + example + after
    for text in (line, before, line[: len(line) // 2]):
        if CATALOGUE.classify(text) is not None:
            assert CATALOGUE.interesting(text)


def test_the_context_line_passes_the_filter() -> None:
    assert CATALOGUE.interesting("NVRM: The NVIDIA GPU 0000:b3:00.0")
    assert CATALOGUE.device_named("NVRM: The NVIDIA GPU 0000:b3:00.0") == "0000:b3:00.0"
    assert CATALOGUE.device_named("NVRM: The NVIDIA driver") == ""


def test_a_text_has_one_digest() -> None:
    assert CATALOGUE.digest == digest(CATALOGUE_TEXT) and len(CATALOGUE.digest) == 16
    assert parse(CATALOGUE_TEXT + "\n").digest != CATALOGUE.digest


ROW = {
    "id": "disk",
    "all": ["abcdef"],
    "symptom": "disk_fault",
    "confidence": "high",
    "fault": ["hardware"],
    "first_action": "evict",
    "source": "test",
    "examples": ["x abcdef y"],
}


def text_of(**changes: object) -> str:
    return json.dumps({"version": 1, "rows": [{k: v for k, v in {**ROW, **changes}.items() if v is not None}]})


def test_a_row_is_all_that_a_new_kind_of_line_needs() -> None:
    found = parse(text_of(regex=r"on (?P<device>nvme\d+)", examples=["abcdef on nvme3"])).classify("12: abcdef on nvme12 now")
    assert found is not None and (found.row.id, found.device) == ("disk", "nvme12")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not YAML at line"),
        ("- 1", "must be a mapping"),
        ("", "must be a mapping"),
        ("version: 1\nrows: []", "rows"),
        ("version: 3\nrows: []", "version"),
        ("version: 2\nrows: []", "rows"),
        (text_of(symptom="nonsense"), "row disk, symptom"),
        (text_of(confidence="sure"), "row disk, confidence"),
        (text_of(fault=[]), "row disk, fault"),
        (text_of(fault=["cosmic rays"]), "row disk, fault.0"),
        (text_of(colour="red"), "row disk, colour"),
        (text_of(source=None), "row disk, source"),
        (text_of(id="No Good"), "id"),
        (text_of(all=None), "needs xid, or literals"),
        (text_of(regex="("), "disk: the regular expression does not compile"),
        (text_of(regex="x*"), "matches the empty line"),
        (text_of(examples=["something else"]), "matches no row"),
        (text_of(examples=["NVRM: Xid (PCI:0000:01:00): 79, abcdef"]), "matches no row"),
        (json.dumps({"version": 1, "rows": [ROW, ROW]}), "two rows have the id disk"),
        (json.dumps({"version": 1, "rows": [ROW, {**ROW, "id": "later"}]}), "is taken by row disk"),
        (json.dumps({"version": 1, "context": "abcdef", "rows": [ROW]}), "group named device"),
        (json.dumps({"version": 1, "context": "(?P<device>a)", "rows": [ROW]}), "three plain letters"),
        ("#" * 500_001, "at most 500000"),
        ("&a [*a]", "must be a mapping"),
    ],
)
def test_bad_ones_are_refused_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(BadCatalogue) as caught:
        parse(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_the_shipped_rows_agree_with_what_they_say() -> None:
    for row in CATALOGUE.rows:
        assert row.confidence != "high" or row.first_action == "evict", row.id
        assert row.confidence != "high" or "user_code" not in row.fault, row.id
        assert row.confidence != "high" or row.log == "kernel", row.id
        assert row.class_ != "benign" or (row.first_action == "record" and not row.claims), row.id
        assert row.class_ != "benign" or row.confidence != "high", row.id
        assert row.symptom == CATALOGUE.tables.classes[row.class_].symptom or row.symptom in (
            "disk_space", "external_service", "cpu_overload", "os_kernel_panic",
        ), row.id  # fmt: skip


def test_the_shipped_text_can_be_adopted() -> None:
    assert CatalogueAdopted(text=CATALOGUE_TEXT, digest=digest(CATALOGUE_TEXT)).text == CATALOGUE_TEXT
    assert catalogue_text() == CATALOGUE_TEXT, "the files are put together the same each time"


def test_each_xid_of_nvidias_workbook_is_known() -> None:
    for xid in (*range(1, 178),):
        found = CATALOGUE.classify(f"NVRM: Xid (PCI:0000:4f:00): {xid}, pid=1, name=python")
        assert found is not None and found.row.id != "xid-unknown", xid
        assert CATALOGUE.tables.names[xid]
    found = CATALOGUE.classify("NVRM: Xid (PCI:0000:4f:00): 178, something new")
    assert found is not None and (found.row.class_, found.row.first_action) == ("unknown", "diagnose")


@pytest.mark.parametrize(
    ("line", "row", "action"),
    [
        # the same link event in the layouts before and from R575 on
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 14 (0x020001c6 0x0 0x0)", "invest-peer", ""),
        ("146, TLW_CTRL Fatal XC0 i0 Link 00 (0x00000123 0x00000004 0x0)", "xid-146-tlw-ctrl-reset-gpu-contact-support", "evict"),
        ("146, TLW_CTRL Fatal XC0 i0 Link 00 (0x00000009 0x00000004 0x0)", "xid-146-tlw-ctrl-reset-gpu-contact-support", "evict"),
        ("146, TLW_CTRL Nonfatal XC0 i0 Link 00 (0x00000009 0x00000001 0x0)", "xid-146-tlw-ctrl-ignore-ignore", "record"),
        ("146, TLW_CTRL Nonfatal XC0 i0 Link 00 (0x00000009 0x00000002 0x0)", "xid-146-tlw-ctrl-ignore-contact-support", "diagnose"),
        ("146, TLW_CTRL Fatal XC0 i0 Link 00 (0x000003ff 0x00000004 0x0)", "xid-nvlink5-fatal", "evict"),
        ("149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00000013 0x00000001)", "", "record"),
        ("145, RLW_REMAP Nonfatal XC0 i0 Link 02", "xid-nvlink5", "diagnose"),
    ],
)  # fmt: skip
def test_nvlink_words_by_driver_branch(line: str, row: str, action: str) -> None:
    found = CATALOGUE.classify(f"NVRM: Xid (PCI:0008:01:00): {line}")
    assert found is not None and found.row.class_ == "nvlink_error"
    if action:
        assert found.row.first_action == action
        assert found.row.id == row or not row
    else:
        assert found.row.id.startswith("xid-149-netir-link-evt")


ONE_LINE = [(row, e) for row in CATALOGUE.rows for e in row.examples if "\n" not in e]


def test_the_quick_search_of_files_finds_each_line_that_a_row_is_for() -> None:
    """`spans` may leave out only what looks alarming and is not, and what is asked for on demand."""
    for row, example in ONE_LINE:
        chunk = f"an ordinary line\n{example}\nanother\n".encode()
        found = [chunk[start:end].decode() for start, end, _ in CATALOGUE.spans(chunk)]
        if row.class_ != "benign" and not row.quiet:
            assert found == [example], row.id


def test_the_quick_search_tells_where_lines_begin_and_end() -> None:
    noise = b"usb 1-3: New USB device found\n" * 50
    chunk = noise + XID_79.encode() + b"\r\n" + noise + b"Oops: 0002 [#1] SMP NOPTI"
    assert [chunk[a:b].rstrip() for a, b, _ in CATALOGUE.spans(chunk)] == [XID_79.encode(), b"Oops: 0002 [#1] SMP NOPTI"]
    assert all(a <= at < b for a, b, at in CATALOGUE.spans(chunk))
    assert not list(CATALOGUE.spans(b"")) and not list(CATALOGUE.spans(b"\n\n\n"))


def test_an_ordinary_name_alone_is_not_looked_at() -> None:
    assert not list(CATALOGUE.spans(b"mlx5_core 0000:5c:00.0: firmware version: 28.39.1002\n"))
    assert list(CATALOGUE.spans(b"mlx5_core 0000:5c:00.0: wait for FW init failed\n"))


def test_a_training_log_claims_nothing_about_a_node_and_a_kernels_notice_neither() -> None:
    for row, example in ONE_LINE:
        found = CATALOGUE.classify(example)
        if found is not None:
            assert found.row.log == "kernel" and found.row.class_ != "benign", row.id


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("nfs: server 10.0.0.4 not responding, timed out\nBUG: kernel NULL pointer dereference, address: 00a0", "null-dereference"),
        ("NVRM: Xid (PCI:0000:01:00): 62, 0a 0b\nNVRM: Xid (PCI:0000:01:00): 45, pid=9", "xid-62"),
        ("[rank5]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n[rank0]: Watchdog caught collective operation timeout", "cuda-ecc"),
        ("checkpoint write retry: [Errno 28] No space left on device\n[Rank 12] Watchdog caught collective operation timeout: x ran for 30002 milliseconds before timing out.", "no-space"),
        ("WARNING:api:Sending process 52 closing signal SIGTERM\nERROR:api:failed (exitcode: 1) local_rank: 0", "torchrun-exit"),
        ("Traceback (most recent call last):\n  File \"t.py\", line 3\nKeyError: 'labels'\nsrun: error: n: task 0: Exited with exit code 1", "exception"),
        ("iteration 2000/ 9000 | lm loss: 2.7E+00 |\niteration 2010/ 9000 | lm loss: 2.8E+00 |\niteration 2020/ 9000 | lm loss: 7.3E+00 |", "loss-risen"),
        ("iteration 2000/ 9000 | lm loss: 2.7E+00 |\niteration 2010/ 9000 | lm loss: 2.8E+00 |", "step-healthy"),
        ("NVRM: The NVIDIA GPU 0000:b3:00.0\n  NVRM: (PCI ID: 10de:26b5) installed in this system has\n  NVRM: fallen off the bus and is not responding", "off-the-bus"),
        ("RuntimeError: NCCL error: remote process exited or there was a network\n error, NCCL version 2.22.3", "nccl-error"),
    ],
)  # fmt: skip
def test_a_text_of_several_lines_has_one_answer(text: str, row: str) -> None:
    found = CATALOGUE.judge(text)
    assert found is not None and found.row.id == row


def test_a_wrapped_message_is_put_together() -> None:
    found = CATALOGUE.judge("INFO: task python3:77 blocked for\n more than 120 seconds.")
    assert found is not None and found.row.id == "task-hung"


@pytest.mark.parametrize(
    ("line", "alarming"),
    [
        ("the frobnicator has failed", True), ("FrobnicatorError: no", True), ("x: timeout", True), ("disk is going offline", True),
        ("default settings preferred", False), ("finance department is open", False), ("pci_bus 0000:04: on NUMA node 1", False),
    ],
)  # fmt: skip
def test_what_no_row_knows_is_alarming_by_its_words(line: str, alarming: bool) -> None:
    assert CATALOGUE.alarming(line) is alarming


def test_a_catalogue_of_version_1_is_still_read() -> None:
    found = parse(json.dumps({"version": 1, "rows": [{**ROW, "first_action": "roll_back", "confidence": "low"}]})).classify(
        "abcdef"
    )
    assert found is not None and (found.row.first_action, found.row.class_, found.row.symptom) == ("rollback", "", "disk_fault")


TABLES = {
    "version": 2,
    "classes": [{"class": "disk_error", "symptom": "disk_fault"}, {"class": "benign", "symptom": "unknown"}],
    "buckets": [{"bucket": "RESET_GPU", "first_action": "evict"}],
    "devices": {"disk": r"(?P<device>sd[a-z])"},
}
NEW_ROW = {"id": "disk", "class": "disk_error", "all": ["abcdef"], "first_action": "evict", "examples": ["x abcdef y"]}


def document(*rows: dict[str, object], **more: object) -> str:
    defaults = {"fault": ["hardware"], "source": "test"}
    return json.dumps({**TABLES, "defaults": defaults, "rows": list(rows), **more})


def test_rows_take_what_they_leave_out_from_their_document_and_class() -> None:
    catalogue = parse(document({**NEW_ROW, "device": ["disk"], "examples": ["abcdef on sdb"]}))
    found = catalogue.judge("ABCDEF on SDC")
    assert found is not None and (found.row.symptom, found.row.source, found.named) == ("disk_fault", "test", "SDC")


def test_documents_are_one_catalogue() -> None:
    second = json.dumps(
        {
            "version": 2,
            "defaults": {"fault": ["driver"], "source": "two"},
            "rows": [{**NEW_ROW, "id": "two", "all": ["ghijkl"], "examples": ["ghijkl"]}],
        }
    )
    catalogue = parse(document(NEW_ROW) + "\n---\n" + second)
    assert [row.id for row in catalogue.rows] == ["disk", "two"]


def test_several_literals_of_which_one_must_stand_there() -> None:
    catalogue = parse(
        document({**NEW_ROW, "all": [], "any": ["one thing", "another"], "none": ["but not"], "examples": ["Another"]})
    )
    assert catalogue.judge("x another y") and catalogue.judge("ONE THING")
    assert catalogue.judge("one") is None and catalogue.judge("another BUT NOT") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (document({**NEW_ROW, "class": "nonsense"}), "disk"),
        (document({**NEW_ROW, "class": ""}), "disk"),
        (document({**NEW_ROW, "fault": []}), "whose fault"),
        (document({**NEW_ROW, "first_action": "diagnose", "nvidia_action": "RESET_GPU"}), "say why in differs"),
        (document({**NEW_ROW, "nvidia_action": "PRAY"}), "is no bucket"),
        (document({**NEW_ROW, "device": ["nic"]}), "no pattern 'nic' in devices"),
        (document({**NEW_ROW, "superseded_by": ["nothing"]}), "neither a row nor a class"),
        (document({**NEW_ROW, "words": {"0": ["01"]}}), "words"),
        (document({**NEW_ROW, "all": ["ab"]}), "all"),
        (document(NEW_ROW, devices={"disk": "x"}), "group named device"),
        (document(NEW_ROW, classes=[*TABLES["classes"], TABLES["classes"][0]]), "two classes"),  # type: ignore[misc,index]
        (document(NEW_ROW, defaults=["x"]), "defaults"),
        (document(NEW_ROW) + "\n--- 7", "must be a mapping"),
    ],
)  # fmt: skip
def test_bad_rows_of_version_2_are_refused_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(BadCatalogue) as caught:
        parse(text)
    assert says in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=2000))
def test_any_text_has_an_answer(text: str) -> None:
    found = CATALOGUE.judge(text)
    assert found is None or found.row in CATALOGUE.rows
    CATALOGUE.alarming(text)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes_have_spans(chunk: bytes) -> None:
    for start, end, at in CATALOGUE.spans(chunk):
        assert 0 <= start <= at < end <= len(chunk) and b"\n" not in chunk[start:end]
