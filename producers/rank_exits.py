"""Starts and exits of ranks, as whoever runs their processes tells of them, on their way to the job's stream.

They are on disk when `tell` returns, and the same news told again (after a crash between telling and noting) has the same id.
"""

from __future__ import annotations

from events.training import RankExit, RankStarted
from producers.observe import Desk

PRODUCER = "ranks"


def tell(desk: Desk, job: str, attempt: int, fact: RankStarted | RankExit, identity: str) -> None:
    """`identity` names the news: the process and what became of it."""
    desk.about_rank(PRODUCER, job, attempt, fact, identity)
