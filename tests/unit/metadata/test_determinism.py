"""The same proposals lead to the same state, however a node came to it: I14, I15, and every hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from sava.metadata.commands import Proposal, Put, Txn, decode_proposal, encode
from sava.metadata.errors import SnapshotCorrupt, UnknownCommand
from sava.metadata.machine.image import CHUNK_BYTES
from sava.metadata.machine.state_machine import StateMachine
from tests.unit.metadata.workload import LIMITS, TERMS, proposals, run

ROOT = Path(__file__).parents[3]


def test_m25_the_hash_seed_of_the_interpreter_does_not_matter() -> None:
    """Danger: a set iterated while applying; its order differs between processes, so replicas differ."""
    seen = set()
    for hash_seed in ("0", "1", "4711"):
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(filter(None, reversed(paths))),
        }
        command = [sys.executable, "-m", "tests.unit.metadata.workload", "7", "3000"]
        seen.add(subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True).stdout)
    assert len(seen) == 1
    assert len(seen.pop()) == 32 + 64


@pytest.mark.parametrize("seed", range(8))
def test_i14_snapshot_and_tail_equal_live_equal_replay_from_empty(seed: int) -> None:
    """Danger (m15): something that later applies depend on is missing in the snapshot: sessions, revision,
    leases, counters, clock."""
    work = proposals(seed, 1_200)
    live = StateMachine(LIMITS)
    cuts = Random(seed).sample(range(len(work)), 6)
    images = {}
    rolling = {}
    for i, proposal in enumerate(work):
        if i in cuts:
            images[i] = live.freeze()
        rolling[i] = live.apply(proposal, TERMS[0])
    replayed = StateMachine(LIMITS)
    run(replayed, [decode_proposal(encode(proposal)) for proposal in work])
    assert replayed.digest() == live.digest()
    for cut, image in images.items():
        restored = StateMachine.restore(image.chunks(), LIMITS)
        assert restored.revision == image.revision
        for i in range(cut, len(work)):
            assert restored.apply(work[i], TERMS[0]) == rolling[i], f"seed {seed}, cut {cut}, entry {i}"
        assert restored.digest() == live.digest()


def test_i15_snapshot_bytes_are_equal_on_all_replicas_and_restored() -> None:
    work = proposals(99, 1_500)
    one, other = StateMachine(LIMITS), StateMachine(LIMITS)
    run(one, work)
    run(other, work[:700])
    other = StateMachine.restore(other.freeze().chunks(), LIMITS)
    run(other, work[700:])
    assert b"".join(one.freeze().chunks()) == b"".join(other.freeze().chunks())


def test_a_frozen_image_does_not_change_while_applies_go_on() -> None:
    """Danger: a snapshot written from the live map is torn: half of it is older than the other half."""
    machine = StateMachine(LIMITS)
    work = proposals(5, 1_000)
    run(machine, work[:500])
    expected = machine.digest()
    image = machine.freeze()
    chunks = image.chunks()
    written = [next(chunks)]
    run(machine, work[500:])
    written += chunks
    assert StateMachine.restore(written, LIMITS).digest() == expected == image.digest()
    assert machine.digest() != expected


def _large() -> StateMachine:
    machine = StateMachine()
    for i, size in enumerate((10, 70_000, 200, 1 << 20, 0, *([300] * 1_000))):
        machine.apply(Proposal(Txn(then=(Put(f"/k/{i}", bytes([i % 251]) * size),))), 1)
    return machine


@pytest.mark.parametrize("piece", [1 << 20, 7_919, CHUNK_BYTES])
def test_chunks_are_small_and_may_be_cut_anew(piece: int) -> None:
    machine = _large()
    chunks = list(machine.freeze().chunks())
    assert max(map(len, chunks)) <= CHUNK_BYTES
    stream = b"".join(chunks)
    cut = [stream[i : i + piece] for i in range(0, len(stream), piece)]
    assert StateMachine.restore(cut).digest() == machine.digest()


def test_an_empty_machine_has_an_image() -> None:
    assert StateMachine.restore(StateMachine().freeze().chunks()).digest() == StateMachine().digest()


def _image(seed: int = 3) -> bytes:
    machine = StateMachine(LIMITS)
    run(machine, proposals(seed, 400))
    return b"".join(machine.freeze().chunks())


def test_every_cut_of_an_image_is_refused() -> None:
    stream = _image()
    for end in range(0, len(stream), 13):
        with pytest.raises(SnapshotCorrupt):
            StateMachine.restore([stream[:end]])
    with pytest.raises(SnapshotCorrupt):
        StateMachine.restore([stream, b"\0"])
    with pytest.raises(SnapshotCorrupt):
        StateMachine.restore([stream, stream])


def test_every_flipped_byte_of_an_image_is_refused() -> None:
    stream = bytearray(_image())
    rng = Random(1)
    for position in range(len(stream)):
        flipped = 1 << rng.randrange(8)
        stream[position] ^= flipped
        with pytest.raises(SnapshotCorrupt):
            StateMachine.restore([bytes(stream)])
        stream[position] ^= flipped


def test_garbage_is_refused_by_type_and_without_harm() -> None:
    rng = Random(2)
    valid = [encode(proposal) for proposal in proposals(11, 300)]
    for i in range(3_000):
        garbage = bytearray(rng.randbytes(rng.randrange(60)) if i % 3 == 0 else rng.choice(valid))
        for _ in range(rng.randrange(4)):
            if garbage:
                garbage[rng.randrange(len(garbage))] = rng.randrange(256)
        with pytest.raises(SnapshotCorrupt):
            StateMachine.restore([bytes(garbage)])
        _apply_or_refuse(bytes(garbage))


def _apply_or_refuse(data: bytes) -> None:
    """What can be decoded can be applied, snapshotted and restored, however odd; what cannot has its own
    error."""
    try:
        proposal = decode_proposal(data)
    except UnknownCommand:
        return
    machine = StateMachine(LIMITS)
    run(machine, [*proposals(1, 20), proposal])
    assert StateMachine.restore(machine.freeze().chunks(), LIMITS).digest() == machine.digest()


def test_deeply_nested_garbage_does_not_exhaust_the_stack() -> None:
    for depth in (100, 100_000):
        with pytest.raises(UnknownCommand):
            decode_proposal(b"\x91" * depth)
        with pytest.raises(SnapshotCorrupt):
            StateMachine.restore([b"\x01" + depth.to_bytes(4, "big") + b"\x91" * depth])
