"""What becomes of batches in flight when a stream ends and the next one opens."""

from __future__ import annotations

from sava.client.errors import ClientError, DuplicateForgotten, OutcomeUnknown, Refused
from sava.client.outgoing import UNKNOWN_OFFSET, ProducerBatch, SendWindow, Stamp
from sava.records import RecordBatch

PRODUCER = 7
REFUSED = Refused("too large", "message_too_large")
FORGOTTEN = DuplicateForgotten("appended long ago")


class Flight:
    """A window and what it has told."""

    def __init__(self, *, first: int = 0) -> None:
        self.told: list[tuple[str, int | type[ClientError]]] = []
        self.window = SendWindow(succeed=self._succeed, fail=self._fail)
        self.window.resume(producer_id=PRODUCER, expected=first, reliable=True, ended_with=None)

    def _succeed(self, batch: ProducerBatch, offset: int) -> None:
        self.told.append((batch.payloads[0].decode(), offset))
        batch.succeed(offset)

    def _fail(self, batch: ProducerBatch, error: ClientError) -> None:
        self.told.append((batch.payloads[0].decode(), type(error)))
        batch.fail(error)

    def send(self, *names: str, rows: int = 10, was_sent: bool = True) -> list[ProducerBatch]:
        batches = []
        for name in names:
            batch = ProducerBatch(ready_at=0, deadline=0)
            batch.payloads = [name.encode()] * rows
            self.window.push(batch)
            batch.encode(Stamp("p"), PRODUCER)
            batch.was_sent = was_sent
            batches.append(batch)
        return batches

    def resume(
        self,
        expected: int,
        ended_with: ClientError | None = None,
        *,
        producer_id: int = PRODUCER,
        reliable: bool = True,
    ) -> list[tuple[str, int]]:
        """The names and sequences of what is to be sent now."""
        self.window.resume(
            producer_id=producer_id, expected=expected, reliable=reliable, ended_with=ended_with
        )
        return self.sequences()

    def sequences(self) -> list[tuple[str, int]]:
        for batch in self.window.batches:
            header = RecordBatch.parse(batch.encode(Stamp("p"), self.window.producer_id)).header
            assert header.base_sequence == batch.base_sequence
            assert header.producer_id == self.window.producer_id
        return [(batch.payloads[0].decode(), batch.base_sequence) for batch in self.window.batches]


def test_receipts_settle_batches_in_order() -> None:
    flight = Flight()
    flight.send("a", "b")
    flight.window.receipt(0, 700)
    flight.window.receipt(10, 710)
    assert flight.told == [("a", 700), ("b", 710)]
    assert len(flight.window) == 0


def test_batches_with_lost_receipts_are_sent_again_with_their_sequences() -> None:
    flight = Flight(first=20)
    flight.send("a", "b", "c")
    assert flight.resume(expected=40) == [("a", 20), ("b", 30), ("c", 40)]
    assert flight.told == []
    assert flight.window.next_sequence == 50


def test_a_broker_that_has_all_or_nothing_of_the_window_changes_nothing() -> None:
    for expected in (0, 20):
        flight = Flight()
        flight.send("a", "b")
        assert flight.resume(expected) == [("a", 0), ("b", 10)]


def test_a_refused_batch_fails_alone_and_those_behind_it_close_the_gap() -> None:
    flight = Flight()
    flight.send("a", "wrong", "b", "c")
    assert flight.resume(expected=10, ended_with=REFUSED) == [("a", 0), ("b", 10), ("c", 20)]
    assert flight.told == [("wrong", Refused)]
    assert flight.window.next_sequence == 30


def test_the_refusal_of_the_first_batch_of_a_stranger() -> None:
    flight = Flight()
    flight.send("wrong", "a")
    assert flight.resume(expected=0, ended_with=REFUSED) == [("a", 0)]
    assert flight.told == [("wrong", Refused)]


def test_a_refusal_that_belongs_to_no_batch_blames_none() -> None:
    flight = Flight()
    flight.send("a")
    assert flight.resume(expected=10, ended_with=REFUSED) == [("a", 0)]
    assert flight.told == []


def test_a_broker_that_forgot_the_producer_leaves_the_outcome_unknown() -> None:
    flight = Flight(first=20)
    flight.send("a", "b")
    flight.send("c", was_sent=False)
    assert flight.resume(expected=0) == [("c", 0)]
    assert flight.told == [("a", OutcomeUnknown), ("b", OutcomeUnknown)]


def test_a_sequence_in_or_beyond_the_window_means_another_used_the_name() -> None:
    for expected in (15, 31):
        flight = Flight()
        flight.send("a", "b", "c")
        assert flight.resume(expected) == []
        assert {outcome for _, outcome in flight.told} == {OutcomeUnknown}
        assert flight.window.next_sequence == expected


def test_a_new_producer_id_is_a_new_memory() -> None:
    flight = Flight()
    flight.send("a")
    flight.send("b", was_sent=False)
    assert flight.resume(expected=0, producer_id=8) == [("b", 0)]
    assert flight.told == [("a", OutcomeUnknown)]


def test_offsets_that_the_broker_forgot_are_unknown_but_stored() -> None:
    flight = Flight()
    flight.send("a", "b", "c")
    assert flight.resume(expected=20, ended_with=FORGOTTEN) == [("b", 10), ("c", 20)]
    assert flight.told == [("a", UNKNOWN_OFFSET)]
    assert flight.resume(expected=20, ended_with=FORGOTTEN) == [("c", 20)]
    assert flight.told == [("a", UNKNOWN_OFFSET), ("b", UNKNOWN_OFFSET)]


def test_a_batch_whose_time_was_up_is_not_sent_again_and_leaves_no_hole() -> None:
    flight = Flight()
    late, _ = flight.send("late", "a")
    late.fail(OutcomeUnknown("no receipt came"))
    assert flight.resume(expected=0) == [("a", 0)]
    # If the broker has it after all, its sequences are taken.
    flight = Flight()
    late, _ = flight.send("late", "a")
    late.fail(OutcomeUnknown("no receipt came"))
    assert flight.resume(expected=10) == [("a", 10)]


def test_without_reliability_nothing_is_sent_twice() -> None:
    flight = Flight()
    flight.send("wrong", "a")
    flight.send("b", was_sent=False)
    assert flight.resume(expected=0, ended_with=REFUSED, reliable=False) == [("b", 0)]
    assert flight.told == [("wrong", Refused), ("a", OutcomeUnknown)]


def test_without_reliability_a_topic_that_has_moved_gets_what_was_refused() -> None:
    flight = Flight(first=100)
    flight.send("a", "b", "c")
    flight.window.receipt(100, 5)
    flight.window.refuse_all()
    assert flight.resume(0, reliable=False) == [("b", 0), ("c", 10)]
    assert flight.told == [("a", 5)]
