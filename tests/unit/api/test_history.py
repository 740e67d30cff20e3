"""The last hour of a broker: rings, and sums of several brokers."""

from sava.api.history import EVERY_S, KEPT, Ring, Sample, together


def test_a_ring_keeps_the_last_hour() -> None:
    ring = Ring()
    for number in range(KEPT + 10):
        ring.put(Sample(number * EVERY_S + EVERY_S, number, 0, 1))
    samples = list(ring.samples())
    assert len(samples) == KEPT
    assert [each.messages_in for each in samples[:2]] == [10, 11]
    assert samples[-1] == Sample((KEPT + 10) * EVERY_S, KEPT + 9, 0, 1)


def test_a_time_without_a_sample_is_zero() -> None:
    ring = Ring()
    ring.put(Sample(1000, 7, 7, 7))
    ring.put(Sample(1015, 8, 8, 8))
    assert [each.messages_in for each in ring.samples()] == [7, 0, 0, 8]


def test_a_ring_that_slept_for_longer_than_it_keeps_has_no_old_samples() -> None:
    ring = Ring()
    ring.put(Sample(1000, 7, 7, 7))
    ring.put(Sample(1000 + 2 * KEPT * EVERY_S, 8, 8, 8))
    assert sum(each.messages_in for each in ring.samples()) == 8


def test_samples_of_several_brokers_are_added_by_time() -> None:
    one = [Sample(5, 1, 2, 3), Sample(10, 1, 2, 3)]
    other = [Sample(10, 10, 20, 30), Sample(15, 10, 20, 30)]
    assert together([one, other]) == [Sample(5, 1, 2, 3), Sample(10, 11, 22, 33), Sample(15, 10, 20, 30)]


def test_an_empty_ring_has_no_sample() -> None:
    assert list(Ring().samples()) == []
