"""Hosted: one pipeline that this runner has claimed.

              ┌────────── waits longer each time ◀──────┐
              ▼                                         │
    start ▶ starting ▶ running ─ error, or stuck ▶ failing
                        │  ▲                            │
                        │  └──────── has worked ────────┘
                        └─ not wanted ▶ stopping ▶ stopped, to be released

A failed pipeline stays ``failing``, with its error, until a batch succeeds: a query starts well whatever its
rows are, and one that fails with each first batch would otherwise seem to run half of the time, without an
error.

The runner's loop owns it, and no method waits: a job is polled. The clock is a parameter.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Hashable
from typing import Final

from sava.errors import SavaError
from sava.pipeline.runner.control import JobState, JobStatus, ListedPipeline
from sava.pipeline.runner.kinds import JobProgress, PipelineJob, PipelineKind

log = logging.getLogger(__name__)

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 60.0
"""The longest delay between attempts. A job that has run for this time starts with the first delay again."""
STUCK_S: Final = 120.0
TELL_S: Final = 30.0
"""The interval between progress lines of an active pipeline in the log."""
STARTING_S: Final = 20.0
"""A start that takes longer no longer blocks other starts."""
PATIENCE_S: Final = 30.0
"""The current batch may take this long after a stop request before it is interrupted."""


class Hosted:
    """One claimed pipeline."""

    def __init__(
        self, listed: ListedPipeline, claim: int, kind: PipelineKind, *, stuck_s: float = STUCK_S
    ) -> None:
        self.listed = listed
        self.claim = claim
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
        self._delay = FIRST_DELAY_S
        self._state: JobState = "starting"
        self._since_ms = _now_ms()
        self._rows = listed.rows
        """The rows of ended jobs, also of earlier runners."""
        self._restarts = listed.restarts
        self._error = ""
        self._cause = ""
        """The error that is the reason for the stop, if any."""
        self._progress = JobProgress()
        self._pulse: Hashable = None
        self._pulse_at = 0.0
        self._told = (0.0, listed.rows)
        """The time of the last progress line in the log, and its number of rows."""

    @property
    def name(self) -> str:
        return self.listed.name

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

    def follow(self, listed: ListedPipeline) -> None:
        """Apply the current record. Changed settings restart the job after its current batch."""
        if listed.revision == self.listed.revision:
            return
        is_changed = (listed.kind, listed.settings) != (self.listed.kind, self.listed.settings)
        self.listed = listed
        if is_changed:
            log.info("pipelines: changed name=%s revision=%d", self.name, listed.revision)
            self._delay, self._retry_at = FIRST_DELAY_S, 0.0
            self._error = ""  # of what it was before
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
            elif may_start and now >= self._retry_at:
                self._start(now)
            return
        self._progress = self._job.progress
        end = self._job.end
        if end is not None:
            self._ended(end.error, now)
            return
        is_well = self._progress.is_running and (self._progress.has_worked or not self._error)
        if is_well and not self._is_stopping:
            self._enter("running")
        if self._state == "running" and now - self._started_at >= LONGEST_DELAY_S:
            self._delay = FIRST_DELAY_S
        if self._is_stopping:
            self._stop_by = self._stop_by or now + PATIENCE_S
            if now >= self._stop_by:
                self.interrupt(now=True)
        self._tell(now)
        self._watch(now)

    def _tell(self, now: float) -> None:
        status, (told_at, rows) = self.status, self._told
        if status.rows > rows and now >= told_at + TELL_S:
            self._told = (now, status.rows)
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
            self._job = self._kind.start(self.name, self.listed.settings)
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
        self._job = None
        self._rows += self._progress.rows
        self._progress = JobProgress(batch=self._progress.batch)
        error = error or self._cause
        if not self.is_wanted:
            self._error = error or self._error
            self._enter("stopped")
        elif error:
            self._fail(error, now)
        elif not self._is_stopping:
            self._fail("the query has ended by itself", now)

    def _fail(self, error: str, now: float) -> None:
        delay = self._delay * random.uniform(0.75, 1.0)
        self._retry_at, self._delay = now + delay, min(2 * self._delay, LONGEST_DELAY_S)
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
