"""The clock hours off, for keepstep's processes alone: a small library, preloaded, adds hours to what they are told of the time."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from events.ports import TELEMETRY_NODE
from events.registry import parse
from tests.scenarios.harness import Scenario

pytestmark = pytest.mark.slow

SKEW = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long off(void) { const char *s = getenv("KS_TEST_CLOCK_OFF_S"); return s ? atol(s) : 0; }
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int r = real(id, t);
    if (!r && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += off();
    return r;
}
int gettimeofday(struct timeval *restrict t, void *restrict z) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int r = real(t, z);
    if (!r) t->tv_sec += off();
    return r;
}
time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}
"""
HOURS = 3600
SEEN = "import time, datetime; print(int(time.time()), time.time_ns() // 10**9, int(datetime.datetime.now().timestamp()))"


@pytest.fixture(scope="session")
def skew(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("skew")
    (folder / "skew.c").write_text(SKEW)
    made = folder / "skew.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, folder / "skew.c", "-ldl"], check=True, timeout=60)
    return made


def off_by(library: Path, seconds: int) -> dict[str, str]:
    return {"LD_PRELOAD": str(library), "KS_TEST_CLOCK_OFF_S": str(seconds)}


async def incident_as_usual(s: Scenario) -> None:
    await s.declare()
    before = s.at
    s.kill_rank(1)
    crash = await s.closed(before)
    assert (crash.outcome, crash.mechanism) == ("recovered", "reattempt"), s.story()
    before = s.at
    s.lose_gpu("n1")
    lost = await s.closed(before)
    assert (lost.outcome, lost.mechanism, lost.nodes) == ("recovered", "evict", ("n1",)), s.story()
    assert len(s.of("incident_opened")) == 2, s.story()
    heard = (await s.cli_json("status"))["heard_s"]
    assert max(heard.values()) < 30, "the command's own clock is not the broker's"
    for closed in (crash, lost):
        assert 0 < closed.back_ns - closed.first_evidence_ns < 60e9, "times are the broker's, not a skewed clock's"
    await s.finish()
    await s.check(evicted=["n1"])


@pytest.mark.parametrize("hours", [-5, 7])
async def test_all_of_keepstep_hours_off(hours: int, skew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python process; the broker's clock is the one that counts."""

    told = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", SEEN],
        env=off_by(skew, hours * HOURS),
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert all(abs(int(s) - time.time() - hours * HOURS) < 30 for s in told.stdout.split()), "the library does not skew"
    for name, value in off_by(skew, hours * HOURS).items():
        monkeypatch.setenv(name, value)
    async with Scenario(tmp_path, nodes=2, standbys=1) as s:
        await incident_as_usual(s)


async def test_one_agent_hours_off(skew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Scenario(tmp_path, nodes=2, standbys=1) as s:
        node = next(node for node in s.pipeline.nodes if node.name == "n1")
        await s.pipeline.supervisor.stop("agent-n1")
        with monkeypatch.context() as patched:
            for name, value in off_by(skew, 9 * HOURS).items():
                patched.setenv(name, value)
            await s.pipeline.start_agent(node)
        records = (await incident_and_records(s))[TELEMETRY_NODE]
        skews = [
            (event.time - record.time_ns) / 1e9
            for record in records
            if record.subject.endswith(".n1.heartbeat")
            for event in [parse(record.data)]
        ]
        assert max(skews) > 8 * HOURS, "the agent was not hours off"


async def incident_and_records(s: Scenario) -> dict[str, list]:  # type: ignore[type-arg]
    """As usual, and the streams as they were before the end."""
    await s.declare()
    before = s.at
    s.kill_rank(1)
    assert (await s.closed(before)).mechanism == "reattempt"
    before = s.at
    s.lose_gpu("n1")
    assert (await s.closed(before)).nodes == ("n1",)
    assert len(s.of("incident_opened")) == 2, s.story()
    await s.finish()
    return await s.check(evicted=["n1"])
