"""The catalogue: that the shipped one reads lines rightly, that a bad one is refused in a sentence."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15",
        "ACPI: bus type PCI registered",
    ],
)
def test_lines_that_mean_nothing(line: str) -> None:
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
