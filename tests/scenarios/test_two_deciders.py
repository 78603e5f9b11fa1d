"""Two deciders at once: one decides, the other waits; one that was frozen past its lease and wakes is refused."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.scenarios.harness import Scenario

pytestmark = pytest.mark.slow


async def test_a_decider_frozen_past_its_lease_is_refused_when_it_wakes(tmp_path: Path) -> None:
    async with Scenario(tmp_path, nodes=2) as s:
        await s.declare()
        assert len(s.of("decider_started")) == 1
        first = s.of("decider_started")[0].data.worker
        s.start_part("infra.decider_service", "--home", str(s.home.path), "--worker", "second")

        # Frozen with an incident in its hands: the second one carries it on.
        before = s.at
        s.kill_rank(1)
        await s.until(lambda: s.of("incident_opened", after=before), "incident")
        s.signal(signal.SIGSTOP, "decider")
        closed = await s.closed(before)
        assert (closed.outcome, closed.mechanism) == ("recovered", "reattempt")
        assert [d.data.worker for d in s.of("decider_started")] == [first, "second"]

        # Thawed, and a new incident at the same moment: only the second one may answer it.
        before = s.at
        s.signal(signal.SIGCONT, "decider")
        s.kill_rank(0)
        closed = await s.closed(before)
        assert (closed.outcome, closed.mechanism) == ("recovered", "reattempt")
        assert [d.data.worker for d in s.of("decider_started")] == [first, "second"], "the first took over again"
        assert s.job().attempt == 3
        await s.finish()
        await s.check(left=False)
