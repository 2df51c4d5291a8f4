"""How long to wait before a request is sent again."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0


def wait_before_retry(attempt: int, retry_after: float | None = None) -> float:
    """Seconds to wait before a retry: exponential with jitter, and never less than the server asks for.

    Args:
        attempt: 0 for the first retry, 1 for the second.
        retry_after: what the server asks for; a little is added, so that clients that were told the same do not come
            back at the same moment.
    """
    wait = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.0)
    return wait if retry_after is None else max(wait, retry_after + random.uniform(0, min(1.0, 0.1 * retry_after)))


def read_retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds that a `Retry-After` header asks for, given in seconds or as an HTTP date; None without a valid one."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        # A date without a zone is in UTC, as HTTP dates are.
        date = date.replace(tzinfo=UTC) if date.tzinfo is None else date
        seconds = max(0.0, (date - (now or datetime.now(UTC))).total_seconds())
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
