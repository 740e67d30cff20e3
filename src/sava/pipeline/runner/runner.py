"""PipelineRunner: the pipelines of this process, its claims on them, and its share among runners.

**The clock decides.** The cluster gives a runner's pipelines to another runner when it has not heard from it
for a TTL. It cannot tell the runner so: what separates them is the reason. So the runner goes by its own
clock: its claims live at least one TTL from the moment at which the last answered heartbeat was *sent*, and
nothing may run beyond that.

    sent t0 ── answered          no answer …       t0 + TTL/2               t0 + TTL
       claims live at least until t0 + TTL         everything is stopped    another may have it
                                                   └─ if something does not stop: the process ends ─┘

Within that time the runner stops every pipeline in the middle of its batch; nothing is lost or repeated by
that, only done again. If the cluster answers in time, the claims still hold, and the runner continues.

**One loop.** The loop that calls ``step`` owns all state. Its calls to the cluster are bounded, and after a
failed call the step makes no other, so it looks at the clock at least every CALL_S.

**Shares.** No arbiter assigns pipelines: each runner decides by what all can see, and the claim decides
between two that want the same. Runners that take everything have equal shares, rounded up. A runner claims
free pipelines up to its share at once, and beyond it only those that stay free for LEFT_S, so that a runner
that fails to claim leaves nothing undone. A runner above its share gives one pipeline away at a time to a
runner below it, so that a new runner gets its part.

**One pipeline** (``Hosted``), claimed by this runner:

              ┌────────── waits longer each time ◀──────┐
              ▼                                         │
    start ▶ starting ▶ running ─ error, or stuck ▶ failing
                        │  ▲                            │
                        │  └──────── has worked ────────┘
                        └─ not wanted ▶ stopping ▶ stopped, to be released

A pipeline that names what this runner's operator has not allowed is ``failed`` instead: its claim stays, so
that no runner of the same command line begins it again, and nothing is tried until it changes.

A failed pipeline stays ``failing``, with its error, until a batch succeeds: a query starts well whatever its
rows are, and one that fails with each first batch would otherwise seem to run half of the time, without an
error.

No method waits: a job is polled. The clock is a parameter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Final

from sava.client.errors import ClientError, Refused
from sava.errors import HostError, Outcome, SavaError
from sava.pipeline.runner.allowing import NotAllowed
from sava.pipeline.runner.control import (
    AdminRunnerControl,
    ClaimGrant,
    JobState,
    JobStatus,
    ListedPipeline,
    Peer,
)
from sava.pipeline.runner.kinds import JobProgress, PipelineJob, PipelineKind
from sava.tasks import Backoff

log = logging.getLogger(__name__)

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 60.0
"""The longest delay between attempts. A job that has run for this time starts with the first delay again."""
STUCK_S: Final = 120.0
PROGRESS_S: Final = 30.0
"""The interval between progress lines of an active pipeline in the log."""
STARTING_S: Final = 20.0
"""A start that takes longer no longer blocks other starts."""
PATIENCE_S: Final = 30.0
"""The current batch may take this long after a stop request before it is interrupted."""


class Hosted:
    """One claimed pipeline."""

    def __init__(
        self, listed: ListedPipeline, granted: ClaimGrant, kind: PipelineKind, *, stuck_s: float = STUCK_S
    ) -> None:
        self.listed = listed
        self.granted = granted
        self.is_wanted = True
        """False once the pipeline is to stop for good."""
        self.report_at = 0.0
        """When the next report is due; a new state is reported at once."""
        self.lost_at: float | None = None
        """The time at which the runner learned that the claim is lost."""
        self._kind = kind
        self._stuck_s = stuck_s
        self._job: PipelineJob | None = None
        self._started_at = 0.0
        self._is_stopping = False
        self._stops_now = False
        self._stop_by = 0.0
        self._retry_at = 0.0
        self._backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, jitter=0.25)
        self._state: JobState = "starting"
        self._since_ms = _now_ms()
        self._rows = listed.rows
        """The rows of ended jobs, also of earlier runners."""
        self._restarts = listed.restarts
        self._error = ""
        self._is_refused = False
        """Nothing of it is tried until it changes."""
        self._cause = ""
        """The error that is the reason for the stop, if any."""
        self._progress = JobProgress()
        self._pulse: Hashable = None
        self._pulse_at = 0.0
        self._logged = (0.0, listed.rows)
        """The time of the last progress line in the log, and its number of rows."""

    @property
    def name(self) -> str:
        return self.listed.name

    @property
    def claim(self) -> int:
        return self.granted.claim

    @property
    def is_idle(self) -> bool:
        """Whether no job runs."""
        return self._job is None

    def is_starting(self, now: float) -> bool:
        """Whether a start is in progress and may still succeed."""
        return self._job is not None and not self._progress.is_running and now < self._started_at + STARTING_S

    @property
    def status(self) -> JobStatus:
        progress = self._progress
        return JobStatus(
            state=self._state,
            rows=self._rows + progress.rows,
            rate=progress.rate,
            lag_messages=progress.lag_messages,
            lag_seconds=progress.lag_seconds,
            last_error=self._error,
            restarts=self._restarts,
            since_ms=self._since_ms,
            batch=progress.batch,
        )

    # -- requests ------------------------------------------------------------------------------

    def is_news(self, listed: ListedPipeline) -> bool:
        """Whether the record says something else to do, or is another principal's request: that one has
        other rights, and needs another token."""
        return (listed.kind, listed.settings, listed.created_by) != (
            *(self.listed.kind, self.listed.settings, self.listed.created_by),
        )

    def follow(self, listed: ListedPipeline, granted: ClaimGrant) -> None:
        """Apply the current record. Changed settings restart the job after its current batch."""
        is_changed = self.is_news(listed)
        self.granted = granted
        self.listed = listed
        if is_changed:
            log.info("pipelines: changed name=%s revision=%d", self.name, listed.revision)
            self._backoff.reset()
            self._retry_at = 0.0
            self._error = ""  # of what it was before
            self._is_refused = False
            self.interrupt(now=False)

    def lose(self, why: str, now: float) -> None:
        """The claim is lost: another runner may have it already."""
        if self.lost_at is None:
            self.lost_at = now
            log.warning("pipelines: lost name=%s claim=%d why=%s", self.name, self.claim, why)
        self.dismiss(why, now=True)

    def dismiss(self, why: str, *, now: bool) -> None:
        """Stop the pipeline for good."""
        if self.is_wanted:
            log.info("pipelines: stopping name=%s why=%s", self.name, why)
        self.is_wanted = False
        self.interrupt(now=now)

    def interrupt(self, *, now: bool) -> None:
        """Stop the job. If the pipeline is still wanted, a new job starts."""
        if self._job is not None and (not self._is_stopping or (now and not self._stops_now)):
            self._is_stopping = True
            self._stops_now = self._stops_now or now
            self._job.stop(now=now)

    # -- steps ---------------------------------------------------------------------------------

    def step(self, now: float, *, may_start: bool = True) -> None:
        if self._job is None:
            if not self.is_wanted:
                self._enter("stopped")
            elif may_start and now >= self._retry_at and not self._is_refused:
                self._start(now)
            return
        self._progress = self._job.progress
        end = self._job.end
        if end is not None:
            self._ended(end, now)
            return
        is_well = self._progress.is_running and (self._progress.has_worked or not self._error)
        if is_well and not self._is_stopping:
            self._enter("running")
        if self._state == "running" and now - self._started_at >= LONGEST_DELAY_S:
            self._backoff.reset()
        if self._is_stopping:
            self._stop_by = self._stop_by or now + PATIENCE_S
            if now >= self._stop_by:
                self.interrupt(now=True)
        self._tell(now)
        self._watch(now)

    def _tell(self, now: float) -> None:
        status, (logged_at, rows) = self.status, self._logged
        if status.rows > rows and now >= logged_at + PROGRESS_S:
            self._logged = (now, status.rows)
            log.info(
                "pipelines: progress name=%s rows=%d rate=%.1f lag=%d lag_s=%.1f batch=%d",
                *(self.name, status.rows, status.rate, status.lag_messages),
                *(status.lag_seconds, status.batch),
            )

    def _start(self, now: float) -> None:
        self._enter("starting" if not self._error else "failing")
        self._progress = JobProgress(batch=self._progress.batch)
        self._started_at, self._pulse, self._pulse_at = now, None, now
        self._is_stopping, self._stops_now, self._stop_by, self._cause = False, False, 0.0, ""
        try:
            self._job = self._kind.start(self.name, self.listed.settings, self.granted.token)
        except NotAllowed as error:
            self._refuse(str(error))
            return
        except SavaError as error:
            self._fail(str(error), now)
            return
        except Exception as error:
            # A fault of one kind must not stop other pipelines.
            log.exception("pipelines: not started name=%s", self.name)
            self._fail(f"{type(error).__name__}: {error}", now)
            return
        log.info("pipelines: started name=%s kind=%s claim=%d", self.name, self.listed.kind, self.claim)

    def _watch(self, now: float) -> None:
        """Restart a job that has a backlog and makes no progress."""
        progress = self._progress
        pulse = (progress.is_running, progress.batch, progress.pulse)
        if pulse != self._pulse or not progress.has_backlog:
            self._pulse, self._pulse_at = pulse, now
        elif now - self._pulse_at >= self._stuck_s and not self._stops_now:
            behind = f"{progress.lag_messages} messages behind" if progress.lag_messages > 0 else "behind"
            self._cause = f"stuck: {behind}, and nothing was done for {now - self._pulse_at:.0f} s"
            log.warning("pipelines: %s name=%s", self._cause, self.name)
            self.interrupt(now=True)

    def _ended(self, error: str, now: float) -> None:
        refusal = self._job.refusal if self._job is not None else ""
        self._job = None
        self._rows += self._progress.rows
        self._progress = JobProgress(batch=self._progress.batch)
        error = error or self._cause
        if refusal and self.is_wanted and not self._is_stopping:
            self._refuse(refusal)
        elif not self.is_wanted:
            self._error = error or self._error
            self._enter("stopped")
        elif error:
            self._fail(error, now)
        elif not self._is_stopping:
            self._fail("the query has ended by itself", now)

    def _refuse(self, error: str) -> None:
        self._is_refused = True
        self._error = error
        self._enter("failed")
        log.error("pipelines: refused name=%s error=%s", self.name, error)

    def _fail(self, error: str, now: float) -> None:
        delay = self._backoff.next()
        self._retry_at = now + delay
        self._error = error
        self._restarts += 1
        self._enter("failing")
        log.warning("pipelines: failing name=%s again_in_s=%.1f error=%s", self.name, delay, error)

    def _enter(self, state: JobState) -> None:
        if state == self._state:
            return
        self._state, self._since_ms, self.report_at = state, _now_ms(), 0.0
        if state == "running":
            self._error = ""
            log.info("pipelines: running name=%s", self.name)
        elif state == "stopped":
            log.info("pipelines: stopped name=%s rows=%d", self.name, self._rows)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


LEFT_S: Final = 3.0
"""A free pipeline is left to runners with fewer pipelines for this time."""


def to_claim(
    me: Peer, peers: Sequence[Peer], listed: Sequence[ListedPipeline], left: Collection[str]
) -> list[ListedPipeline]:
    """The pipelines to claim now, in order. ``left``: those that were free for LEFT_S."""
    wanted = [each for each in listed if each.is_wanted and me.takes(each)]
    # A pipeline that is listed as this runner's and unknown here is a claim whose answer was lost.
    chosen = [each for each in wanted if each.holder == me.name]
    room = (len(wanted) if me.only else _share(me, peers, listed)) - me.claims
    for each in wanted:
        if not each.holder and (room > 0 or each.name in left):
            chosen.append(each)
            room -= 1
    return chosen


def to_give(
    me: Peer, peers: Sequence[Peer], listed: Sequence[ListedPipeline], claims: Mapping[str, int]
) -> str | None:
    """The claim to give away: the youngest that another runner can take."""
    if me.only:
        return None
    share = _share(me, peers, listed)
    if len(claims) <= share:
        return None
    takers = [peer for peer in _general(peers) if peer.name != me.name and peer.claims < share]
    by_name = {each.name: each for each in listed}
    for name in sorted(claims, key=lambda name: -claims[name]):
        each = by_name.get(name)
        if each is not None and any(peer.takes(each) for peer in takers):
            return name
    return None


def _share(me: Peer, peers: Sequence[Peer], listed: Sequence[ListedPipeline]) -> int:
    runners = len({peer.name for peer in _general(peers)} | {me.name})
    wanted = sum(each.is_wanted and not _is_reserved(each, peers) for each in listed)
    return -(-wanted // runners)


def _general(peers: Collection[Peer]) -> list[Peer]:
    return [peer for peer in peers if not peer.only]


def _is_reserved(listed: ListedPipeline, peers: Sequence[Peer]) -> bool:
    """Whether a runner that only takes named pipelines holds it."""
    return any(peer.only and peer.name == listed.holder for peer in peers)


POLL_S: Final = 1.0
REPORT_S: Final = 2.0
STARTS: Final = 2
"""Concurrent starts of pipelines. Each start brings several Python processes, for which Spark waits ten
seconds: of a dozen starts at once on a few cores none would be in time, again and again."""
TELL_S: Final = 60.0
LEAVE_S: Final = 10.0
"""At its end the runner tries to release its claims for this time."""


class NotStopped(HostError):
    """A pipeline did not stop before its claim ended. The process must end at once, with everything it
    runs."""

    outcome = Outcome.UNKNOWN


class PipelineRunner:
    """The loop of a runner. One thread calls ``step`` periodically; any thread may call ``stop``."""

    def __init__(
        self,
        name: str,
        control: AdminRunnerControl,
        kinds: Mapping[str, PipelineKind],
        *,
        only: Sequence[str] = (),
        stuck_s: float = STUCK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._control = control
        self._kinds = kinds
        self._only = frozenset(only)
        self._stuck_s = stuck_s
        self._clock = clock
        self._hosted: dict[str, Hosted] = {}
        self._lease = 0
        self._deadline = 0.0
        """The claims hold until then."""
        self._ttl_s = 0.0
        self._peers: Sequence[Peer] = ()
        self._free_since: dict[str, float] = {}
        """When this runner first saw a pipeline as free."""
        self._poll_at = 0.0
        self._tell_at = 0.0
        """When the log may repeat that the cluster does not answer."""
        self._unknown: set[str] = set()
        self._stops = 0
        """The number of stop requests. Only this field is set by other threads and signals."""
        self._leave_by: float | None = None
        self.is_done = False

    def stop(self) -> None:
        """Stop after the current batches; on a second call, at once."""
        self._stops += 1

    @property
    def hosted(self) -> Mapping[str, Hosted]:
        return self._hosted

    # -- the loop ------------------------------------------------------------------------------

    def step(self) -> None:
        """Raises NotStopped."""
        self._enforce()
        self._step_hosted()
        if self._stops:
            self._wind_up()
        if self.is_done:
            return
        try:
            self._talk()
        except ClientError as error:
            if self._clock() >= self._tell_at:
                log.warning("pipelines: the cluster does not answer error=%s", error)
                self._tell_at = self._clock() + TELL_S
        else:
            self._tell_at = 0.0
        self._enforce()

    def _step_hosted(self) -> None:
        starting = sum(hosted.is_starting(self._clock()) for hosted in self._hosted.values())
        for hosted in self._hosted.values():
            was_idle = hosted.is_idle
            hosted.step(self._clock(), may_start=self._is_safe() and starting < STARTS)
            starting += was_idle and not hosted.is_idle

    def _talk(self) -> None:
        now = self._clock()
        if now >= self._poll_at:
            self._poll_at = now + POLL_S
            self._join()
            self._enforce()
            if not self._stops:
                self._look(self._control.list())
        for hosted in list(self._hosted.values()):
            self._enforce()
            try:
                self._settle(hosted)
            except Refused as error:
                log.error("pipelines: refused name=%s error=%s", hosted.name, error)

    def _settle(self, hosted: Hosted) -> None:
        """Report the status, or release the claim, if that is due."""
        if hosted.is_idle and not hosted.is_wanted:
            hosted.step(self._clock())
            self._control.release(hosted.name, hosted.claim, hosted.status)
            del self._hosted[hosted.name]
            return
        if self._clock() < hosted.report_at:
            return
        answer = self._control.report(hosted.name, hosted.claim, hosted.status)
        hosted.report_at = self._clock() + REPORT_S
        if not answer.is_held:
            hosted.lose("another runner has the claim", self._clock())
        elif not answer.is_wanted:
            hosted.dismiss("paused or deleted", now=False)

    # -- the claim -----------------------------------------------------------------------------

    def _join(self) -> None:
        sent = self._clock()
        joined = self._control.join()
        if self._lease and joined.lease != self._lease:
            for hosted in self._hosted.values():
                hosted.lose("the lease of this runner has expired", sent)
        self._lease, self._ttl_s = joined.lease, joined.ttl_s
        self._deadline = sent + joined.ttl_s
        self._peers = joined.peers

    def _is_safe(self) -> bool:
        return self._clock() < self._deadline - self._ttl_s / 2

    def _enforce(self) -> None:
        """Stop everything before another runner may have the claims. Raises NotStopped."""
        if not self._is_safe():
            for hosted in self._hosted.values():
                hosted.interrupt(now=True)
                hosted.step(self._clock(), may_start=False)
        now = self._clock()
        is_late = now >= self._deadline - self._ttl_s / 10
        late = [
            hosted.name
            for hosted in self._hosted.values()
            if not hosted.is_idle and (is_late or (hosted.lost_at or now) + self._ttl_s / 2 < now)
        ]
        if late:
            raise NotStopped(
                f"pipeline {', '.join(late)} does not stop, and its claim is lost or about to expire: "
                "another runner may start it at any moment, so this runner ends"
            )

    # -- which pipelines -----------------------------------------------------------------------

    def _look(self, listed: Sequence[ListedPipeline]) -> None:
        now = self._clock()
        by_name = {each.name: each for each in listed}
        for name, hosted in self._hosted.items():
            each = by_name.get(name)
            if each is None:
                hosted.dismiss("deleted", now=True)
            elif not each.is_wanted:
                hosted.dismiss("paused or deleted", now=False)
            elif each.revision != hosted.listed.revision:
                self._follow(hosted, each)
        self._note_unknown(listed)
        free = [each.name for each in listed if each.is_wanted and not each.holder]
        self._free_since = {name: self._free_since.get(name, now) for name in free}
        left = [name for name, since in self._free_since.items() if now - since >= LEFT_S]
        for each in to_claim(self._me(), self._peers, listed, left):
            if each.name not in self._hosted:
                self._enforce()
                self._claim(each)
        self._give(listed)

    def _follow(self, hosted: Hosted, listed: ListedPipeline) -> None:
        granted = hosted.granted
        if hosted.is_news(listed):
            self._enforce()
            granted = self._control.claim(listed.name)
            if granted.claim != hosted.claim:
                hosted.lose("another runner has the claim", self._clock())
                return
            if granted.revision != listed.revision:
                return  # changed since it was listed, perhaps by another principal
        hosted.follow(listed, granted)

    def _me(self) -> Peer:
        return Peer(self.name, frozenset(self._kinds), self._only, len(self._hosted))

    def _claim(self, listed: ListedPipeline) -> None:
        granted = self._control.claim(listed.name)
        if granted.claim and granted.revision == listed.revision:  # else: listed again, as this runner's
            log.info("pipelines: claimed name=%s claim=%d", listed.name, granted.claim)
            kind = self._kinds[listed.kind]
            self._hosted[listed.name] = Hosted(listed, granted, kind, stuck_s=self._stuck_s)

    def _give(self, listed: Sequence[ListedPipeline]) -> None:
        if any(not hosted.is_wanted for hosted in self._hosted.values()):
            return
        claims = {name: hosted.claim for name, hosted in self._hosted.items()}
        name = to_give(self._me(), self._peers, listed, claims)
        if name is not None:
            self._hosted[name].dismiss("moves to a runner with fewer pipelines", now=False)

    def _note_unknown(self, listed: Sequence[ListedPipeline]) -> None:
        for each in listed:
            if each.kind not in self._kinds and each.name not in self._unknown:
                self._unknown.add(each.name)
                log.warning(
                    "pipelines: unknown kind, left to other runners name=%s kind=%s",
                    each.name,
                    each.kind,
                )

    # -- the end -------------------------------------------------------------------------------

    def _wind_up(self) -> None:
        for hosted in self._hosted.values():
            hosted.dismiss("this runner ends", now=self._stops > 1)
        if not all(hosted.is_idle for hosted in self._hosted.values()):
            return
        now = self._clock()
        self._leave_by = self._leave_by or now + LEAVE_S
        is_over = now >= self._leave_by
        if self._hosted and not is_over:
            return  # each is released with its last status first
        try:
            self._control.leave()
        except ClientError as error:
            if not is_over:
                return
            log.warning("pipelines: could not leave the cluster error=%s", error)
        self.is_done = True
