"""Known ways to break rest, merging, holds and deletion, by the dangers that docs/design/storage.md names."""

from __future__ import annotations

from functools import partial

from tests.mutants.runner import Mutant

STORAGE = "sava/storage"
_Storage = partial(Mutant, tests=("tests/unit/storage",))

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
        f"{STORAGE}/merging.py",
        "        await store.delete([merged.key])\n        raise\n",
        "        raise\n",
    ),
    _Storage(
        "s4",
        "the objects of parts are deleted although nobody knows whether they were replaced",
        f"{STORAGE}/merging.py",
        "    except (SegmentConflict, TopicGone):\n",
        "    except OutcomeUnknown:\n        pass\n    except (SegmentConflict, TopicGone):\n",
        more=(
            (
                f"{STORAGE}/merging.py",
                "from sava.storage.catalog import Catalog\n",
                "from sava.metadata.errors import OutcomeUnknown\nfrom sava.storage.catalog import Catalog\n",
            ),
        ),
    ),
    _Storage(
        "s5",
        "what a merge has written and not named yet is swept",
        f"{STORAGE}/housekeeping.py",
        "        async with self._writing:\n            return len(",
        "        if True:\n            return len(",
    ),
    _Storage(
        "s6",
        "segments of any time are merged, so that retention keeps the old ones with the young",
        f"{STORAGE}/merging.py",
        " or _span_ms(longer) > max_span_ms",
        "",
    ),
    _Storage(
        "s7",
        "a byte is written again at every merge: small segments are merged into a large one",
        f"{STORAGE}/merging.py",
        "len(run) >= FEW and 2 * max(each.raw_bytes for each in run) <= _raw_bytes(run)",
        "len(run) >= FEW",
    ),
    _Storage(
        "s8",
        "a hold is looked at before the transaction, and is no condition of it",
        f"{STORAGE}/catalog.py",
        "        return (unchanged, *owned, hold.IS_NONE) if unless_held else (unchanged, *owned)\n",
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
        f"{STORAGE}/hold.py",
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
        "        await deleted.note(self._metadata, topic, now_ms=time.time_ns() // 1_000_000)\n",
        "",
        tests=("tests/unit/broker/test_topics.py",),
    ),
    _Storage(
        "s13",
        "a deletion that is repeated while the topic is swept loses its note",
        f"{STORAGE}/deleted.py",
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
)
