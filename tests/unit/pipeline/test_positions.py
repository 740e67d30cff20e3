"""Positions: equal ones are equal texts, whatever order they were made in."""

from __future__ import annotations

import json
import random

import pytest

from sava.pipeline.options import TopicPartition, partition_name, to_offsets, to_positions


def test_there_and_back() -> None:
    offsets = {TopicPartition("/a/b", 0): 7, TopicPartition("/a/c", 1): 0, TopicPartition("/a/c", 0): 12}
    assert to_positions(offsets) == {"/a/b": {"0": 7}, "/a/c": {"0": 12, "1": 0}}
    assert to_offsets(to_positions(offsets)) == offsets
    assert to_positions({}) == {}


def test_equal_positions_are_equal_texts() -> None:
    parts = [TopicPartition(topic, number) for topic in ("/x/b", "/x/a") for number in range(12)]
    texts = set()
    for seed in range(20):
        random.Random(seed).shuffle(parts)
        texts.add(json.dumps(to_positions({part: part.number for part in parts})))
    assert len(texts) == 1


@pytest.mark.parametrize(
    "positions", [{"/a/b": 1}, {"/a/b": {"x": 1}}, {"/a/b": {"0": "1"}}, {"/a/b": {"-1": 1}}]
)
def test_other_shapes_are_refused(positions: dict[str, dict[str, int]]) -> None:
    with pytest.raises(ValueError):
        to_offsets(positions)


def test_names_of_partitions() -> None:
    assert partition_name(TopicPartition("/default/orders", 3), partitioned=True) == "/default/orders-part-3"
    assert partition_name(TopicPartition("/default/orders", 0), partitioned=False) == "/default/orders"
