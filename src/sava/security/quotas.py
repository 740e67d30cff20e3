"""Quotas: what one principal may use of a broker.

A quota says how many connections and streams a principal may have open at this broker, how many bytes a
second it may publish through it and consume from it, and how many topics and subscriptions may be its own in
the cluster. The quota of ``*`` is that of each principal that has none of its own: it is not shared between
them.

A **number** that is reached refuses the call with QuotaExceeded. A **rate** refuses nothing: the publisher's
stream is read slower, and deliveries to a consumer wait. HTTP/2's flow control then slows the client down:

    begin(batch) ─▶ 0 s: the bucket has room          later batches of this principal wait for the
                 ─▶ 0.3 s: read the next one then     bytes of the earlier ones to be paid for

A bucket holds one second's worth, and what is larger passes as a whole and is paid for afterwards: a batch of
8 MB at 1 MB/s is followed by eight seconds of silence. Danube's clients send one message a call, and many
calls at once, so a call that would wait longer than ``LONGEST_WAIT_S`` is refused instead.

**Connections.** gRPC's asyncio server has no hook for a connection that is accepted. So a connection counts
while a stream of the principal is open on it, known by its peer address; connections that only make single
calls are not counted here (the limits by address count those).

Where no principal has a quota, a stream is entered in a table when it opens, and a batch costs one
comparison.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from sava.errors import RetryableError
from sava.security.principal import BROKER, Principal

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERY: Final = "*"
"""Names the quota of each principal that has none of its own."""
LONGEST_WAIT_S: Final = 10.0
MAX_SHOWN: Final = 100
"""Principals that metrics name; the others are together under ``*``."""

TIDY: Final = 1000
"""With more principals than this, those that use nothing are forgotten now and then."""

Countable = Literal["topics", "subscriptions"]


class QuotaExceeded(RetryableError):
    """A principal has as much as its quota allows; the text names the quota. It can be tried again with less,
    or when an administrator has raised it (``sava auth quotas set``)."""


class Quota(NamedTuple):
    """0: no limit."""

    principal: str
    max_connections: int = 0
    max_streams: int = 0
    publish_bytes_per_second: int = 0
    consume_bytes_per_second: int = 0
    max_topics: int = 0
    max_subscriptions: int = 0


NO_QUOTA: Final = Quota("")
_BROKERS: Final = f"{BROKER}:"


class Bucket:
    """Bytes that may pass: ``rate`` a second, one second's worth at once. What passes beyond that is a debt,
    and what comes next waits until it is paid. Knows the time only from its caller."""

    __slots__ = ("_paid_at", "rate")

    def __init__(self, rate: int, now: float) -> None:
        self.rate = rate
        self._paid_at = now - 1.0
        """When everything that has passed is paid for."""

    def wait_for(self, now: float) -> float:
        """Seconds until something may pass; 0: now."""
        return max(self._paid_at - now, 0.0)

    def is_full(self, now: float) -> bool:
        return self._paid_at <= now - 1.0

    def take(self, size: int, now: float) -> float:
        """Seconds after which ``size`` bytes may pass; what is taken later comes behind them."""
        start = max(self._paid_at, now - 1.0)
        self._paid_at = start + size / self.rate
        return max(start - now, 0.0)


class Usage:
    """What one principal uses of this broker now."""

    def __init__(self, principal: str, quotas: Quotas) -> None:
        self.principal = principal
        self._quotas = quotas
        self.quota = NO_QUOTA
        self.streams = 0
        self.connections: Counter[str] = Counter()
        """Streams of each connection, by its peer address."""
        self.publishing: Bucket | None = None
        self.consuming: Bucket | None = None

    def follow(self, quota: Quota, now: float) -> None:
        self.quota = quota
        self.publishing = _bucket(self.publishing, quota.publish_bytes_per_second, now)
        self.consuming = _bucket(self.consuming, quota.consume_bytes_per_second, now)

    async def published(self, size: int) -> None:
        """Wait until the bytes may pass. For streams, which read nothing else meanwhile."""
        if self.publishing is not None:
            await self._quotas.wait(self, "publish_bytes_per_second", self.publishing, size)

    async def consumed(self, size: int) -> None:
        if self.consuming is not None:
            await self._quotas.wait(self, "consume_bytes_per_second", self.consuming, size)

    def is_busy(self, now: float) -> bool:
        buckets = (self.publishing, self.consuming)
        return bool(self.streams) or any(each is not None and not each.is_full(now) for each in buckets)


def _bucket(older: Bucket | None, rate: int, now: float) -> Bucket | None:
    if not rate:
        return None
    return older if older is not None and older.rate == rate else Bucket(rate, now)


class Quotas:
    """Of one broker. Owned by the event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quotas: Mapping[str, Quota] = {}
        self._usages: dict[str, Usage] = {}
        """Of principals with an open stream, and of those that had one lately."""
        self._tidy_at = TIDY
        self.refused: Counter[tuple[str, str]] = Counter()
        """By principal (as metrics name it) and quota."""
        self.waited_s: dict[tuple[str, str], float] = {}

    @property
    def is_set(self) -> bool:
        """Whether any principal has a quota."""
        return bool(self._quotas)

    def set(self, quotas: Iterable[Quota]) -> None:
        """From now on, for open streams too."""
        self._quotas = {quota.principal: quota for quota in quotas}
        now = self._clock()
        for usage in self._usages.values():
            usage.follow(self.of(usage.principal), now)

    def of(self, principal: str) -> Quota:
        """None is for brokers: what they do for themselves serves all."""
        if principal.startswith(_BROKERS):
            return NO_QUOTA
        found = self._quotas.get(principal)
        return found if found is not None else self._quotas.get(EVERY, NO_QUOTA)

    # -- streams -----------------------------------------------------------------------------

    @contextmanager
    def stream(self, principal: Principal, peer: str) -> Iterator[Usage]:
        """Around a stream. Raises QuotaExceeded if the principal has too many, or too many connections."""
        usage = self.usage(principal)
        quota = usage.quota
        if quota.max_streams and usage.streams >= quota.max_streams:
            raise self._exceeded(usage.principal, "max_streams", quota.max_streams, "streams")
        is_new = peer not in usage.connections
        if quota.max_connections and is_new and len(usage.connections) >= quota.max_connections:
            raise self._exceeded(usage.principal, "max_connections", quota.max_connections, "connections")
        usage.streams += 1
        usage.connections[peer] += 1
        try:
            yield usage
        finally:
            usage.streams -= 1
            usage.connections[peer] -= 1
            if not usage.connections[peer]:
                del usage.connections[peer]

    def usage(self, principal: Principal) -> Usage:
        name = str(principal)
        usage = self._usages.get(name)
        if usage is None:
            if len(self._usages) >= self._tidy_at:
                self._tidy()
            usage = self._usages[name] = Usage(name, self)
            usage.follow(self.of(name), self._clock())
        return usage

    def _tidy(self) -> None:
        """Forget those without streams. A bucket is kept until it is full: a principal that opens a stream
        for each batch would begin with a second's worth each time."""
        now = self._clock()
        self._usages = {name: each for name, each in self._usages.items() if each.is_busy(now)}
        self._tidy_at = max(TIDY, 2 * len(self._usages))

    # -- rates -------------------------------------------------------------------------------

    async def published_by_call(self, principal: Principal, size: int) -> None:
        """Wait until the bytes of a call of its own may pass. Raises QuotaExceeded when it would wait too
        long, and then nothing of it counts."""
        usage = self.usage(principal)
        bucket = usage.publishing
        if bucket is None:
            return
        if bucket.wait_for(self._clock()) > LONGEST_WAIT_S:
            quota = "publish_bytes_per_second"
            raise self._exceeded(usage.principal, quota, bucket.rate, "bytes a second published")
        await usage.published(size)

    async def wait(self, usage: Usage, quota: str, bucket: Bucket, size: int) -> None:
        seconds = bucket.take(size, self._clock())
        if seconds > 0:
            label = self._shown(usage.principal, self.waited_s), quota
            self.waited_s[label] = self.waited_s.get(label, 0.0) + seconds
            await asyncio.sleep(seconds)

    # -- numbers of things -------------------------------------------------------------------

    def check(self, principal: Principal | str, what: Countable, count: int) -> None:
        """Before one more is created. ``count``: how many are the principal's already, in the cluster. Raises
        QuotaExceeded."""
        quota = self.of(str(principal))
        limit = quota.max_topics if what == "topics" else quota.max_subscriptions
        if limit and count >= limit:
            raise self._exceeded(str(principal), f"max_{what}", limit, what)

    def counts(self, what: Countable, principal: Principal | str) -> bool:
        """Whether there is a limit, for which the things have to be counted."""
        quota = self.of(str(principal))
        return bool(quota.max_topics if what == "topics" else quota.max_subscriptions)

    def _exceeded(self, principal: str, quota: str, limit: int, what: str) -> QuotaExceeded:
        self.refused[self._shown(principal, self.refused), quota] += 1
        whose = "its quota" if principal in self._quotas else "the quota of *"
        return QuotaExceeded(
            f"{principal} has the {limit} {what} that {whose} allows ({quota}); an administrator raises it "
            f"with `sava auth quotas set {principal} --{quota.replace('_', '-')} N`"
        )

    # -- metrics -----------------------------------------------------------------------------

    def _shown(self, principal: str, counted: Mapping[tuple[str, str], float]) -> str:
        """The label of a principal: its own if it has a quota of its own, as far as there is room."""
        if principal not in self._quotas:
            return EVERY
        known = {each for each, _ in counted}
        return principal if principal in known or len(known) < MAX_SHOWN else EVERY

    def usages(self) -> list[Usage]:
        """Of principals that have a quota of their own, for metrics."""
        return [usage for usage in self._usages.values() if usage.principal in self._quotas][:MAX_SHOWN]
