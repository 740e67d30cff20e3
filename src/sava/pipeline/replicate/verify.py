"""Verify: whether a replica is what its source is, by content, as a Spark query over both.

Every message has a name that is the same in all clusters: where it was published, and at which offset there.
Both topics are read as tables, each row becomes that name and a hash of what must not differ (payload, key,
publish time, producer, attributes), and the tables are joined by name:

    source  eu/7/41 a3   eu/7/42 90   eu/7/43 5c
    target  eu/7/41 a3   eu/7/42 91                 eu/7/42 91     ─▶  42 differs and is there twice, 43 is
                                                                       missing

Compared is what was reported as copied when it began: what is on its way is neither missing nor wrong. What
retention has removed at one end cannot be compared; it is counted, not guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 (its usual name)

from sava.pipeline.cluster import ClusterAccess, ClusterClient
from sava.pipeline.replicate.translation import NOWHERE, REPLICATE, listed
from sava.storage.source_positions import ORIGIN_TOPIC, PATH, origin_topic

IDENTITY: Final = ("partition", "cluster", "origin", "at")
EXAMPLES: Final = 10
"""Findings that are shown of each partition."""
_READ: Final = (
    "partition int, offset bigint, publish_time timestamp, key string, payload binary, "
    "attributes map<string,string>, producer string, origin_cluster string, origin_offset bigint"
)


class VerifySide(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two clusters, and the topic there."""

    access: ClusterAccess
    cluster_name: str
    cluster_id: str
    topic_ids: Sequence[int]
    """By partition."""


