"""Task: what Spark says of the task that runs, and of the streaming query that it is a part of.

The query's id comes from the checkpoint and stays over restarts; the run's id is new with every start of
the query, and is what tells two drivers on one checkpoint apart. Spark hands both to its executors as
properties of the thread that runs the query: the run as the group of its jobs, which is how it cancels
them.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark import TaskContext

_QUERY = "sql.streaming.queryId"
_RUN = "spark.jobGroup.id"
_BATCH = "streaming.sql.batchId"


class Task(NamedTuple):
    partition: int
    attempt: int
    query: str
    """Empty outside of a streaming query."""
    run: str
    """Empty outside of a streaming query."""
    batch: int
    """Of the streaming query; 0 outside of one."""

    @classmethod
    def current(cls) -> Task:
        context = TaskContext.get()
        assert context is not None, "outside of a Spark task"
        query = context.getLocalProperty(_QUERY) or ""
        return cls(
            partition=context.partitionId(),
            attempt=context.attemptNumber(),
            query=query,
            run=(context.getLocalProperty(_RUN) or "") if query else "",
            batch=int(context.getLocalProperty(_BATCH) or 0) if query else 0,
        )
