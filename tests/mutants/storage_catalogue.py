"""Known ways to break rest, merging, holds and deletion, by the dangers that docs/design/storage.md names;
and the rule that the last open has a producer's name (docs/design/broker.md)."""

from __future__ import annotations

from functools import partial

from tests.mutants.runner import Mutant

STORAGE = "sava/storage"
_Storage = partial(Mutant, tests=("tests/unit/storage",))
_Epochs = partial(Mutant, tests=("tests/unit/storage/test_producer_epochs.py",))
_Names = partial(
    Mutant,
    tests=("tests/unit/topics/test_producers.py", "tests/unit/topics/test_last_open_random.py"),
)
_Client = partial(Mutant, tests=("tests/unit/client/test_producer.py",))

STORAGE_MUTANTS: tuple[Mutant, ...] = (
    _Storage(
        "s1",
        "a merge leaves the descriptors of its parts",
        f"{STORAGE}/catalog.py",
        "(Put(first, msgspec.json.encode(merged)), *map(Delete, others))",
        "(Put(first, msgspec.json.encode(merged)),)",
    ),
    _Storage(
        "s2",
        "a merge does not look whether its parts are still the topic's",
        f"{STORAGE}/catalog.py",
        "                if not await self._is_registered(part):\n",
        "                if False:\n",
    ),
    _Storage(
        "s3",
        "the object of a merge that came too late stays",
        f"{STORAGE}/maintenance.py",
        "        await store.delete([merged.key])\n        raise\n",
        "        raise\n",
    ),
    _Storage(
        "s4",
        "the objects of parts are deleted although nobody knows whether they were replaced",
        f"{STORAGE}/maintenance.py",
        "    except (SegmentConflict, TopicGone):\n",
        "    except OutcomeUnknown:\n        pass\n    except (SegmentConflict, TopicGone):\n",
        more=(
            (
                f"{STORAGE}/maintenance.py",
                "from sava.storage.catalog import Catalog\n",
                "from sava.metadata.errors import OutcomeUnknown\nfrom sava.storage.catalog import Catalog\n",
            ),
        ),
    ),
    _Storage(
        "s5",
        "what a merge has written and not named yet is swept",
        f"{STORAGE}/maintenance.py",
        "        async with self._writing:\n            return len(",
        "        if True:\n            return len(",
    ),
    _Storage(
        "s6",
        "segments of any time are merged, so that retention keeps the old ones with the young",
        f"{STORAGE}/maintenance.py",
        " or _span_ms(longer) > max_span_ms",
        "",
    ),
    _Storage(
        "s7",
        "a byte is written again at every merge: small segments are merged into a large one",
        f"{STORAGE}/maintenance.py",
        "len(run) >= MERGE_PARTS and 2 * max(each.raw_bytes for each in run) <= _raw_bytes(run)",
        "len(run) >= MERGE_PARTS",
    ),
    _Storage(
        "s8",
        "a hold is looked at before the transaction, and is no condition of it",
        f"{STORAGE}/catalog.py",
        "        return (unchanged, *owned, NOT_HELD) if unless_held else (unchanged, *owned)\n",
        "        return (unchanged, *owned)\n",
    ),
    _Storage(
        "s9",
        "retention drops segments that are held",
        f"{STORAGE}/catalog.py",
        "with_state=False, unless_held=True)",
        "with_state=False)",
    ),
    _Storage(
        "s10",
        "a hold that cannot be read is taken for one that is over",
        f"{STORAGE}/catalog.py",
        "        is_over = False  #",
        "        is_over = True  #",
    ),
    _Storage(
        "s11",
        "a topic rests while a message of it is on a disk, and nobody knows whether it counts",
        f"{STORAGE}/topic_log.py",
        " and not self._is_in_doubt\n",
        "\n",
        tests=("tests/unit/storage/test_commitment.py",),
    ),
    _Storage(
        "s12",
        "nobody looks again for what arrives of a deleted topic",
        f"{STORAGE}/broker_storage.py",
        "        await note_deleted(self._metadata, topic, now_ms=time.time_ns() // 1_000_000)\n",
        "",
        tests=("tests/unit/topics/test_topics.py",),
    ),
    _Storage(
        "s13",
        "a deletion that is repeated while the topic is swept loses its note",
        f"{STORAGE}/orphans.py",
        "metadata.txn((is_same,), (Delete(kv.key),))",
        "metadata.txn((), (Delete(kv.key),))",
    ),
    _Storage(
        "s14",
        "an object is accused that a merge is about to name",
        f"{STORAGE}/inspection.py",
        "info.modified_ms > young_from_ms or (",
        "(",
    ),
    _Epochs(
        "s15",
        "a producer whose name was opened again comes back with its lower number",
        f"{STORAGE}/producers.py",
        "        elif ask.presented > (current or table.floor):\n",
        "        elif ask.presented:\n",
    ),
    _Epochs(
        "s16",
        "a name that is forgotten lets every producer of it in",
        f"{STORAGE}/producers.py",
        "        floor = max(floor, *(number for _, number in forgotten))\n",
        "",
    ),
    _Epochs(
        "s17",
        "a producer that is connected is forgotten before one that is not",
        f"{STORAGE}/producers.py",
        "kept = {*in_use, *(ask",
        "kept = {*(ask",
    ),
    _Epochs(
        "s18",
        "opens are counted by name, so that a forgotten name gets a number twice",
        f"{STORAGE}/producers.py",
        "max(last, ask.above) + 1",
        "max(current, ask.above) + 1",
    ),
    _Epochs(
        "s19",
        "the next owner does not read which open was the last",
        f"{STORAGE}/topic_log.py",
        "ProducerEpochs(state.epochs, self._write_epochs)",
        "ProducerEpochs(type(state.epochs)(), self._write_epochs)",
    ),
    _Epochs(
        "s20",
        "an owner that was replaced gives numbers out",
        f"{STORAGE}/catalog.py",
        "            nonlocal granted\n            state = self._own(held, epoch)\n",
        "            nonlocal granted\n            assert (state := held.state) is not None\n",
    ),
    _Epochs(
        "s21",
        "a number is answered that is not in the topic's record",
        f"{STORAGE}/catalog.py",
        "            if granted.table == state.epochs:\n",
        "            if True:\n",
    ),
    _Names(
        "s22",
        "an open that was overtaken while it waited has the name all the same",
        "sava/topics/producers.py",
        "            if takeover and self._epochs.current(identity) > number:\n",
        "            if False:\n",
    ),
    _Names(
        "s23",
        "a producer that presents an older number than the current one continues",
        "sava/topics/producers.py",
        "        if current != presented:\n            raise self._fenced(name)\n        return presented\n",
        "        return current\n",
    ),
    _Names(
        "s24",
        "an open that is refused has fenced the producer that has the name",
        "sava/topics/producers.py",
        "            # An open that is refused must not fence the producer that has the name.\n"
        "            self._check_room(name, access)\n",
        "",
    ),
    _Names(
        "s25",
        "a topic that was created again counts opens from the beginning",
        "sava/topics/producers.py",
        "        return (self.spec.topic_id << TOPIC_BITS) + tenure\n",
        "        return tenure\n",
    ),
    _Client(
        "s26",
        "a client that comes back opens the name again",
        "sava/client/publish_stream.py",
        "            self._opening.producer_epoch = self.producer_epoch\n",
        "",
    ),
    _Client(
        "s27",
        "each partition decides by itself which producer is the later one",
        "sava/client/producer.py",
        "self._stream(partition, first.producer_epoch)",
        "self._stream(partition)",
    ),
    Mutant(
        "e1",
        "a broker whose clock jumps ahead deletes by it",
        "sava/storage/maintenance.py",
        "        return min(own_ms, store_ms)\n",
        "        return own_ms\n",
        tests=("tests/unit/topics/test_topics.py::TestRetention",),
    ),
    Mutant(
        "e2",
        "a broker whose clock is behind stamps its segments by it",
        "sava/storage/segment.py",
        "    if created_ms is None and stored_ms > segment.created_ms:\n",
        "    if False:\n",
        tests=("tests/unit/topics/test_topics.py::TestRetention",),
    ),
    Mutant(
        "e3",
        "an object store whose clock is ahead is believed alone",
        "sava/storage/maintenance.py",
        "        return min(own_ms, store_ms)\n",
        "        return store_ms\n",
        tests=("tests/unit/storage/test_expiry_clock.py",),
    ),
)
