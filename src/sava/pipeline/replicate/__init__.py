"""The kind ``replicate``: one link to another cluster, all its topics, as rounds of Spark jobs.

    driver      plan a round ─▶ Spark job: a task copies its share of partitions ─▶ outcomes ─▶ next round
    target      knows by its own log how far each source was copied into it

**The target's log is the checkpoint.** A task opens the chain at the target, is told where it is, and copies
from there up to the end that the driver has planned. So a task that Spark repeats, a round of a driver that
is gone, and two drivers at once do no harm: whoever comes second is told that it is done. Nothing is kept on
the driver that would have to survive it, and there is no checkpoint that could be lost, stale or restored.

**Why rounds of jobs, and not a streaming query.** A streaming query has one position for all its topics and
fails as one. Of a hundred topics one may wait for a namespace, one for a schema and one for its turn under a
rate limit, and the others go on; each has its own position, state and next attempt. A partition that is under
way is in one round at a time; rounds overlap, so that a long one keeps nobody waiting.
"""
