"""The kind ``replicate``: one link to another cluster, all its topics, as rounds of Spark jobs.

    driver      plans a round ─▶ Spark job: a task copies its share of partitions ─▶ outcomes ─▶ next round
    target      knows by its own log how far each source was copied into it

**The target's log is the checkpoint.** A task asks the target for the source position and copies from there
up to the end that the driver has planned. So a task that Spark repeats, a round of a dead driver, and two
drivers at once do no harm: the second one learns that the work is done. The driver keeps nothing that must
survive it, and no checkpoint can be lost, stale or restored.

**Why rounds of jobs, and not a streaming query.** A streaming query has one position for all its topics and
fails as one. Of a hundred topics one may wait for a namespace, one for a schema and one for its turn under a
rate limit while the others continue; each has its own position, state and next attempt. A partition is in one
round at a time; rounds overlap, so that a long round does not delay the partitions outside it.
"""
