"""Sections of staged objects are read in pieces, and hold what they say or are refused."""

from __future__ import annotations

import time

import msgspec
import pytest

from sava.records import RecordBatch
from sava.storage import staging
from sava.storage.errors import ObjectMissing, StagedInvalid
from sava.storage.objectstore import ObjectStore
from sava.storage.staging import Manifest, Part, Section
from tests.support.objects import batch, section_of

PREFIX = staging.parts_prefix("w")


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore.open("memory://")


async def staged(
    store: ObjectStore, *batches: RecordBatch, name: str = "task", before: bytes = b""
) -> Section:
    data, section = section_of(f"{PREFIX}/{name}", len(before), batches)
    await store.put_new(section.key, before + data + b"what is for other topics")
    return section


def sizes(*counts: int, payload: int = 10) -> list[RecordBatch]:
    return [batch([b"%d" % number * payload] * count) for number, count in enumerate(counts)]


async def frames(store: ObjectStore, *sections: Section, skip: int = 0) -> list[list[int]]:
    return [[len(each) for each in group] async for group in staging.read_frames(store, sections, skip=skip)]


async def test_what_fits_into_one_frame_is_one(store: ObjectStore) -> None:
    first = await staged(store, *sizes(3, 4), name="a", before=b"something else")
    second = await staged(store, *sizes(5), name="b")
    assert await frames(store, first, second) == [[3, 4, 5]]


async def test_what_does_not_is_cut_between_batches(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = sizes(10, 10, 10, 100, 10)
    monkeypatch.setattr(staging, "FRAME_BYTES", 2 * batches[0].header.body_size)
    assert await frames(store, await staged(store, *batches)) == [[10, 10], [10], [100], [10]]


@pytest.mark.parametrize("piece", [1, 100, 300, 1000, 1 << 20])
async def test_a_section_is_the_same_in_any_pieces(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", piece)
    batches = sizes(1, 20, 3, 7)
    sections = [await staged(store, *batches[:3], name="a"), await staged(store, *batches[3:], name="b")]
    found = [each async for each in staging.read_batches(store, sections)]
    assert [each.verify().to_bytes() for each in found] == [each.to_bytes() for each in batches]


async def test_it_can_be_gone_on_with_behind_any_batch(store: ObjectStore) -> None:
    sections = [await staged(store, *sizes(3, 4), name="a"), await staged(store, *sizes(5, 6), name="b")]
    assert await frames(store, *sections, skip=3) == [[4, 5, 6]]
    assert await frames(store, *sections, skip=7) == [[5, 6]]
    assert await frames(store, *sections, skip=12) == [[6]]
    assert await frames(store, *sections, skip=18) == []
    with pytest.raises(StagedInvalid, match="not cut as they were"):
        await frames(store, *sections, skip=4)


async def test_sections_that_are_passed_over_need_not_be_there(store: ObjectStore) -> None:
    first, second = await staged(store, *sizes(3), name="a"), await staged(store, *sizes(4), name="b")
    await store.delete([first.key])
    assert await frames(store, first, second, skip=3) == [[4]]
    with pytest.raises(ObjectMissing):
        await frames(store, first, second)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"crc32c": 1}, "not those staged"),
        ({"messages": 8}, "hold 7 messages"),
        ({"end": 10_000}, "bytes"),
    ],
)
async def test_a_section_that_is_not_what_it_says_is_refused(
    store: ObjectStore, change: dict[str, int], why: str
) -> None:
    section = msgspec.structs.replace(await staged(store, *sizes(3, 4)), **change)
    with pytest.raises(StagedInvalid, match=why):
        await frames(store, section)


async def test_bytes_that_are_no_batches_are_refused(store: ObjectStore) -> None:
    section = await staged(store, *sizes(3))
    for start, end in ((section.start + 1, section.end), (section.start, section.end - 1)):
        with pytest.raises(StagedInvalid):
            await frames(store, msgspec.structs.replace(section, start=start, end=end))


@pytest.mark.parametrize(
    "key",
    [
        "topics/default/orders/1/x.parquet",
        "staging/parts/other/task",
        "staging/parts/w",
        "staging/parts/w/../other/task",
        "staging/parts/w//task",
        "staging/parts/w/./task",
        "staging/manifests/w/1.json",
        "/staging/parts/w/task",
        "staging/parts/w/a\nb",
    ],
)
def test_a_writer_can_name_only_what_is_its_own(key: str) -> None:
    with pytest.raises(StagedInvalid):
        staging.check_section("w", Section(key, 0, 10, 1, 1, 0))


@pytest.mark.parametrize("change", [{"start": 10}, {"messages": 0}])
def test_a_section_has_bytes_and_messages(change: dict[str, int]) -> None:
    section = Section(f"{PREFIX}/2026/task-1", 0, 10, 1, 1, 0)
    staging.check_section("w", section)
    with pytest.raises(StagedInvalid):
        staging.check_section("w", msgspec.structs.replace(section, **change))


async def test_a_manifest_is_read_as_it_was_written(store: ObjectStore) -> None:
    section = await staged(store, *sizes(3))
    manifest = Manifest(writer="w", batch=2**63, parts=(Part("/default/orders", 7, (section, section)),))
    key = staging.manifest_key("w", 3, "abc")
    await staging.put_manifest(store, key, manifest)
    assert await staging.get_manifest(store, key) == manifest
    assert manifest.keys == [section.key]
    assert manifest.parts[0].messages == 6


async def test_nothing_staged_is_nothing_to_list(tmp_path: object) -> None:
    for store in (ObjectStore.open("memory://"), ObjectStore.open(f"file://{tmp_path}/segments")):
        assert await staging.list_staged(store) == []
        before = time.time_ns() // 1_000_000
        assert abs(await staging.store_time_ms(store) - before) < 60_000
        assert await staging.list_staged(store) == []