class VerifyRequest(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    partitioned: bool
    source: VerifySide
    target: VerifySide
    ranges: Mapping[int, tuple[int, int]]
    """By partition: the offsets of the source that are compared."""
    forward: bool
    """Whether messages that came from other clusters are to be at the target too."""

    def name(self, partition: int) -> str:
        return f"{self.topic}-part-{partition}" if self.partitioned else self.topic


class VerifyFinding(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    """missing, different, repeated, extra or out_of_order."""
    cluster: str
    """Where it was published."""
    offset: int
    """There."""


class PartitionVerdict(msgspec.Struct, kw_only=True):
    """Of one partition. Counts of messages."""

    partition: int
    start: int
    end: int
    compared: int = 0
    missing: int = 0
    different: int = 0
    repeated: int = 0
    extra: int = 0
    out_of_order: int = 0
    expired: int = 0
    """Removed at the target by its retention."""
    examples: list[VerifyFinding] = []

    @property
    def is_equal(self) -> bool:
        return not (self.missing or self.different or self.repeated or self.extra or self.out_of_order)


def verify(spark: SparkSession, question: VerifyRequest) -> list[PartitionVerdict]:
    """One verdict for each partition that is compared. Raises what keeps either side from being read."""
    kept, starts = _extents(question)
    verdicts = {
        partition: PartitionVerdict(partition=partition, start=start, end=end)
        for partition, (start, end) in kept.items()
    }
    if not any(start < end for start, end in kept.values()):
        return list(verdicts.values())
    joined = _joined(spark, question, kept, starts).cache()
    try:
        for row in joined.groupBy("partition").agg(*_counts()).collect():
            verdict = verdicts[row["partition"]]
            for name in ("compared", *FINDINGS, "expired"):
                setattr(verdict, name, row[name])
        for row in _examples(joined).collect():
            verdicts[row["partition"]].examples.append(
                VerifyFinding(what=row["what"], cluster=row["cluster"], offset=row["at"])
            )
    finally:
        joined.unpersist()
    return list(verdicts.values())


# -- the tables ------------------------------------------------------------------------------


def _extents(question: VerifyRequest) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
    """What the source still has of the ranges; and where the target's partitions begin."""
    names = {partition: question.name(partition) for partition in question.ranges}
    source = ClusterClient.of(question.source.access).extents(list(names.values()))
    target = ClusterClient.of(question.target.access).extents(list(names.values()))
    kept = {}
    for partition, (start, end) in question.ranges.items():
        extent = source[names[partition]]
        end = min(end, extent.end)
        kept[partition] = (min(max(start, extent.start), end), end)
    return kept, {partition: target[name].start for partition, name in names.items()}


def _read(
    spark: SparkSession,
    question: VerifyRequest,
    side: VerifySide,
    ranges: Mapping[int, tuple[int, int]] | None,
) -> DataFrame:
    """All that there is of these partitions if there are no ranges."""
    options = {**side.access.options(), "topic": question.topic}
    for index, name in enumerate(("startingOffsets", "endingOffsets")):
        if ranges is not None:
            offsets = {str(partition): bounds[index] for partition, bounds in ranges.items()}
            options[name] = json.dumps({question.topic: offsets})
    rows: DataFrame = spark.read.format("sava").schema(_READ).options(**options).load()
    return rows


def _named(rows: DataFrame, side: VerifySide, partitions: Sequence[int]) -> DataFrame:
    """Rows by their names, with the hash of their content."""
    own = F.create_map(
        *(
            literal
            for partition in partitions
            for literal in (F.lit(partition), F.lit(origin_topic(side.cluster_id, side.topic_ids[partition])))
        )
    )
    attributes = F.map_filter("attributes", lambda name, _: ~name.isin(PATH, ORIGIN_TOPIC))
    entries = F.array_sort(F.map_entries(F.coalesce(attributes, F.create_map().cast("map<string,string>"))))
    content = F.xxhash64("payload", "key", "publish_time", "producer", entries)
    is_copy = _is_copy()
    return rows.where(F.col("partition").isin(list(partitions))).select(
        "partition",
        "offset",
        F.when(is_copy, F.col("origin_cluster")).otherwise(F.lit(side.cluster_name)).alias("cluster"),
        F.when(is_copy, F.col("attributes")[ORIGIN_TOPIC]).otherwise(own[F.col("partition")]).alias("origin"),
        F.when(is_copy, F.col("origin_offset")).otherwise(F.col("offset")).alias("at"),
        content.alias("content"),
    )


def _expected(rows: DataFrame, question: VerifyRequest) -> DataFrame:
    """The rows of the source that are to be at the target: those that ``origins`` lets pass."""
    target = question.target.cluster_name
    replicate, path = F.col("attributes")[REPLICATE], F.col("attributes")[PATH]
    is_allowed = replicate.rlike(listed(target, spaces=True)) & (F.trim(replicate) != NOWHERE)
    leaves = _is_copy() & path.rlike(listed(target)) if question.forward else _is_copy()
    return rows.where((replicate.isNull() | is_allowed) & ~leaves)


def _is_copy() -> Column:
    """As in ``origins``: what says less than all three was published where it is, whatever its producer has
    written into attributes that are not its own to give."""
    path, topic = (F.col("attributes")[name] for name in (PATH, ORIGIN_TOPIC))
    return F.col("origin_cluster").isNotNull() & path.isNotNull() & topic.isNotNull()


def _joined(
    spark: SparkSession,
    question: VerifyRequest,
    kept: Mapping[int, tuple[int, int]],
    starts: Mapping[int, int],
) -> DataFrame:
    partitions = sorted(kept)
    rows = _expected(_read(spark, question, question.source, kept), question)
    expected = _named(rows, question.source, partitions).withColumnRenamed("content", "expected")
    copies = _named(_read(spark, question, question.target, None), question.target, partitions)
    by_origin = Window.partitionBy("partition", "cluster", "origin")
    before = F.lag("at").over(by_origin.orderBy("offset"))
    copies = copies.withColumn("is_late", F.coalesce(before > F.col("at"), F.lit(False)))
    found = copies.groupBy(*IDENTITY).agg(
        F.count(F.lit(1)).alias("copies"),
        F.min("content").alias("lowest"),
        F.max("content").alias("highest"),
        F.max("is_late").alias("is_late"),
    )
    oldest = found.groupBy("partition", "cluster", "origin").agg(F.min("at").alias("oldest"))
    joined = expected.drop("offset").join(found, [*IDENTITY], "full_outer")
    joined = joined.join(oldest, ["partition", "cluster", "origin"], "left")
    ours = _is_of_source(question, kept)
    return joined.where(F.col("expected").isNotNull() | ours).withColumns(_judged(starts))


def _is_of_source(question: VerifyRequest, kept: Mapping[int, tuple[int, int]]) -> Column:
    """Whether a row at the target was published to the source, within what is compared: others may have come
    another way."""
    source = question.source
    conditions = [
        (F.col("partition") == partition)
        & (F.col("cluster") == source.cluster_name)
        & (F.col("origin") == origin_topic(source.cluster_id, source.topic_ids[partition]))
        & F.col("at").between(start, end - 1)
        for partition, (start, end) in kept.items()
    ]
    result = conditions[0]
    for condition in conditions[1:]:
        result = result | condition
    return result


def _judged(starts: Mapping[int, int]) -> dict[str, Column]:
    """What is wrong with a row, by kind of finding."""
    trimmed = F.col("partition").isin([partition for partition, start in starts.items() if start > 0])
    is_there = F.col("copies").isNotNull()
    is_expected = F.col("expected").isNotNull()
    is_expired = trimmed & ~is_there & (F.coalesce(F.col("at") < F.col("oldest"), F.lit(True)))
    differs = (F.col("lowest") != F.col("expected")) | (F.col("highest") != F.col("expected"))
    return {
        "compared": is_expected & is_there,
        "missing": is_expected & ~is_there & ~is_expired,
        "different": is_expected & is_there & differs,
        "repeated": is_there & (F.col("copies") > 1),
        "extra": is_there & ~is_expected,
        "out_of_order": is_there & F.col("is_late"),
        "expired": is_expected & is_expired,
    }


FINDINGS: Final = ("missing", "different", "repeated", "extra", "out_of_order")


def _counts() -> Iterator[Column]:
    for name in ("compared", *FINDINGS, "expired"):
        yield F.count_if(F.coalesce(F.col(name), F.lit(False))).alias(name)


def _examples(joined: DataFrame) -> DataFrame:
    """The first of each partition."""
    what = F.filter(
        F.array(*(F.when(F.col(name), F.lit(name)) for name in FINDINGS)), lambda name: name.isNotNull()
    )
    found = joined.select("partition", "cluster", "at", F.explode(what).alias("what"))
    first = F.row_number().over(Window.partitionBy("partition").orderBy("at", "what"))
    return found.withColumn("place", first).where(F.col("place") <= EXAMPLES).orderBy("partition", "place")
