"""A number told line after line that rises: a loss, a gradient norm. Pure; the memory is the caller's, one for each log."""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

from processors.catalogue_rows import Row, compiled

#: Numbers remembered of each row: long enough to know what is usual, short enough to forget a run's start.
REMEMBERED_MAX = 32


@lru_cache(maxsize=256)
def _pattern(where: str, pattern: str) -> re.Pattern[str]:
    return compiled(where, pattern)


@dataclass(slots=True)
class Risen:
    """What was told before. `holds` remembers the line's number and says whether it rose."""

    before: dict[str, deque[float]] = field(default_factory=dict)

    def holds(self, row: Row, line: str) -> bool:
        assert row.series is not None
        match = _pattern(row.id, row.series.regex).search(line)
        try:
            value = float(match["value"]) if match else math.nan
        except (ValueError, IndexError):
            return False
        if not math.isfinite(value):
            return False
        known = self.before.setdefault(row.id, deque(maxlen=REMEMBERED_MAX))
        usual = sorted(known)[len(known) // 2] if known else 0.0
        known.append(value)
        return bool(row.series.above and value > row.series.above) or bool(
            row.series.rises and usual > 0 and value >= row.series.rises * usual
        )
