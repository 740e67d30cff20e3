"""Known ways to break what a topic keeps for its producers and subscriptions."""

from __future__ import annotations

from functools import partial

from tests.mutants.runner import Mutant

BROKER = "sava/broker"
_Broker = partial(Mutant, tests=("tests/unit/broker/test_topic.py",))

BROKER_MUTANTS: tuple[Mutant, ...] = (
    _Broker(
        "b1",
        "a subscription is created without a look at settings that came meanwhile",
        f"{BROKER}/subscriptions.py",
        "self._tenure.write(writes, absent(key), unchanged(ahead_key, revision))",
        "self._tenure.write(writes, absent(key))",
    ),
    _Broker(
        "b2",
        "settings are left for a subscription that exists by now",
        f"{BROKER}/subscriptions.py",
        "conditions = unchanged(key, revision), absent(specs.subscription_key(self._topic, name))",
        "conditions = (unchanged(key, revision),)",
    ),
    _Broker(
        "b3",
        "settings made ahead outlive the subscription that took them",
        f"{BROKER}/subscriptions.py",
        "                writes.append(Delete(ahead_key))\n",
        "                pass\n",
    ),
)
