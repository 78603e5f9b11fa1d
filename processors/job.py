"""The detector "job": everything that judges a job as a whole, put together of parts as the node's is. Pure."""

from __future__ import annotations

from processors.curves import CurvesHealth
from processors.detector import Seen
from processors.drift import ConfigurationDrifts
from processors.job_health import JobDetector
from processors.node import NodeDetector
from processors.pace import PaceHealth


class JobParts(NodeDetector):
    """Keyed by job, over TELEMETRY_JOB."""

    name = "job"

    def key_of(self, seen: Seen) -> str:
        return seen.job


def job_detector() -> JobParts:
    return JobParts((JobDetector(), ConfigurationDrifts(), CurvesHealth(), PaceHealth()))
