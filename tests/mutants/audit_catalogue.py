"""Known ways to lose what callers did, to let them forge it, and to let one use more than its quota."""

from __future__ import annotations

from functools import partial

from tests.mutants.runner import Mutant

AUDIT = "sava/security/audit.py"
QUOTAS = "sava/security/quotas.py"
_Recorded = partial(Mutant, tests=("tests/unit/security/test_audit.py",))
_Metered = partial(Mutant, tests=("tests/unit/security/test_quotas.py",))

AUDIT_MUTANTS: tuple[Mutant, ...] = (
    _Recorded(
        "aud1",
        "a name that a caller chose can look like the next field",
        AUDIT,
        "    return text if _PLAIN.fullmatch(text) else json.dumps(text)\n",
        "    return text\n",
    ),
    _Recorded(
        "aud2",
        "the queue of the topic grows without end",
        AUDIT,
        "        if len(self._waiting) >= MAX_WAITING:\n",
        "        if self._waiting is None:\n",
    ),
    _Recorded(
        "aud3",
        "a batch that could not be written is forgotten",
        AUDIT,
        "            return False\n        for _ in range(count):\n",
        "        for _ in range(count):\n",
    ),
    _Recorded(
        "aud4",
        "of changes that one principal makes quickly only a few are recorded",
        AUDIT,
        "            kind = () if call.is_change else (str(call.principal), call.method, call.resource)\n",
        "            kind = (str(call.principal), call.method)\n",
    ),
    _Recorded(
        "aud5",
        "denials beyond the first few are not counted",
        AUDIT,
        "            window.more += 1\n",
        "            pass\n",
    ),
    _Recorded(
        "aud6",
        "what brokers write into the audit is audited",
        AUDIT,
        " and call.principal.kind != BROKER:\n",
        ":\n",
    ),
    Mutant(
        "aud7",
        "an administrator writes into the audit",
        "sava/security/permissions.py",
        "        if Permission.PRODUCE in any_of and resource.namespace == SYSTEM:\n"
        "            return False\n",
        "",
        tests=("tests/security/test_audit.py",),
    ),
    Mutant(
        "aud8",
        "what a handler denies is not recorded",
        "sava/peers/forwarding.py",
        "            self._guard.refused(error)\n",
        "",
        tests=("tests/security/test_audit.py::test_what_a_handler_denies_is_recorded_too",),
    ),
    _Metered(
        "quo1",
        "a bucket that was idle for long lets everything through",
        QUOTAS,
        "        start = max(self._paid_at, now - 1.0)\n",
        "        start = self._paid_at\n",
    ),
    _Metered(
        "quo2",
        "a stream that ends keeps its place",
        QUOTAS,
        "            usage.streams -= 1\n",
        "",
    ),
    _Metered(
        "quo3",
        "a quota that is read again forgives all debts",
        QUOTAS,
        "    return older if older is not None and older.rate == rate else Bucket(rate, now)\n",
        "    return Bucket(rate, now)\n",
    ),
    _Metered(
        "quo4",
        "brokers are under the quota of all",
        QUOTAS,
        "        if principal.startswith(_BROKERS):\n            return NO_QUOTA\n",
        "",
    ),
    _Metered(
        "quo5",
        "metrics have a label for each principal",
        QUOTAS,
        "        if principal not in self._quotas:\n            return EVERY\n        known",
        "        return principal\n        known",
    ),
    Mutant(
        "quo6",
        "a publisher's stream does not wait for its rate",
        "sava/api/streams.py",
        "                if self._usage.publishing is not None:\n",
        "                if self._usage is None:\n",
        tests=("tests/unit/api/test_client_port.py",),
    ),
    Mutant(
        "quo7",
        "partitions count as topics of their own",
        "sava/topics/registry.py",
        "        return name is not None and name.head == name and specs",
        "        return name is not None and name.head != name and specs",
        tests=("tests/unit/topics/test_principal_room.py",),
    ),
)
