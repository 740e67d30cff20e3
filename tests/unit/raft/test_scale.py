"""Large logs, untimed: what a call does must not grow with the log behind it."""

from __future__ import annotations

from sava.raft import Append, CoreConfig, Entry
from tests.unit.raft.harness import N1, N2, Cluster, drain, entries_of, make_core, membership

CONFIG = CoreConfig(keep_entries=0, max_append_bytes=64 << 10)


class CountingList(list[Entry]):
    """A log that counts how many single entries are looked at."""

    looked_at = 0

    def __getitem__(self, key):
        if isinstance(key, int):
            CountingList.looked_at += 1
        return super().__getitem__(key)


def test_many_payloads_in_one_proposal_reach_everyone():
    cluster = Cluster(config=CONFIG)
    cluster.elect(1)
    payloads = [b"%08d" % n for n in range(20_000)]
    assert cluster.propose(1, *payloads) == range(2, 20_002)
    assert cluster[1].machine == cluster[2].machine == cluster[3].machine == payloads
    messages = [m for m in cluster.delivered if isinstance(m, Append) and m.dst == 2 and m.entries]
    assert len(messages) < 30, "batches, not single entries"


def test_cost_of_a_proposal_does_not_depend_on_the_length_of_the_log():
    """Nor does the cost of a rejection.

    Proposing looks at the new entries only; finding where two logs part is a binary search."""
    core = make_core(1, membership([1]), [1] * 20_000, term=1, commit=20_000, config=CONFIG)
    core.campaign()
    drain(core)
    log = core._state.log
    log._entries = CountingList(log._entries)
    CountingList.looked_at = 0
    core.propose([b"x"] * 10)
    drain(core)
    assert CountingList.looked_at < 100
    CountingList.looked_at = 0
    assert log.probe_point(15_000, 1) == 15_000
    follower = make_core(2, membership([1, 2, 3]), [1] * 20_000, term=3, config=CONFIG)
    held = follower._state.log
    held._entries = CountingList(held._entries)
    follower.step(Append(N1, N2, 3, 20_000, 2, (), 0))
    follower.step(Append(N1, N2, 3, 20_000, 1, entries_of([3] * 50, start=20_001), 0))
    drain(follower)
    assert CountingList.looked_at < 300
    assert follower.status().last_index == 20_050
