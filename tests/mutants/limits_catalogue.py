"""Known ways to let a request cost too much, and a caller take what is another's."""

from __future__ import annotations

from functools import partial

from tests.mutants.runner import Mutant

TOPICS = "sava/topics"
SCHEMAS = "sava/schemas"
_Pattern = partial(Mutant, tests=("tests/unit/schemas/test_patterns.py",))
_Budget = partial(Mutant, tests=("tests/unit/topics/test_decode_budget.py",))
_Owner = partial(Mutant, tests=("tests/unit/topics/test_owners.py",))
_Room = partial(Mutant, tests=("tests/unit/topics/test_namespace_room.py",))

LIMITS_MUTANTS: tuple[Mutant, ...] = (
    _Pattern(
        "x1",
        "a text of any length is tried on a pattern",
        f"{SCHEMAS}/bounds.py",
        "return len(data) <= self.most_bytes and self._compiled.search(data) is not None",
        "return self._compiled.search(data) is not None",
    ),
    _Pattern(
        "x2",
        "what patterns do on one payload is not counted",
        f"{SCHEMAS}/json_schema.py",
        "    _current.budget.spend_work(tried.work(text))\n",
        "",
    ),
    _Pattern(
        "x3",
        "the event loop checks payloads of any size",
        f"{SCHEMAS}/definition.py",
        "        if sum(map(len, payloads)) > EASY_BYTES:\n",
        "        if False:\n",
    ),
    _Pattern(
        "x4",
        "a consumer has any number of key filters",
        f"{TOPICS}/dispatch/members.py",
        "if len(self.globs) > MAX_GLOBS or sum(map(len, self.globs)) > MAX_GLOB_CHARS:",
        "if len(self.globs) > MAX_GLOBS:",
    ),
    _Budget(
        "x5",
        "a large batch is decompressed without a part of the budget",
        f"{TOPICS}/publishing.py",
        "            async with self._budget.hold(header.body_size):\n",
        "            async with self._budget.hold(0):\n",
    ),
    _Budget(
        "x6",
        "small batches overtake large ones, which never get their turn",
        f"{TOPICS}/publishing.py",
        "        if self._waiting or self.left < size:\n",
        "        if self.left < size:\n",
    ),
    _Budget(
        "x7",
        "who is cancelled with its turn takes its part along",
        f"{TOPICS}/publishing.py",
        "                self._give_back(size)  # granted in the turn in which the wait ended\n",
        "                pass\n",
    ),
    _Budget(
        "x8",
        "who leaves the queue keeps those behind it waiting",
        f"{TOPICS}/publishing.py",
        "                self._grant()  # it may have stood before others that fit\n",
        "",
    ),
    Mutant(
        "x9",
        "the producer of a batch is looked at after its columns",
        f"{TOPICS}/producers.py",
        "        header = batch.header\n        if header.producer_id",
        "        header = batch.verify().header\n        if header.producer_id",
        tests=("tests/security/test_excessive_input.py",),
    ),
    _Owner(
        "x10",
        "a subscription is open to all who name it",
        f"{TOPICS}/rules.py",
        "        return str(principal) == owner or self._is_free(principal)\n",
        "        return True\n",
    ),
    _Owner(
        "x11",
        "what an administrator makes ahead is the administrator's alone",
        f"{TOPICS}/rules.py",
        "        if not self.is_enforced or principal == ANONYMOUS or self._is_free(principal):\n",
        "        if not self.is_enforced or principal == ANONYMOUS:\n",
    ),
    _Owner(
        "x12",
        "a producer's name is its principal's only while it is open",
        "sava/storage/producers.py",
        "            owners[ask.producer_id] = ask.owner\n",
        "            pass\n",
    ),
    _Owner(
        "x13",
        "a flood of names drives out the owners of all others",
        "sava/storage/producers.py",
        "        most = max(found.values(), key=len)\n",
        "        most = next(ids for ids in found.values() if ids)\n",
    ),
    _Owner(
        "x14",
        "a consumer is replaced by a stranger of its name",
        f"{TOPICS}/subscriptions.py",
        '        owners.check_name(older.principal, options.consumer_name, topic, "consumer")\n',
        "        pass\n",
    ),
    Mutant(
        "x15",
        "a stranger receives with the id of a consumer",
        "sava/api/danube/consumers.py",
        '        self._topics.owners.check_name(known.owner, known.name, known.topic, "consumer")\n',
        "",
        tests=("tests/unit/api/test_danube_owners.py",),
    ),
    Mutant(
        "x16",
        "a stranger sends with the id of a producer",
        "sava/api/danube/producers.py",
        "            producer.check_own()\n",
        "",
        tests=("tests/unit/api/test_danube_owners.py",),
    ),
    _Room(
        "x17",
        "partitions do not count for the limit of a namespace",
        f"{TOPICS}/registry.py",
        "        await self._room.take(head.namespace, end - start + (spec is None))\n",
        "",
    ),
    _Room(
        "x18",
        "topics that producers create are not slowed down",
        f"{TOPICS}/served.py",
        "                await self._slow_down()\n",
        "                pass\n",
    ),
)
