"""Known ways to let callers in that must stay out, or to let them do what they may not."""

from __future__ import annotations

from functools import partial

from tests.mutants.runner import Mutant

PERMISSIONS = "sava/security/permissions.py"
GUARD = "sava/peers/guard.py"
_Decided = partial(Mutant, tests=("tests/unit/security/test_permissions.py",))
_Guarded = partial(Mutant, tests=("tests/unit/peers/test_guard.py",))
_Header = partial(Mutant, tests=("tests/security/test_callers.py::test_no_header_makes_a_broker",))
_Streams = partial(Mutant, tests=("tests/security/test_open_streams.py",))

SECURITY_MUTANTS: tuple[Mutant, ...] = (
    _Decided(
        "sec1",
        "what no binding speaks of is allowed",
        PERMISSIONS,
        "        return not held.isdisjoint(any_of)\n\n    def allow_within",
        "        return not held or not held.isdisjoint(any_of)\n\n    def allow_within",
    ),
    _Decided(
        "sec2",
        "a pattern covers every topic",
        PERMISSIONS,
        "                if resource.name.startswith(prefix):\n",
        "                if prefix:\n",
    ),
    _Decided(
        "sec3",
        "a topic covers those whose names begin like its own",
        PERMISSIONS,
        "            held |= self.topics.get(resource.name, set())\n",
        "            for name, permissions in self.topics.items():\n"
        "                held |= permissions if resource.name.startswith(name) else set()\n",
    ),
    _Decided(
        "sec4",
        "the brokers' own topics are topics like others",
        PERMISSIONS,
        "        if namespace == SYSTEM:\n            return Permission.CLUSTER_ADMIN in self.cluster\n",
        "",
    ),
    _Decided(
        "sec5",
        "a namespace covers those whose names begin like its own",
        PERMISSIONS,
        'f"/{namespace}/" if namespace else "/"',
        'f"/{namespace[:1]}"',
    ),
    _Decided(
        "sec6",
        "decisions outlive the bindings that they were made by",
        PERMISSIONS,
        "            self._compiled.clear()\n            self._revision = self._policies.revision\n",
        "            self._revision = self._policies.revision\n",
    ),
    _Guarded(
        "sec7",
        "a call without a row is allowed",
        GUARD,
        "            self._denied(method, call, (), error)\n            raise error\n        if row.access",
        "            return\n        if row.access",
    ),
    _Header(
        "sec8",
        "a forwarded call is believed without a MAC",
        GUARD,
        "            if not self._secret.verify(PURPOSE, ",
        "            if not self._secret.verify and (PURPOSE, ",
    ),
    _Header(
        "sec9",
        "a MAC for one method is good for another",
        GUARD,
        "self._secret.mac(PURPOSE, method.encode() + b",
        'self._secret.mac(PURPOSE, b"" + b',
        more=(
            (
                GUARD,
                "self._secret.verify(PURPOSE, method.encode() + b",
                'self._secret.verify(PURPOSE, b"" + b',
            ),
        ),
    ),
    _Header(
        "sec10",
        "a call that a broker passes on for a client counts as the broker's own",
        GUARD,
        "if is_for_brokers and (call is None or not call.is_own):",
        "if is_for_brokers and call is None:",
    ),
    Mutant(
        "sec11",
        "a header of a forwarded call is good for ever",
        GUARD,
        "        if abs(lag) > MAX_AGE_S:\n",
        "        if lag is None:\n",
        tests=(
            "tests/security/test_callers.py::test_a_broker_says_for_a_short_time_whose_call_it_passes_on",
        ),
    ),
    _Streams(
        "sec12",
        "a stream outlives its token",
        GUARD,
        "        if expires_at:\n",
        "        if expires_at < 0:\n",
    ),
    _Streams(
        "sec13",
        "a stream outlives the binding that allowed it",
        GUARD,
        "            if not call.may(any_of, resource):\n                stream.end(",
        "            if call is None:\n                stream.end(",
    ),
    _Streams(
        "sec14",
        "a stream outlives the revocation of its token",
        GUARD,
        "        if rules.policies.is_revoked(shown.kind, shown.id):\n            stream.end(",
        "        if shown is None:\n            stream.end(",
    ),
    _Streams(
        "sec15",
        "Danube's producer is asked for its right once",
        "sava/api/danube/producers.py",
        "            require_topic(Permission.PRODUCE, producer.topic)\n",
        "",
    ),
    Mutant(
        "sec16",
        "a consumer writes where it may not, by dead letters",
        PERMISSIONS,
        '"ConfigureSubscription": _row(*_SUBSCRIPTION.needs, _DEAD_LETTERS, audit=True)',
        '"ConfigureSubscription": _row(*_SUBSCRIPTION.needs, audit=True)',
        tests=("tests/security/test_access.py::test_a_consumer_does_not_write_by_dead_letters",),
    ),
    Mutant(
        "sec17",
        "a range of keys reaches roles and bindings",
        "sava/security/store.py",
        "(is_range and PREFIX.startswith(text))",
        "False",
        tests=("tests/unit/security/test_store.py::test_which_keys_meta_must_not_reach",),
    ),
)
