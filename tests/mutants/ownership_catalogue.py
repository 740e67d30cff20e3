"""Known ways to break moves and hand-overs, by the dangers that docs/design/ownership.md names."""

from __future__ import annotations

from functools import partial

from tests.mutants.runner import Mutant

_Move = partial(Mutant, tests=("tests/unit/cluster/test_moves.py",))
_HandOver = partial(Mutant, tests=("tests/unit/topics/test_hand_over.py",))

OWNERSHIP_MUTANTS: tuple[Mutant, ...] = (
    _Move(
        "o1",
        "a move begins without asking whether the owner can upload",
        "sava/cluster/moves.py",
        "            await self._prepare(owner, entry.name, timeout)\n",
        "            pass\n",
    ),
    Mutant(
        "o2",
        "a drain gives topics up whose object store is away for a while",
        "sava/cluster/drains.py",
        "        self._retries[name] = self._retries.get(name, (0, 0.0))[0], self._clock() + POSTPONED_S\n"
        "        self._todo.append(name)\n",
        "        self._retry(name, postponed.reason)\n",
        tests=("tests/unit/cluster/test_drains.py",),
    ),
    Mutant(
        "o3",
        "a move that was postponed uses up the moves of the hour",
        "sava/cluster/rebalancer.py",
        "            return replace(move, error=str(postponed))\n",
        "            error = str(postponed)\n",
        tests=("tests/unit/cluster/test_rebalancing.py",),
    ),
    _HandOver(
        "o4",
        "publishers are held for as long as a move may take",
        "sava/topics/topic.py",
        "            hold_s = min(HOLD_S, deadline - loop.time())\n",
        "            hold_s = deadline - loop.time()\n",
    ),
    _HandOver(
        "o5",
        "publishers are held while much is uploaded",
        "sava/topics/topic.py",
        "            if self.log is not None and not self.log.is_almost_stored:\n",
        "            if False and self.log is not None:\n",
    ),
    _HandOver(
        "o6",
        "a preparation does not look whether the store takes writes",
        "sava/storage/topic_log.py",
        "                await uploader.check_store()\n",
        "",
    ),
    _HandOver(
        "o7",
        "a preparation waits out its time although the upload has failed",
        "sava/storage/topic_log.py",
        "self._durable, is_patient=False)",
        "self._durable)",
    ),
    Mutant(
        "o8",
        "topics are assigned to a broker that is about to stop",
        "sava/cluster/planning.py",
        "    return found if found is not None and not found.is_leaving else None\n",
        "    return found\n",
        tests=("tests/unit/cluster/test_placement.py",),
    ),
    Mutant(
        "o9",
        "what was decided before a broker said that it leaves is written after it",
        "sava/cluster/planning.py",
        "                unchanged(records.registration_key(broker), registered.mod_revision),\n",
        "                present(records.registration_key(broker)),\n",
        tests=("tests/unit/cluster/test_placement.py",),
        more=(
            (
                "sava/cluster/planning.py",
                "from sava.metadata.records import RecordCorrupt, absent, encode, unchanged\n",
                "from sava.metadata.records import RecordCorrupt, absent, encode, present, unchanged\n",
            ),
        ),
    ),
    Mutant(
        "o10",
        "nothing is done about the topics of a broker that leaves",
        "sava/cluster/drains.py",
        "        return LEAVING if is_leaving else self._view.mode(broker)\n",
        "        return self._view.mode(broker)\n",
        tests=("tests/unit/cluster/test_drains.py",),
    ),
    Mutant(
        "o11",
        "a broker that lost its lease while it leaves comes back as one that stays",
        "sava/cluster/registration.py",
        "        return msgspec.structs.replace(self._describe(lease), is_leaving=self.is_leaving)\n",
        "        return msgspec.structs.replace(self._describe(lease), is_leaving=bool(self._is_written))\n",
        tests=("tests/unit/cluster/test_registration.py",),
    ),
    Mutant(
        "o12",
        "a mirror that is about to stop is kept although another is there",
        "sava/ledger/writer.py",
        "[each for each in registered if not each.is_leaving or each.storage == self.owner.own]",
        "registered",
        tests=("tests/unit/ledger/test_generations.py",),
    ),
    Mutant(
        "o13",
        "an owner that leaves does not look after its mirrors any more",
        "sava/ledger/writer.py",
        " if not each.is_leaving or each.storage == self.owner.own]",
        " if not each.is_leaving]",
        tests=("tests/unit/ledger/test_generations.py",),
    ),
    Mutant(
        "o14",
        "a second signal does not end the hand-over",
        "sava/server/process.py",
        "    await asyncio.wait((leaving, hurried), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)\n",
        "    await asyncio.wait((leaving,), timeout=timeout)\n",
        tests=("tests/unit/server/test_process.py",),
    ),
    Mutant(
        "o15",
        "a broker whose copy of the metadata stands still leaves its lease to expire",
        "sava/cluster/registration.py",
        "                    self._is_behind = True\n",
        "",
        tests=("tests/unit/cluster/test_registration.py",),
    ),
)
