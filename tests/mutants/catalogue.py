"""The mutants m1–m32 (see docs/testing.md), in the words of this code base.

Each replaces one piece of text that stands exactly once in its file. When the code changes so that the text
is gone, the runner says so: adapt the mutant, and keep its danger."""

from __future__ import annotations

from tests.mutants.runner import Mutant

RAFT = "sava/raft"
META = "sava/metadata"

MUTANTS = (
    Mutant(
        "m1",
        "a vote is answered before it is durable",
        f"{RAFT}/election.py",
        "    state.reply(VoteReply(state.node, message.src, state.term, granted))\n",
        "    state.send(VoteReply(state.node, message.src, state.term, granted))\n",
        seeds=20,
    ),
    Mutant(
        "m2",
        "the own vote counts before it is durable",
        f"{RAFT}/election.py",
        "            state.send_when_durable(_vote_request(state, peer, state.term, pre=False, "
        "transfer=transfer))\n",
        "            state.send(_vote_request(state, peer, state.term, pre=False, transfer=transfer))\n"
        "    state.votes[state.node] = True\n",
        seeds=100,
    ),
    Mutant(
        "m3",
        "entries are acknowledged before they are durable",
        f"{RAFT}/state.py",
        "        if index <= self.log.durable and self.is_ballot_durable:\n",
        "        if self.is_ballot_durable:\n",
        seeds=20,
    ),
    Mutant(
        "m4",
        "an entry of an older term is committed by counting (Figure 8)",
        f"{RAFT}/leading.py",
        "    if index <= log.commit or log.term(index) != state.term:\n",
        "    if index <= log.commit:\n",
        seeds=120,
    ),
    Mutant(
        "m5",
        "an append that ends earlier cuts off the rest of the log",
        f"{RAFT}/following.py",
        "    if position == len(entries):\n        return\n",
        "    if position == len(entries):\n"
        "        end = prev_index + len(entries)\n"
        "        if entries and log.commit <= end < log.last_index:\n"
        "            log.truncate_from(end + 1)\n"
        "            if state.history.truncate_from(end + 1):\n"
        "                state.membership_changed()\n"
        "        return\n",
        seeds=150,
    ),
    Mutant(
        "m6",
        "the term of the previous entry is not compared",
        f"{RAFT}/following.py",
        "    elif log.matches(message.prev_index, message.prev_term):\n",
        "    elif log.compacted_index <= message.prev_index <= log.last_index:\n",
        seeds=300,
    ),
    Mutant(
        "m7",
        "a heartbeat carries the leader's commit index as it is",
        f"{RAFT}/replication.py",
        "            told = min(progress.match, commit)\n",
        "            told = commit\n",
        seeds=20,
    ),
    Mutant(
        "m8",
        "learners count for the majority",
        f"{RAFT}/quorum.py",
        "    index = majority_index(membership.voters, reached)\n",
        "    index = majority_index((*membership.voters, *membership.learners), reached)\n",
        seeds=120,
    ),
    Mutant(
        "m9",
        "a joint configuration decides by its new half alone",
        f"{RAFT}/quorum.py",
        "        index = min(index, majority_index(membership.outgoing, reached))\n",
        "        pass\n",
        seeds=400,
    ),
    Mutant(
        "m10",
        "membership changes before an entry of the own term is committed",
        f"{RAFT}/reconfigure.py",
        "    if not has_committed_own_term(state):\n        raise MembershipBusy",
        "    if False:\n        raise MembershipBusy",
        seeds=150,
        tests=("tests/unit/raft",),
    ),
    Mutant(
        "m11",
        "truncation does not bring the previous configuration back",
        f"{RAFT}/following.py",
        "        changed = state.history.truncate_from(news[0].index)\n",
        "        changed = False\n",
        seeds=200,
        tests=("tests/unit/raft",),
    ),
    Mutant(
        "m12",
        "a restart follows the last committed configuration",
        f"{RAFT}/state.py",
        "        after_snapshot = self.log.between(recovered.snapshot.index + 1, self.log.last_index + 1)\n",
        "        after_snapshot = self.log.between(recovered.snapshot.index + 1, self.log.commit + 1)\n",
        seeds=20,
        tests=("tests/unit/raft",),
    ),
    Mutant(
        "m13",
        "a voter refuses a candidate that its own configuration does not name",
        f"{RAFT}/election.py",
        "    is_free = state.vote == message.src or",
        "    if message.src not in state.members:\n        return\n"
        "    is_free = state.vote == message.src or",
        tests=("tests/unit/raft",),
    ),
    Mutant(
        "m14",
        "a snapshot replaces a log that holds more",
        f"{RAFT}/snapshot.py",
        "    if state.log.matches(meta.index, meta.term):\n",
        "    if False:\n",
        tests=("tests/unit/raft",),
    ),
    Mutant(
        "m15",
        "a snapshot forgets the answers that sessions remember",
        f"{META}/machine/image.py",
        "x.low, sorted(x.responses.items()))),\n",
        "x.low, [])),\n",
        seeds=40,
    ),
    Mutant(
        "m15b",
        "a snapshot forgets the generations of leases",
        f"{META}/machine/image.py",
        "        self.leases.add(Lease(x.lease, x.ttl_ms, x.generation, []))\n",
        "        self.leases.add(Lease(x.lease, x.ttl_ms, 1, []))\n",
        seeds=60,
    ),
    Mutant(
        "m16",
        "the log is compacted before the snapshot is durable",
        f"{META}/replica/compaction.py",
        "        self._saver.save(base, machine.freeze(), self._saved)\n",
        "        self._saver.save(base, machine.freeze(), self._saved)\n        core.snapshot_taken(base)\n",
        seeds=20,
    ),
    Mutant(
        "m17",
        "a completion counts for entries that were cut off meanwhile",
        f"{RAFT}/log.py",
        "        for write in self._writes:\n            write[1] = min(write[1], index - 1)\n",
        "",
        seeds=60,
        tests=("tests/unit/raft",),
    ),
    Mutant(
        "m18",
        "a new leader answers reads before its first entry is committed",
        f"{RAFT}/leading.py",
        "    if has_committed_own_term(state):\n        state.reads.confirm_later",
        "    if True:\n        state.reads.confirm_later",
        seeds=150,
        tests=("tests/unit/raft",),
    ),
    Mutant(
        "m19",
        "a read is confirmed by answers to heartbeats sent before it came",
        f"{RAFT}/leading.py",
        "        state.reads.confirm_later(token, state.log.commit, state.round + 1)\n",
        "        rounds = {node: progress.round for node, progress in state.progress.items()}\n"
        "        if 0 < state.round - 1 <= quorum_index(state.membership, rounds):\n"
        "            state.outbox.reads_ready.append(ReadReady(token, state.log.commit))\n"
        "        else:\n"
        "            state.reads.confirm_later(token, state.log.commit, state.round + 1)\n",
        seeds=150,
        tests=("tests/unit/raft",),
        more=(
            (
                f"{RAFT}/leading.py",
                "from sava.raft.output import Role\n",
                "from sava.raft.output import ReadReady, Role\n",
            ),
        ),
    ),
    Mutant(
        "m20",
        "a leader whose disk takes nothing leads on",
        f"{RAFT}/leading.py",
        "    if (to := next_leader(state)) != NO_NODE and state.transferee == NO_NODE:\n",
        "    if (to := NO_NODE) != NO_NODE and state.transferee == NO_NODE:\n",
        tests=("tests/unit/metadata/test_replica_disk.py",),
    ),
    Mutant(
        "m20b",
        "a leader whose disk takes nothing leaves a cluster that cannot do without it",
        f"{RAFT}/own_disk.py",
        "    if durable != state.disk_end or durable >= state.log.commit:\n",
        "    if durable != state.disk_end or durable >= state.log.last_index:\n",
        tests=("tests/unit/metadata/test_replica_disk.py",),
    ),
    Mutant(
        "m20c",
        "it hands over to one whose disk takes nothing either",
        f"{RAFT}/own_disk.py",
        "        if progress.match > durable and progress.recently_active",
        "        if progress.recently_active",
        tests=("tests/unit/metadata/test_replica_disk.py",),
    ),
    Mutant(
        "m20d",
        "a sync that takes long is a reason to leave",
        f"{RAFT}/own_disk.py",
        "    turn, rest = divmod(state.disk_elapsed, PATIENCE * state.config.election_ticks)\n",
        "    turn, rest = divmod(state.disk_elapsed, 1)\n",
        tests=("tests/unit/metadata/test_replica_disk.py",),
    ),
    Mutant(
        "m21",
        "a lease expires although it was touched meanwhile",
        f"{META}/machine/state_machine.py",
        "        if found is None or found.generation != generation:\n",
        "        if found is None:\n",
        seeds=60,
        tests=("tests/unit/metadata/test_leases.py",),
    ),
    Mutant(
        "m22",
        "entries below the snapshot are applied again after a restart",
        f"{RAFT}/log.py",
        "        self.commit = max(snapshot.index, min(commit, self.last_index))\n"
        "        self.applied = self.handed_out = snapshot.index\n",
        "        self.commit = max(snapshot.index, min(commit, self.last_index))\n"
        "        self.applied = self.handed_out = self.compacted_index\n",
        seeds=60,
        more=(
            (
                f"{META}/replica/applier.py",
                "            if index != self.index + 1:\n",
                "            if index > self.index + 1:\n",
            ),
        ),
    ),
    Mutant(
        "m23",
        "compare-and-swap does not see every change (lost update)",
        f"{META}/machine/transaction.py",
        "            return kv.mod_revision\n",
        "            return kv.create_revision\n",
        seeds=60,
    ),
    Mutant(
        "m24",
        "a watch begins at 'now' and misses what came after the read",
        f"{META}/watch.py",
        "        start = from_revision or self._revision + 1\n",
        "        start = self._revision + 1\n",
        seeds=60,
    ),
    Mutant(
        "m25",
        "applying iterates over a set of strings",
        f"{META}/machine/transaction.py",
        "        for key in sorted(self._pending):\n",
        "        for key in set(self._pending):\n",
        seeds=20,
        tests=("tests/sim/test_determinism.py",),
    ),
    Mutant(
        "m26",
        "the majority is computed one too low (openraft #1802: 2 of 5)",
        f"{RAFT}/quorum.py",
        "    return ascending[len(ascending) - majority(len(ascending))]\n",
        "    return ascending[min(len(ascending) - 1, len(ascending) - majority(len(ascending)) + 1)]\n",
        seeds=20,
    ),
    Mutant(
        "m27",
        "the term is written after the entries of that term",
        f"{RAFT}/core.py",
        "        hard_state = self._poll_hard_state(rides_along=bool(entries))\n",
        "        hard_state = None if entries else self._poll_hard_state(rides_along=bool(entries))\n",
        seeds=100,
    ),
    Mutant(
        "m28",
        "a node whose term ran ahead does not tell the leader",
        f"{RAFT}/election.py",
        "        state.reply(AppendReply(state.node, message.src, state.term, False, 0))\n",
        "        pass\n",
        seeds=300,
        tests=("tests/unit/raft",),
    ),
    Mutant(
        "m29",
        "recovery takes every bad record for a torn tail",
        "sava/wal/recovery.py",
        "        if witness is not None:\n",
        "        if False:\n",
        seeds=100,
        tests=("tests/unit/wal/test_corruption.py",),
    ),
    Mutant(
        "m30",
        "a follower campaigns while a snapshot is being installed",
        f"{RAFT}/state.py",
        "        if self.install is not None:\n            return False\n        return self.node in "
        "self.all_voters or",
        "        return self.node in self.all_voters or",
        seeds=60,
        tests=("tests/unit/raft",),
    ),
    Mutant(
        "m31",
        "the transactions of a batch take effect by the comparisons of the first",
        f"{META}/machine/state_machine.py",
        "            is_done: bool | Refused = all(holds(self._space, compare) for compare in txn.compare)\n",
        "            is_done: bool | Refused = all(holds(self._space, each) for each in txns[0].compare)\n",
        seeds=20,
        tests=("tests/unit/metadata/test_batches.py",),
    ),
    Mutant(
        "m32",
        "a batch that is out of time before it has left is said to be unknown, and one that has left is not",
        f"{META}/batching.py",
        "            if waiting.is_sent:\n",
        "            if not waiting.is_sent:\n",
        tests=("tests/unit/metadata/test_batches.py",),
    ),
)
