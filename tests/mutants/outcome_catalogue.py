"""Known ways to call an unknown outcome a failure, or what no majority has confirmed a fact."""

from __future__ import annotations

from functools import partial

from tests.mutants.runner import Mutant

API = "sava/api"
PEERS = "sava/peers"
_Outcome = partial(Mutant, tests=("tests/unit/test_outcomes.py",))
_Listing = partial(Mutant, tests=("tests/unit/api/test_brokers_admin.py",))
_Parts = partial(Mutant, tests=("tests/unit/api/test_partly_made_changes.py",))
_Silent = partial(Mutant, tests=("tests/unit/pipeline/test_silent_brokers.py",))

OUTCOME_MUTANTS: tuple[Mutant, ...] = (
    _Outcome(
        "u1",
        "a change whose answer was lost is called undone",
        f"{PEERS}/error_mapping.py",
        "    elif check is not None and error.code() not in REFUSALS:\n",
        "    elif False:\n",
    ),
    _Outcome(
        "u2",
        "a call that is not listed is taken for a read",
        f"{API}/admin_client.py",
        "    if method in READS or ",
        "    if method not in CHANGES or ",
    ),
    _Outcome(
        "u3",
        "an unknown outcome gets lost on the wire",
        f"{PEERS}/error_mapping.py",
        "    if outcome in _OUTCOMES:\n",
        "    if False:\n",
    ),
    _Listing(
        "u4",
        "brokers that no majority has confirmed are listed as they were",
        f"{API}/admin/brokers.py",
        "self._seen(is_confirmed=not reason)",
        "self._seen(is_confirmed=True)",
    ),
    _Listing(
        "u5",
        "a given-up broker stands beside its successor",
        f"{API}/admin/brokers.py",
        "{each for each in counts if counts[each]}",
        "counts.keys()",
    ),
    Mutant(
        "u6",
        "a client forgets that an earlier attempt may have happened",
        "sava/client/connection.py",
        "                    if isinstance(failure, Unanswered) and not isinstance(error, Unanswered):\n",
        "                    if False:\n",
        tests=("tests/unit/client/test_connection.py",),
    ),
    Mutant(
        "u7",
        "a topic that was created and cannot be described is called not created",
        f"{PEERS}/error_mapping.py",
        '        raise OutcomeUnknown(f"{change}, but it could not be described: {error}") from error\n',
        "        raise\n",
        tests=("tests/unit/api/test_made_changes.py",),
    ),
    _Parts(
        "u8",
        "a change of a partitioned topic reports the error of one partition alone",
        f"{PEERS}/partition_calls.py",
        "        if len(asked) == 1 or (len(errors) == len(asked) and not unknown):\n",
        "        if errors:\n",
    ),
    _Parts(
        "u9",
        "a partition that may have made a change is called one that has not",
        f"{PEERS}/partition_calls.py",
        " if _outcome(error) is not Outcome.NOT_DONE}",
        " if False}",
    ),
    Mutant(
        "u10",
        "messages that were appended are called not appended after an unexpected error",
        "sava/topics/publishing.py",
        "            failure = self._stopped() if is_waiting else self._unknown()\n",
        "            failure = self._stopped()\n",
        tests=("tests/unit/topics/test_publishing.py",),
    ),
    _Listing(
        "u11",
        "a broker that was asked to stop is listed by its mode",
        f"{API}/admin/brokers.py",
        "        return LEAVING if self.registration.is_leaving else self.mode.mode.value\n",
        "        return self.mode.mode.value\n",
    ),
    _Listing(
        "u12",
        "an owner that is no member any more is listed as one that may come back",
        f"{API}/admin/brokers.py",
        "        if not self.is_member:\n",
        "        if False:\n",
    ),
    _Listing(
        "u13",
        "a member that is not registered is listed by its mode",
        f"{API}/admin/brokers.py",
        "            return UNREACHABLE\n",
        "            return self.mode.mode.value\n",
    ),
    _Listing(
        "u14",
        "a leader is named that no majority has confirmed",
        f"{API}/admin/brokers.py",
        "self._view.counts(), self.leader if is_confirmed else NO_NODE",
        "self._view.counts(), self.leader",
    ),
    _Listing(
        "u15",
        "what no majority confirms is called by its mode once it is known to be unconfirmed",
        f"{API}/admin/brokers.py",
        "        if not self.is_confirmed:\n",
        "        if False:\n",
    ),
    Mutant(
        "u16",
        "a leader that was not handed over in time is said never to be",
        "sava/metadata/replica/router.py",
        "0, maybe_applied=True))\n\n\ndef _holds(",
        "0, maybe_applied=False))\n\n\ndef _holds(",
        tests=("tests/unit/metadata/test_replica_peers.py",),
    ),
    _Silent(
        "u17",
        "a read of several partitions waits for a silent broker",
        "sava/pipeline/calls.py",
        ".watch(call, lambda: True)",
        ".watch(call, lambda: False)",
    ),
    _Silent(
        "u18",
        "an append stream waits for a silent target",
        "sava/pipeline/replicate/target.py",
        "owes=lambda: self._is_opening or bool(self._unanswered)",
        "owes=lambda: False",
    ),
)
