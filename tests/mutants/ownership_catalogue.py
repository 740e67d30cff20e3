"""Known ways to break moves and hand-overs, by the dangers that docs/design/ownership.md names."""

from __future__ import annotations

from functools import partial

from tests.mutants.runner import Mutant

_Move = partial(Mutant, tests=("tests/unit/cluster/test_moves.py",))
_HandOver = partial(Mutant, tests=("tests/unit/broker/test_hand_over.py",))

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
        "sava/cluster/rounds.py",
        "            return replace(move, error=str(postponed))\n",
        "            error = str(postponed)\n",
        tests=("tests/unit/cluster/test_rebalancing.py",),
    ),
    _HandOver(
        "o4",
        "publishers are held for as long as a move may take",
        "sava/broker/topic.py",
        "            hold_s = min(HOLD_S, deadline - loop.time())\n",
        "            hold_s = deadline - loop.time()\n",
    ),
    _HandOver(
        "o5",
        "publishers are held while much is uploaded",
        "sava/broker/topic.py",
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
)
