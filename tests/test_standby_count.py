"""The number of standbys, against the paper's table and a slow, plain model."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from math import comb
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processors.standby_count import standbys_for


@pytest.mark.parametrize(("machines", "standbys"), [(128, 2), (256, 2), (512, 3), (1024, 4), (1200, 5)])
def test_the_papers_table(machines: int, standbys: int) -> None:
    """ByteRobust, Table 5; and what the same rate gives for its job of 1,200 machines."""
    assert standbys_for(machines) == standbys


def plain(machines: int, share: Fraction, percentile: Fraction) -> int:
    """By the definition, in fractions."""
    total = Fraction(0)
    for failed in range(machines + 1):
        total += comb(machines, failed) * share**failed * (1 - share) ** (machines - failed)
        if total >= percentile:
            return failed
    raise AssertionError


@settings(max_examples=150, deadline=None)
@given(machines=st.integers(0, 60), thousandths=st.integers(0, 1000), hundredths=st.integers(1, 99))
def test_it_is_the_smallest_number_that_is_enough(machines: int, thousandths: int, hundredths: int) -> None:
    share, percentile = Fraction(thousandths, 1000), Fraction(hundredths, 100)
    wanted = plain(machines, share, percentile)
    found = standbys_for(machines, float(share), float(percentile))
    # A sum that meets the percentile to the last digit may fall to either side of it.
    exact = sum(comb(machines, k) * share**k * (1 - share) ** (machines - k) for k in range(wanted + 1))
    assert found == wanted or (abs(float(exact) - float(percentile)) < 1e-9 and abs(found - wanted) <= 1)


@pytest.mark.parametrize(
    "numbers", [(-1, 0.1, 0.9), (10**20, 0.1, 0.9), (10, -0.1, 0.9), (10, 1.1, 0.9), (10, 0.1, 0.0), (10, 0.1, 1.0)]
)
def test_what_is_no_such_number_is_refused(numbers: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="machines are 0 to"):
        standbys_for(*numbers)


def test_many_machines_take_no_time() -> None:
    assert 130 < standbys_for(100_000) < 160


def test_on_the_command_line() -> None:
    command = [sys.executable, "-m", "infra.cli", "spares", "1024"]
    at = Path(__file__).parent.parent
    said = json.loads(
        subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=at, timeout=60, check=True).stdout
    )
    assert said == {"machines": 1024, "daily_failures": 0.0012, "percentile": 0.99, "standbys": 4}
    wrong = subprocess.run([*command, "--percentile", "2"], capture_output=True, text=True, cwd=at, timeout=60)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr and "percentile" in wrong.stderr
