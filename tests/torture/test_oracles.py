"""The oracles against histories that are right, and against the same histories with one thing wrong: each
corruption is found by the oracle that is there for it, and by its name."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.torture import linearizability
from tests.torture.history import (
    Acked,
    Called,
    Caught,
    Event,
    Exited,
    Fault,
    Received,
    Recorder,
    Stored,
    Unsent,
    Watched,
    Watching,
    read,
)
from tests.torture.oracles import Finding, History, Judgement, judge
from tests.torture.report import gaps, longest_gap
from tests.torture.soak import LOG_ENTRIES, Sample, log_faults, lost, slopes

TOPIC, SHARED = "/default/orders", "/default/shared-name"
SUBSCRIPTIONS = [(TOPIC, kind) for kind in ("exclusive", "failover", "shared", "key_shared")]
COUNT = 40


def messages() -> list[Event]:
    """Two producers in turn; message 7 of the second failed for certain, number 9 is unknown and there."""
    events: list[Event] = []
    offset = 0
    for number in range(COUNT // 2):
        for producer in ("p0", "p1"):
            at, key = float(offset), f"k{number % 3}"
            if (producer, number) == ("p1", 7):
                events.append(Unsent(at, TOPIC, producer, number, False, "Timeout"))
                continue
            if (producer, number) == ("p1", 9):
                events.append(Unsent(at, TOPIC, producer, number, True, "OutcomeUnknown"))
            else:
                events.append(Acked(at, TOPIC, producer, number, offset))
            events.append(Stored(TOPIC, offset, producer, number, key))
            events.append(Stored(TOPIC, offset, producer, number, key, "west"))
            offset += 1
    return events


def deliveries(stored: Sequence[Stored]) -> list[Event]:
    """Each subscription gets all, and some a second time."""
    events: list[Event] = []
    for _, kind in SUBSCRIPTIONS:
        for each in stored:
            received = Received(
                *(float(each.offset), TOPIC, kind, "c0", each.offset, each.producer, each.number, each.key)
            )
            events.append(received)
            if each.offset % 10 == 3:
                events.append(received)
    return events


def generations() -> list[Event]:
    """Three producers of one name, one after the other."""
    events: list[Event] = []
    for offset in range(12):
        producer, number = f"z#{offset // 4 + 1}", offset % 4
        events.append(Acked(float(offset), SHARED, producer, number, offset))
        events.append(Stored(SHARED, offset, producer, number))
    return events


def registers() -> list[Event]:
    """What a store that answers one call at a time says to three clients whose calls overlap, and what two
    watchers see of it."""
    chance, revision, now = random.Random(5), 10, 0.0
    states: dict[str, tuple[str | None, int]] = {}
    calls: list[Event] = []
    changes: list[tuple[int, str, str | None]] = []
    for number in range(120):
        key, kind = f"/torture/r{number % 3}", chance.choice(("get", "put", "cas", "delete"))
        before, mod = states.get(key, (None, 0))
        value, expect = f"v{number}", mod if chance.random() < 0.7 else mod + 1
        expect = expect if kind == "cas" else 0
        outcome = "refused" if kind == "cas" and expect != mod else "ok"
        is_change = outcome == "ok" and (kind in ("put", "cas") or (kind == "delete" and before is not None))
        if is_change:
            revision += 1
            states[key] = (None, 0) if kind == "delete" else (value, revision)
            changes.append((revision, key, None if kind == "delete" else value))
        began, now = now + 0.1 * chance.random(), now + 1.0
        ended = now + 1.5 * chance.random()
        client = f"m{number % 3}"
        if is_change and number % 17 == 0:
            calls.append(Called(began, ended, client, kind, key, value, expect, "unknown", error="deadline"))
            continue
        calls.append(Called(began, ended, client, kind, key, value, expect, outcome, revision, before, mod))
    calls.append(Called(now, now + 1, "m0", "put", "/torture/r0", "lost", 0, "failed", error="Unavailable"))
    for watcher in ("w0", "w1"):
        calls.append(Watching(watcher, 10))
        calls += [Watched(watcher, *change) for change in changes]
        calls.append(Caught(watcher, revision))
    return calls


def sound() -> list[Event]:
    stored = messages()
    return [
        *stored,
        *deliveries([each for each in stored if isinstance(each, Stored) and not each.copy]),
        *generations(),
        *registers(),
        Fault(1.0, 2.0, 3.0, "kill", "b1"),
        Exited(4.0, "b2", 3, "its disk was wiped"),
    ]


def judged(events: Sequence[Event], *, limit_s: float = 10.0) -> Judgement:
    return judge(History(events), subscriptions=SUBSCRIPTIONS, copies=[TOPIC], limit_s=limit_s)


def found(events: Sequence[Event]) -> list[Finding]:
    return judged(events).findings


def test_a_sound_history_has_no_findings() -> None:
    assert found(sound()) == []


# -- corruptions -----------------------------------------------------------------------------------


def _is_stored(event: Event, offset: int, copy: str = "") -> bool:
    return isinstance(event, Stored) and (event.topic, event.offset, event.copy) == (TOPIC, offset, copy)


def _change(events: list[Event], which: Callable[[Event], bool], **fields: object) -> list[Event]:
    """The first event of that kind, with other fields."""
    position = next(number for number, event in enumerate(events) if which(event))
    events[position] = msgspec.structs.replace(events[position], **fields)
    return events


def _drop(events: list[Event], which: Callable[[Event], bool]) -> list[Event]:
    return [event for event in events if not which(event)]


def lose_the_last(events: list[Event]) -> list[Event]:
    last = max(event.offset for event in events if isinstance(event, Stored) and event.topic == TOPIC)
    return _drop(
        events,
        lambda event: isinstance(event, Stored | Received) and event.topic == TOPIC and event.offset == last,
    )


def lose_one(events: list[Event]) -> list[Event]:
    return _drop(events, lambda event: _is_stored(event, 5))


def store_another(events: list[Event]) -> list[Event]:
    return _change(events, lambda event: _is_stored(event, 5), number=999)


def acknowledge_elsewhere(events: list[Event]) -> list[Event]:
    return _change(events, lambda event: isinstance(event, Acked) and event.offset == 5, offset=6)


def store_what_failed(events: list[Event]) -> list[Event]:
    """The failed message takes the place of the unknown one, which may be missing."""
    return _change(
        events,
        lambda event: isinstance(event, Stored) and (event.producer, event.number) == ("p1", 9),
        number=7,
    )


def store_twice(events: list[Event]) -> list[Event]:
    end = max(event.offset for event in events if isinstance(event, Stored) and event.topic == TOPIC) + 1
    return [*events, Stored(TOPIC, end, "p0", 3, "k0")]


def swap_two(events: list[Event]) -> list[Event]:
    """Messages 3 and 4 of one producer change places, in the topic and in what was acknowledged."""
    places = {
        event.number: event.offset
        for event in events
        if isinstance(event, Acked) and event.topic == TOPIC and event.producer == "p0"
    }
    swapped: list[Event] = []
    for event in events:
        if isinstance(event, Acked | Stored) and (event.topic, event.producer) == (TOPIC, "p0"):
            offset = places[7 - event.number] if event.number in (3, 4) else event.offset
            swapped.append(msgspec.structs.replace(event, offset=offset))
        else:
            swapped.append(event)
    return swapped


def wake_a_zombie(events: list[Event]) -> list[Event]:
    """The second producer of the name gets a message in after the third has one."""
    return [*events, Acked(20.0, SHARED, "z#2", 4, 12), Stored(SHARED, 12, "z#2", 4)]


def wake_a_zombie_without_ack(events: list[Event]) -> list[Event]:
    return [*events, Unsent(20.0, SHARED, "z#2", 4, True, "under way"), Stored(SHARED, 12, "z#2", 4)]


def _of(kind: str, offset: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, Received) and (event.subscription, event.offset) == (kind, offset)


def never_deliver(events: list[Event]) -> list[Event]:
    return _drop(events, _of("shared", 8))


def deliver_another(events: list[Event]) -> list[Event]:
    return _change(events, _of("shared", 8), number=999)


def deliver_late(kind: str) -> Callable[[list[Event]], list[Event]]:
    """One message comes after all others."""

    def corrupt(events: list[Event]) -> list[Event]:
        late = [event for event in events if _of(kind, 8)(event)]
        return [*_drop(events, _of(kind, 8)), *late]

    return corrupt


def copy_twice(events: list[Event]) -> list[Event]:
    end = max(event.offset for event in events if isinstance(event, Stored) and event.copy) + 1
    return [*events, Stored(TOPIC, end, "p0", 3, "k0", "west")]


def copy_not(events: list[Event]) -> list[Event]:
    return _drop(events, lambda event: _is_stored(event, 5, "west"))


def copy_swapped(events: list[Event]) -> list[Event]:
    _change(events, lambda event: _is_stored(event, 5, "west"), offset=1000)
    _change(events, lambda event: _is_stored(event, 6, "west"), offset=5)
    return _change(events, lambda event: _is_stored(event, 1000, "west"), offset=6)


def _call(events: Sequence[Event], kind: str, *, later_than: float = 30.0, present: bool = False) -> Called:
    return next(
        event
        for event in events
        if isinstance(event, Called)
        and (event.kind, event.outcome) == (kind, "ok")
        and event.began > later_than
        and (event.seen is not None or not present)
    )


def read_stale(events: list[Event]) -> list[Event]:
    """A read shows the value that the key had before the one it has."""
    call = _call(events, "get", present=True)
    older = [
        event
        for event in events
        if isinstance(event, Called)
        and event.key == call.key
        and event.outcome == "ok"
        and event.kind in ("put", "cas")
        and event.revision < call.seen_mod
    ]
    return _change(events, lambda event: event is call, seen=older[-1].value, seen_mod=older[-1].revision)


def read_nothing(events: list[Event]) -> list[Event]:
    call = _call(events, "get", present=True)
    return _change(events, lambda event: event is call, seen=None, seen_mod=0)


def _seen_put(events: Sequence[Event]) -> tuple[Called, Called]:
    """A put of a key that existed, and a later call that shows its value."""
    puts = {event.value: event for event in events if isinstance(event, Called) and event.kind == "put"}
    return next(
        (puts[event.seen], event)
        for event in events
        if isinstance(event, Called) and event.seen in puts and puts[event.seen].seen is not None
    )


def lose_a_write(events: list[Event]) -> list[Event]:
    """A put that was acknowledged, and the next call of the key shows what was before it."""
    call, following = _seen_put(events)
    return _change(events, lambda event: event is following, seen=call.seen, seen_mod=call.seen_mod)


def swap_wrongly(events: list[Event]) -> list[Event]:
    """A cas succeeds though the key had another revision."""
    call = _call(events, "cas")
    return _change(events, lambda event: event is call, expect=call.expect + 1)


def refuse_wrongly(events: list[Event]) -> list[Event]:
    call = next(event for event in events if isinstance(event, Called) and event.outcome == "refused")
    return _change(events, lambda event: event is call, expect=call.seen_mod)


def apply_what_failed(events: list[Event]) -> list[Event]:
    call, _ = _seen_put(events)
    return _change(events, lambda event: event is call, outcome="failed", revision=0, seen=None, seen_mod=0)


def apply_twice(events: list[Event]) -> list[Event]:
    """A value is shown with two revisions."""
    call = _call(events, "get", present=True)
    return _change(events, lambda event: event is call, seen_mod=call.seen_mod + 1)


def go_back(events: list[Event]) -> list[Event]:
    """A read of a key that never existed comes from a state of long ago."""
    return [*events, Called(90.0, 91.0, "m0", "get", "/torture/never", "", 0, "ok", 12)]


def _watched(events: Sequence[Event], watcher: str, number: int) -> Watched:
    return [event for event in events if isinstance(event, Watched) and event.watcher == watcher][number]


def miss_a_change(events: list[Event]) -> list[Event]:
    missed = _watched(events, "w1", 7)
    return _drop(events, lambda event: event is missed)


def miss_the_last_change(events: list[Event]) -> list[Event]:
    missed = _watched(events, "w1", -1)
    return _drop(events, lambda event: event is missed)


def all_miss_a_change(events: list[Event]) -> list[Event]:
    """An acknowledged write that no watcher sees."""
    writes = {event.revision for event in events if isinstance(event, Called) and event.kind == "put"}
    revision = next(
        event.revision for event in events if isinstance(event, Watched) and event.revision in writes
    )
    return _drop(events, lambda event: isinstance(event, Watched) and event.revision == revision)


def see_twice(events: list[Event]) -> list[Event]:
    position = events.index(_watched(events, "w1", 7))
    return [*events[: position + 1], events[position], *events[position + 1 :]]


def see_in_another_order(events: list[Event]) -> list[Event]:
    first, second = events.index(_watched(events, "w1", 7)), events.index(_watched(events, "w1", 8))
    events[first], events[second] = events[second], events[first]
    return events


def see_another_value(events: list[Event]) -> list[Event]:
    seen = next(event for event in events if isinstance(event, Watched) and event.value is not None)
    return _change(events, lambda event: event is seen, value="other")


def see_what_failed(events: list[Event]) -> list[Event]:
    last = _watched(events, "w0", -1).revision
    events = _drop(events, lambda event: isinstance(event, Caught))
    for watcher in ("w0", "w1"):
        events += [Watched(watcher, last + 1, "/torture/r0", "lost"), Caught(watcher, last + 1)]
    return events


def never_catch_up(events: list[Event]) -> list[Event]:
    return _drop(events, lambda event: isinstance(event, Caught) and event.watcher == "w0")


def not_recover(events: list[Event]) -> list[Event]:
    return _change(events, lambda event: isinstance(event, Fault), recovered=0.0)


def end_by_itself(events: list[Event]) -> list[Event]:
    return _change(events, lambda event: isinstance(event, Exited), excuse="")


CORRUPTIONS: list[tuple[str, Callable[[list[Event]], list[Event]]]] = [
    ("loss", lose_the_last),
    ("loss", lose_one),
    ("hole", lose_one),
    ("loss", store_another),
    ("phantom", store_another),
    ("loss", acknowledge_elsewhere),
    ("phantom", store_what_failed),
    ("double", store_twice),
    ("order", swap_two),
    ("fencing", wake_a_zombie),
    ("fencing", wake_a_zombie_without_ack),
    ("delivery", never_deliver),
    ("delivery", deliver_another),
    ("skip", deliver_late("exclusive")),
    ("skip", deliver_late("failover")),
    ("key order", deliver_late("key_shared")),
    ("copy", copy_twice),
    ("copy", copy_not),
    ("copy", copy_swapped),
    ("register", read_stale),
    ("register", read_nothing),
    ("register", lose_a_write),
    ("register", swap_wrongly),
    ("register", refuse_wrongly),
    ("register", apply_what_failed),
    ("register", apply_twice),
    ("revision", go_back),
    ("watch", miss_a_change),
    ("watch", miss_the_last_change),
    ("watch", all_miss_a_change),
    ("watch", see_twice),
    ("watch", see_in_another_order),
    ("watch", see_another_value),
    ("watch", see_what_failed),
    ("watch", never_catch_up),
    ("recovery", not_recover),
    ("exit", end_by_itself),
]


@pytest.mark.parametrize(
    ("oracle", "corrupt"), CORRUPTIONS, ids=[f"{oracle}-{each.__name__}" for oracle, each in CORRUPTIONS]
)
def test_a_corruption_is_found(oracle: str, corrupt: Callable[[list[Event]], list[Event]]) -> None:
    assert oracle in {finding.oracle for finding in found(corrupt(sound()))}


def test_every_oracle_has_a_corruption_and_counts_what_it_checks() -> None:
    oracles = [each.oracle for each in judged(sound()).checked]
    assert set(oracles) == {oracle for oracle, _ in CORRUPTIONS}
    assert len(oracles) == len(set(oracles))
    assert judged(sound()).idle() == []


def test_counts_are_those_of_the_history() -> None:
    counts = {each.oracle: each.count for each in judged(sound()).checked}
    events = sound()
    stored = sum(isinstance(event, Stored) and not event.copy for event in events)
    assert counts["loss"] == sum(isinstance(event, Acked) for event in events)
    assert counts["phantom"] == counts["hole"] == stored
    assert counts["fencing"] == 12
    assert counts["delivery"] == sum(isinstance(event, Received) for event in events)
    assert counts["skip"] == 2 * counts["key order"] == counts["delivery"] // 2
    assert counts["copy"] == stored - 12
    assert counts["register"] == sum(isinstance(event, Called) for event in events)
    assert counts["watch"] == sum(isinstance(event, Watched) for event in events)


def test_an_oracle_that_has_nothing_to_check_is_a_finding() -> None:
    """No watcher ever got a stream: every watcher that there is has seen everything."""
    unwatched = _drop(sound(), lambda event: isinstance(event, Watching | Watched | Caught))
    assert found(unwatched) == []
    assert [each.where for each in judged(unwatched).idle()] == ["watch"]
    assert judged(unwatched).idle(but=["watch"]) == []


def test_a_producer_that_no_other_follows_is_not_a_check_of_fencing() -> None:
    alone = _drop(
        sound(), lambda event: isinstance(event, Acked | Stored) and event.producer in ("z#2", "z#3")
    )
    assert [each.where for each in judged(alone).idle()] == ["fencing"]


def test_a_late_delivery_of_a_shared_subscription_is_none() -> None:
    assert found(deliver_late("shared")(sound())) == []


# -- the search ------------------------------------------------------------------------------------


def put(began: float, ended: float, value: str, revision: int, *, seen: str | None, mod: int) -> Called:
    return Called(began, ended, "c", "put", "/k", value, 0, "ok", revision, seen, mod)


def get(began: float, ended: float, seen: str | None, mod: int) -> Called:
    return Called(began, ended, "c", "get", "/k", "", 0, "ok", mod, seen, mod)


def test_calls_that_overlap_may_take_effect_in_either_order() -> None:
    calls = [put(0, 10, "a", 2, seen="b", mod=1), put(1, 9, "b", 1, seen=None, mod=0), get(2, 3, "b", 1)]
    assert linearizability.check_key("/k", calls).is_linearizable


def test_a_read_may_not_see_what_began_after_it_ended() -> None:
    calls = [get(0, 1, "a", 1), put(2, 3, "a", 1, seen=None, mod=0)]
    assert not linearizability.check_key("/k", calls).is_linearizable


def test_a_write_of_unknown_outcome_may_take_effect_much_later() -> None:
    """It is seen by nobody, then by one, and from then on by all."""
    unknown = Called(0, 1, "c", "put", "/k", "a", 0, "unknown")
    calls = [unknown, get(2, 3, None, 0), get(4, 5, "a", 7)]
    assert linearizability.check_key("/k", calls).is_linearizable
    assert not linearizability.check_key("/k", [*calls, get(6, 7, None, 0)]).is_linearizable


def test_a_deletion_of_unknown_outcome_explains_that_nothing_is_there() -> None:
    first = put(0, 1, "a", 1, seen=None, mod=0)
    unknown = Called(2, 3, "c", "delete", "/k", "", 0, "unknown")
    assert linearizability.check_key(
        "/k", [first, unknown, get(4, 5, "a", 1), get(6, 7, None, 0)]
    ).is_linearizable
    assert not linearizability.check_key("/k", [first, get(6, 7, None, 0)]).is_linearizable


def test_what_cannot_be_decided_in_time_is_a_finding() -> None:
    calls = [put(number, 1000, f"v{number}", number + 1, seen=None, mod=0) for number in range(40)]
    verdict = linearizability.check_key("/k", calls, limit_s=0.0)
    assert not verdict.is_decided
    judgement = judged([*sound(), *calls], limit_s=0.0)
    assert Finding("register", "/k", "not decided within 0 s") in judgement.findings
    (register,) = [each for each in judgement.checked if each.oracle == "register"]
    assert "4 keys undecided" in register.what


def test_many_calls_at_a_time_are_decided_soon() -> None:
    """Six clients, 48 calls of one key, several of unknown outcome: a second is plenty."""
    chance, calls = random.Random(3), []
    before, mod = None, 0
    for revision, number in enumerate(range(48), 1):
        value = f"v{number}"
        began, ended = number - 3 * chance.random(), number + 3 * chance.random()
        if number % 6 == 5:
            calls.append(Called(began, ended, "c", "put", "/k", value, 0, "unknown"))
        else:
            calls.append(put(began, ended, value, revision, seen=before, mod=mod))
        before, mod = value, revision
    verdict = linearizability.check_key("/k", calls, limit_s=5.0)
    assert verdict.is_linearizable, verdict


# -- histories and gaps ----------------------------------------------------------------------------


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    """The last line of a killed process may be cut."""
    path = tmp_path / "history.jsonl"
    recorder = Recorder(path)
    for event in sound():
        recorder.add(event)
    recorder.close()
    with path.open("ab") as file:
        file.write(b'["acked",1.0,"/def')
    assert list(read(path)) == sound()


def test_the_longest_gap_reaches_over_the_ends_of_a_fault() -> None:
    times = [0.0, 1.0, 2.0, 7.0, 8.0, 20.0]
    assert longest_gap(times, 3.0, 6.0) == 4.0  # from the last ack before it up to its end
    assert longest_gap(times, 1.5, 8.0) == 5.0
    assert longest_gap(times, 21.0, 25.0) == 5.0
    assert longest_gap([], 3.0, 6.0) == 3.0


def test_gaps_are_told_by_kind() -> None:
    faults = [Fault(10.0, 12.0, 13.0, "kill", "b1"), Fault(30.0, 31.0, 31.5, "kill", "b2")]
    acks = [Acked(at / 2, TOPIC, "p0", at, at) for at in range(200) if not 20 < at < 26]
    (row,) = gaps(faults, {TOPIC: acks})
    assert (row.kind, row.faults, row.longest, row.topic) == ("kill", 2, 3.0, TOPIC)
    assert row.recovery_longest == 1.0


# -- the soak --------------------------------------------------------------------------------------


def soaked(leak_per_hour: float = 0.0, *, entries: int = 900, snapshot: int = 5000) -> list[Sample]:
    """An hour of one broker whose memory goes up and down by 8 MB, beside what it leaks."""
    chance = random.Random(2)
    return [
        Sample(
            float(at),
            "b1",
            {"memory": 100.0 + chance.uniform(-8, 8) + leak_per_hour * at / 3600, "descriptors": 80.0},
            entries,
            snapshot,
        )
        for at in range(0, 3600, 10)
    ]


def test_what_goes_up_and_down_is_flat() -> None:
    assert all(each.is_flat for each in slopes(soaked()))
    assert log_faults(soaked()) == []


def test_a_leak_is_found_and_its_slope_told() -> None:
    _, memory = slopes(soaked(80.0))
    assert not memory.is_flat
    assert memory.per_hour == pytest.approx(80.0, abs=5.0)


def test_caches_that_fill_in_the_warm_up_are_no_leak() -> None:
    samples = [
        msgspec.structs.replace(each, figures={"memory": min(100.0 + each.at, 500.0)}) for each in soaked()
    ]
    assert all(each.is_flat for each in slopes(samples))


def test_a_raft_log_without_snapshots_is_found() -> None:
    assert log_faults(soaked(snapshot=0))
    assert log_faults(soaked(entries=LOG_ENTRIES + 1))


def test_a_soak_finds_a_message_that_was_never_received(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "load.jsonl")
    for event in messages() + deliveries([each for each in messages() if isinstance(each, Stored)]):
        recorder.add(event)
    assert lost(tmp_path / "load.jsonl") == []
    recorder.add(Acked(50.0, TOPIC, "p0", 99, 1000))
    recorder.close()
    assert lost(tmp_path / "load.jsonl") == [f"{TOPIC}: not received: [1000]"]
