"""Known ways to break what a topic keeps for its subscriptions, connections that are kept apart, and
passes that one bad value must not end."""

from __future__ import annotations

from functools import partial

from tests.mutants.runner import Mutant

TOPICS = "sava/topics"
API = "sava/api"
PEERS = "sava/peers"
_Broker = partial(Mutant, tests=("tests/unit/topics/test_topic.py",))

BROKER_MUTANTS: tuple[Mutant, ...] = (
    _Broker(
        "b1",
        "a subscription is created without a look at settings that came meanwhile",
        f"{TOPICS}/subscriptions.py",
        "return RecordChange(spec, writes, (self._tenure.holds, ahead.unchanged))",
        "return RecordChange(spec, writes, (self._tenure.holds,))",
    ),
    _Broker(
        "b2",
        "settings are left for a subscription that exists by now",
        f"{TOPICS}/subscriptions.py",
        "conditions=(self._tenure.holds, is_absent)",
        "conditions=(self._tenure.holds,)",
    ),
    _Broker(
        "b3",
        "settings made ahead outlive the subscription that took them",
        f"{TOPICS}/subscriptions.py",
        "                writes.append(Delete(ahead.key))\n",
        "                pass\n",
    ),
    Mutant(
        "b4",
        "an error of one connection reaches the node's pump",
        "sava/metadata/node.py",
        "                self._not_sent(address, group, error)\n",
        "                raise\n",
        tests=("tests/unit/api/test_node.py",),
    ),
    Mutant(
        "b5",
        "a write that raises leaves its connection as it is",
        "sava/peer_connection.py",
        "            asyncio.get_running_loop().call_soon(self.connection_lost, None)\n",
        "",
        tests=("tests/unit/peers/test_raft_port.py",),
    ),
    Mutant(
        "b6",
        "a stream gets its connection before connecting has returned",
        f"{PEERS}/raft_transport.py",
        "        connection = PeerConnection(lost=self._lost)\n",
        "        connection = self._connection = PeerConnection(lost=self._lost)\n",
        tests=(
            "tests/unit/peers/test_raft_port.py::test_a_connection_made_at_its_deadline_leaves_nothing_behind",
        ),
    ),
    Mutant(
        "b6a",
        "a broker may speak as another one",
        f"{PEERS}/raft_listener.py",
        "            if envelope.src != node:\n",
        "            if envelope.src < 0:\n",
        tests=("tests/unit/peers/test_handshake.py",),
    ),
    Mutant(
        "b6b",
        "a dialer that proves nothing is taken for a broker",
        "sava/security/handshake.py",
        "        if not self.is_proved:\n            if hello",
        "        if False:\n            if hello",
        tests=("tests/unit/peers/test_handshake.py",),
    ),
    Mutant(
        "b6c",
        "a listener that proves nothing is taken for a broker",
        "sava/security/handshake.py",
        "        if not secret.verify(_LISTENER, _said(self.hello, challenge, content), mac):\n",
        "        if len(mac) > 32:\n",
        tests=("tests/unit/peers/test_handshake.py",),
    ),
    Mutant(
        "b6d",
        "a fence needs no claim",
        "sava/ledger/wire.py",
        "        if not is_claimed:\n",
        "        if is_claimed is None:\n",
        tests=("tests/unit/peers/test_handshake.py",),
    ),
    Mutant(
        "b6e",
        "a certificate of another broker will do",
        "sava/security/handshake.py",
        "        if node != NO_NODE and not any(_is_of(name, node, host) for name in names):\n",
        "        if not names:\n",
        tests=("tests/unit/peers/test_handshake.py",),
    ),
    Mutant(
        "b7",
        "a close waits without a limit for the loop to tell of an end",
        "sava/peer_connection.py",
        "        async with asyncio.timeout(GONE_S):\n",
        "        async with asyncio.timeout(None):\n",
        tests=("tests/unit/peers/test_raft_port.py",),
    ),
    Mutant(
        "b8",
        "a part that hangs keeps the broker from stopping",
        "sava/tasks.py",
        "        await asyncio.wait((task,), timeout=limit_s)\n",
        "        await asyncio.wait((task,))\n",
        tests=("tests/unit/test_tasks.py",),
    ),
    Mutant(
        "b9",
        "a topic that was created again counts on from the former one",
        f"{API}/admin/brokers.py",
        "(before.topic_id, before.epoch) == (now.topic_id, now.epoch)",
        "before.epoch == now.epoch",
        tests=("tests/unit/api/test_load_reports.py",),
        more=(
            (
                f"{API}/admin/brokers.py",
                "max(now.messages - before.messages, 0)",
                "(now.messages - before.messages)",
            ),
        ),
    ),
    Mutant(
        "b10",
        "an unexpected error of one topic ends the pass over all",
        "sava/topics/maintenance.py",
        '                    log.exception("topics: failed of a bug topic=%s", name)\n',
        "                    raise\n",
        tests=("tests/unit/topics/test_topics.py",),
    ),
    Mutant(
        "b11",
        "a note that cannot be read stops the sweep of deleted topics",
        "sava/storage/orphans.py",
        "                unreadable += 1\n",
        "                raise\n",
        tests=("tests/unit/storage/test_deleted.py",),
    ),
)
