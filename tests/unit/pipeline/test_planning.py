"""Planning: every offset in exactly one task, and tasks that are worth one."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from sava.pipeline.options import TopicPartition
from sava.pipeline.source.planning import TASK_BYTES, Piece, admit, prorate, read_tasks


def piece(number: int, start: int, end: int, message_bytes: float = 100.0) -> Piece:
    return Piece(
        TopicPartition("/default/t", number), f"/default/t-part-{number}", start, end, None, message_bytes
    )


def covered(tasks: list[list[Piece]]) -> dict[int, list[tuple[int, int]]]:
    """What is read of each partition, neighbours joined."""
    found: dict[int, list[tuple[int, int]]] = {}
    for each in sorted((each for task in tasks for each in task), key=lambda each: (each.part, each.start)):
        ranges = found.setdefault(each.part.number, [])
        if ranges and ranges[-1][1] == each.start:
            ranges[-1] = (ranges[-1][0], each.end)
        else:
            ranges.append((each.start, each.end))
    return found


def test_nothing_is_no_task() -> None:
    assert read_tasks([], "", cores=4) == []


def test_a_tiny_batch_is_one_task_however_many_partitions_it_has() -> None:
    tasks = read_tasks([piece(number, 5, 15) for number in range(8)], "", cores=4)
    assert len(tasks) == 1
    assert covered([list(tasks[0].pieces)]) == {number: [(5, 15)] for number in range(8)}


def test_a_larger_one_has_a_task_for_each_core() -> None:
    tasks = read_tasks([piece(0, 0, 100_000), piece(1, 0, 100_000)], "", cores=4)
    assert [sum(each.end - each.start for each in task.pieces) for task in tasks] == [50_000] * 4


def test_no_task_reads_more_than_its_bytes() -> None:
    tasks = read_tasks([piece(0, 0, 10_000_000)], "", cores=2)
    assert len(tasks) == -(-10_000_000 * 100 // TASK_BYTES)


def test_the_user_can_ask_for_more() -> None:
    assert len(read_tasks([piece(0, 0, 8)], "", min_partitions=5, cores=2)) == 5
    assert len(read_tasks([piece(0, 0, 3)], "", min_partitions=5, cores=2)) == 3


@example(sizes=[(1, 100.0), (2, 2e7), (3, 1.0)], min_partitions=6, cores=2)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 50_000), st.sampled_from([1.0, 100.0, 3_000.0, 2e7])),
        min_size=1,
        max_size=12,
    ),
    min_partitions=st.integers(0, 40),
    cores=st.integers(1, 16),
)
def test_every_offset_is_in_one_task(sizes: list[tuple[int, float]], min_partitions: int, cores: int) -> None:
    pieces = [piece(number, 3, 3 + rows, size) for number, (rows, size) in enumerate(sizes)]
    tasks = [
        list(share.pieces) for share in read_tasks(pieces, "", min_partitions=min_partitions, cores=cores)
    ]
    assert covered(tasks) == {number: [(3, 3 + rows)] for number, (rows, _) in enumerate(sizes)}
    assert sum(each.end - each.start for task in tasks for each in task) == sum(rows for rows, _ in sizes)
    assert all(tasks)


# -- admission ---------------------------------------------------------------------------


def parts(*counts: int) -> dict[TopicPartition, int]:
    return {TopicPartition("/default/t", number): count for number, count in enumerate(counts)}


def test_a_limit_is_shared_by_what_is_available() -> None:
    assert admit(parts(100, 300, 0), max_messages=40) == {
        TopicPartition("/default/t", 0): 10,
        TopicPartition("/default/t", 1): 30,
    }
    assert admit(parts(5, 6), max_messages=40) == parts(5, 6)
    assert admit(parts(5, 6)) == parts(5, 6)


def test_whoever_has_something_gets_something() -> None:
    assert admit(parts(1_000_000, 1), max_messages=10) == parts(9, 1)
    assert admit(parts(9, 9, 9), max_messages=2) == parts(1, 1, 1)
    assert admit(parts(50, 50), max_bytes=1, message_bytes=lambda part: 1_000.0) == parts(1, 1)


def test_bytes() -> None:
    assert admit(parts(1_000, 1_000), max_bytes=10_000, message_bytes=lambda part: 100.0) == parts(50, 50)
    assert admit(parts(10, 10), max_bytes=10_000, message_bytes=lambda part: 100.0) == parts(10, 10)


def test_both_limits_hold() -> None:
    both = admit(parts(1_000), max_messages=20, max_bytes=10_000, message_bytes=lambda part: 1_000.0)
    assert both == parts(10)
    both = admit(parts(1_000), max_messages=5, max_bytes=10_000, message_bytes=lambda part: 1_000.0)
    assert both == parts(5)


@given(counts=st.lists(st.integers(1, 10_000), min_size=1, max_size=20), limit=st.integers(1, 50_000))
def test_shares_of_a_limit_add_up_to_it(counts: list[int], limit: int) -> None:
    wanted = parts(*counts)
    given = prorate(wanted, limit)
    assert sum(given.values()) == min(sum(counts), max(limit, len(counts)))
    assert all(1 <= given[part] <= wanted[part] for part in wanted)
