"""What Faust asks about assignment, answered from the leases that the consumer holds; changelog topics are counted with them."""

from __future__ import annotations

from typing import Any

from faust.types import TP
from faust.types.assignor import PartitionAssignorT
from yarl import URL


class LeaseAssignor(PartitionAssignorT):  # type: ignore[misc]
    def __init__(self, app: Any, replicas: int = 0) -> None:
        self.app, self.replicas = app, replicas

    def group_for_topic(self, topic: str) -> int:
        return 0

    def assigned_actives(self) -> set[TP]:
        return set(self.app.consumer.assignment())

    def assigned_standbys(self) -> set[TP]:
        return set()

    def is_active(self, tp: TP) -> bool:
        return tp in self.app.consumer.assignment()

    def is_standby(self, tp: TP) -> bool:
        return False

    def key_store(self, topic: str, key: bytes) -> URL:
        raise NotImplementedError("tables are not served to other workers")

    def table_metadata(self, topic: str) -> dict[str, dict[str, list[int]]]:
        return {}

    def tables_metadata(self) -> dict[str, dict[str, list[int]]]:
        return {}
