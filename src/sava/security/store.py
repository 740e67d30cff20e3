"""Roles, bindings, revocations and quotas in the metadata store, and every broker's copy of them.

    /security/roles/{name}              RoleRecord
    /security/bindings/{id}             BindingRecord; the id is a hash of what the binding says
    /security/revocations/{kind}/{id}   RevocationRecord; the id is hashed: a token's may be any text
    /security/quotas/{id}               QuotaRecord; the id is a hash of the principal

No key below ``/security/`` can be reached by ``sava meta``, where one write would grant everything.

A broker follows the records by a watch and applies them event by event, so that a change holds on all brokers
within the time that Raft needs, milliseconds. A broker that is cut off from the others decides by what it
knew last, and serves no topic for longer than its registration lasts. A role that is not known gives
nothing, and a record that cannot be read neither: what cannot be understood is denied.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from sava.errors import CallerError
from sava.metadata.commands import KeyValue
from sava.metadata.errors import Compacted
from sava.metadata.records import (
    Decide,
    RecordChange,
    RecordCorrupt,
    RecordStore,
    Versioned,
    decode,
    present,
)
from sava.metadata.store import MetadataStore
from sava.security.permissions import ROLES, Grant, GrantScope, Permission, Policies, Resource
from sava.security.principal import Principal
from sava.supervisor import Supervisor
from sava.tasks import Backoff, Reconciler, cancelled

log = logging.getLogger(__name__)

PREFIX: Final = "/security/"
ROLE_KEYS: Final = f"{PREFIX}roles/"
BINDING_KEYS: Final = f"{PREFIX}bindings/"
REVOCATION_KEYS: Final = f"{PREFIX}revocations/"
QUOTA_KEYS: Final = f"{PREFIX}quotas/"
RETRY_S: Final = 0.2
CAUGHT_UP_S: Final = 1.0
MAX_ROLES: Final = 1000
MAX_BINDINGS: Final = 20_000
MAX_REVOCATIONS: Final = 20_000
MAX_QUOTAS: Final = 10_000
MAX_TEXT: Final = 256
"""Characters of a name, a principal, an id or a reason."""
EVERYONE: Final = "*"
"""The principal of the quota that holds for each one without a quota of its own."""
TOKEN: Final = "token"
CERTIFICATE: Final = "certificate"

_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_TOPIC: Final = re.compile(r"/[\w-][\w.-]*/(?:[\w-][\w.-]*\*?|\*)", re.ASCII)
_PARTITION: Final = re.compile(r".+-part-(0|[1-9]\d{0,5})")

T = TypeVar("T", bound=msgspec.Struct)


class SecurityPolicyInvalid(CallerError):
    """A role, binding, revocation or quota that cannot be."""


class RoleUnknown(CallerError):
    """No role has this name."""


class RoleInUse(CallerError):
    """Bindings name the role."""


class BuiltInRole(CallerError):
    """The role is built in, and stays as it is."""


class BindingUnknown(CallerError):
    """No binding has this id."""


class SecurityPolicyLimit(CallerError):
    """There are as many of them as there may be."""


# -- records ---------------------------------------------------------------------------------------


class RoleRecord(msgspec.Struct, frozen=True, kw_only=True):
    permissions: tuple[str, ...]
    """As words: one that a newer version knows gives nothing here."""
    created_by: str = ""
    created_ms: int = 0


class BindingRecord(msgspec.Struct, frozen=True, kw_only=True):
    principal: str
    role: str
    scope: str
    resource: str = ""
    name: str = ""
    """What Danube's tools call it; theirs have names of their own, and several roles."""
    created_by: str = ""
    created_ms: int = 0

    @property
    def id(self) -> str:
        return _hash(self.principal, self.role, self.scope, self.resource, self.name)

    @property
    def grant(self) -> Grant:
        return Grant(self.role, Resource(GrantScope(self.scope), self.resource))


class RevocationRecord(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    id: str
    reason: str = ""
    until_ms: int = 0
    """When it may be forgotten; 0: never."""
    created_by: str = ""
    created_ms: int = 0


class QuotaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Of one principal; 0: no limit."""

    principal: str
    max_connections: int = 0
    max_streams: int = 0
    publish_bytes_per_second: int = 0
    consume_bytes_per_second: int = 0
    max_topics: int = 0
    max_subscriptions: int = 0


def _hash(*texts: str) -> str:
    parts = b"".join(b"%d:%b" % (len(raw := text.encode()), raw) for text in texts)
    return hashlib.sha256(parts).hexdigest()[:24]


def is_reserved(text: str, *, is_range: bool) -> bool:
    """Whether a key, or a range of keys, reaches what is kept here."""
    return text.startswith(PREFIX) or (is_range and PREFIX.startswith(text))


# -- checks ----------------------------------------------------------------------------------------


def check_text(text: str, what: str) -> str:
    if not text or len(text) > MAX_TEXT or not text.isprintable():
        raise SecurityPolicyInvalid(f"{what} {text[:50]!a}: 1 to {MAX_TEXT} printable characters are needed")
    return text


def check_role(name: str, permissions: tuple[str, ...]) -> None:
    """Raises SecurityPolicyInvalid, BuiltInRole."""
    if name in ROLES:
        raise BuiltInRole(f"role {name} is built in, and stays as it is; give the new role another name")
    if not _NAME.fullmatch(name):
        raise SecurityPolicyInvalid(
            f"role {name[:50]!a}: letters, digits, '_', '-' and '.' (not first) can be used"
        )
    known = list(Permission)
    for each in permissions:
        if each not in known:
            raise SecurityPolicyInvalid(
                f"permission {each[:50]!a} does not exist; there are {', '.join(known)}"
            )


def check_binding(record: BindingRecord) -> BindingRecord:
    """As it is kept. Raises SecurityPolicyInvalid, PrincipalInvalid."""
    principal = Principal.parse(check_text(record.principal, "principal"))
    try:
        scope = GrantScope(record.scope)
    except ValueError:
        raise SecurityPolicyInvalid(
            f"scope {record.scope[:50]!a} does not exist; there are {', '.join(GrantScope)}"
        ) from None
    resource = record.resource
    match scope:
        case GrantScope.CLUSTER if resource:
            raise SecurityPolicyInvalid("a binding of the cluster names no resource")
        case GrantScope.NAMESPACE if not _NAME.fullmatch(resource):
            raise SecurityPolicyInvalid(
                f"namespace {resource[:50]!a} cannot be one; write it as in /NAMESPACE/topic"
            )
        case GrantScope.TOPIC if len(resource) > 2 * MAX_TEXT or not _TOPIC.fullmatch(resource):
            raise SecurityPolicyInvalid(
                f"topic {resource[:50]!a}: write /namespace/topic; the name may end in *, as in /sales/eu-*"
            )
        case GrantScope.TOPIC if _PARTITION.fullmatch(resource):
            raise SecurityPolicyInvalid(
                f"topic {resource} is named as a partition; a binding of the topic covers its partitions"
            )
    check_text(record.role, "role")
    return msgspec.structs.replace(record, principal=str(principal), scope=scope.value)


# -- changing --------------------------------------------------------------------------------------


class SecurityPolicies:
    """This broker's copy of the records, and how they change. Reads are of the copy. Owned by the event
    loop."""

    def __init__(self, store: MetadataStore) -> None:
        self.policies = Policies()
        self.roles: dict[str, RoleRecord] = {}
        self.bindings: dict[str, BindingRecord] = {}
        """By id."""
        self.revoked: dict[tuple[str, str], RevocationRecord] = {}
        """By kind and id."""
        self.quotas: dict[str, QuotaRecord] = {}
        """By principal, or ``*``."""
        self._by_key: dict[str, msgspec.Struct] = {}
        self._revision = 0
        """Of the store, up to which the copy is current."""
        self._applied = asyncio.Event()
        self._store = store
        self._records = RecordStore(store)
        self._listeners: list[Callable[[], None]] = []
        self._follower = Reconciler(
            "security policies", self._follow, period_s=RETRY_S, retry=Backoff(RETRY_S, RETRY_S, jitter=0)
        )
        self._task: asyncio.Task[None] | None = None

    def listen(self, listener: Callable[[], None]) -> None:
        """Called after every change, in the watch's task; returns at once."""
        self._listeners.append(listener)

    def is_revoked(self, kind: str, number: str) -> bool:
        """``number``: the token's id, or the certificate's serial number."""
        return (kind, number) in self.revoked

    @property
    def has_administrator(self) -> bool:
        """Whether a binding lets a principal make others."""
        return any(
            each.scope == GrantScope.CLUSTER
            and Permission.CLUSTER_ADMIN in self.policies.roles.get(each.role, ())
            for each in self.bindings.values()
        )

    async def set_role(self, name: str, permissions: tuple[str, ...], *, by: Principal) -> RoleRecord:
        """Raises SecurityPolicyInvalid, BuiltInRole, SecurityPolicyLimit."""
        check_role(name, permissions)
        wanted = tuple(each.value for each in Permission if each in permissions)
        self._check_room(self.roles, name, MAX_ROLES, "roles")

        def decide(found: Versioned[RoleRecord]) -> RecordChange[RoleRecord] | None:
            if found.value is not None and found.value.permissions == wanted:
                return None
            return RecordChange(RoleRecord(permissions=wanted, created_by=str(by), created_ms=_now_ms()))

        return await self._set(f"{ROLE_KEYS}{name}", RoleRecord, decide, f"role {name}")

    async def delete_role(self, name: str) -> None:
        """Raises BuiltInRole, RoleUnknown, RoleInUse."""
        check_role(name, ())
        bindings = (await self._store.range(BINDING_KEYS)).kvs
        users = [each for kv in bindings if (each := decode(kv, BindingRecord)).role == name]
        if users:
            raise RoleInUse(
                f"role {name} is given by {len(users)} binding(s), such as {users[0].id} of "
                f"{users[0].principal}; delete those first"
            )
        await self._delete(f"{ROLE_KEYS}{name}", RoleRecord, RoleUnknown(f"role {name} does not exist"))

    async def create_binding(self, record: BindingRecord, *, by: Principal) -> BindingRecord:
        """Repeated, it changes nothing. Raises SecurityPolicyInvalid, PrincipalInvalid, RoleUnknown,
        SecurityPolicyLimit."""
        record = check_binding(record)
        role_key = f"{ROLE_KEYS}{record.role}"
        self._check_room(self.bindings, record.id, MAX_BINDINGS, "bindings")
        wanted = msgspec.structs.replace(record, created_by=str(by), created_ms=_now_ms())
        conditions = () if record.role in ROLES else (present(role_key),)

        async def decide(found: Versioned[BindingRecord]) -> RecordChange[BindingRecord] | None:
            if conditions and await self._store.get(role_key) is None:
                known = ", ".join(sorted({*ROLES, *self.roles}))
                raise RoleUnknown(f"role {record.role[:50]!a} does not exist; there are {known}")
            return None if found.value is not None else RecordChange(wanted, conditions=conditions)

        return await self._set(
            f"{BINDING_KEYS}{record.id}", BindingRecord, decide, f"the binding of {record.principal}"
        )

    async def delete_binding(self, binding: str) -> None:
        """Raises BindingUnknown."""
        unknown = BindingUnknown(f"binding {binding[:50]!a} does not exist; see `sava auth bindings list`")
        if not _NAME.fullmatch(binding):
            raise unknown
        await self._delete(f"{BINDING_KEYS}{binding}", BindingRecord, unknown)

    async def revoke(self, record: RevocationRecord, *, by: Principal) -> RevocationRecord:
        """Raises SecurityPolicyInvalid, SecurityPolicyLimit."""
        check_text(record.id, "id")
        if record.kind not in (TOKEN, CERTIFICATE):
            raise SecurityPolicyInvalid(f"{record.kind[:50]!a} cannot be revoked; token and certificate can")
        if record.reason:
            check_text(record.reason, "reason")
        await self._forget_old()
        self._check_room(self.revoked, (record.kind, record.id), MAX_REVOCATIONS, "revocations")
        wanted = msgspec.structs.replace(record, created_by=str(by), created_ms=_now_ms())

        def decide(found: Versioned[RevocationRecord]) -> RecordChange[RevocationRecord] | None:
            was = found.value
            is_same = was is not None and (was.reason, was.until_ms) == (record.reason, record.until_ms)
            return None if is_same else RecordChange(wanted)

        key = _revocation_key(record.kind, record.id)
        return await self._set(key, RevocationRecord, decide, f"the revocation of {record.kind} {record.id}")

    async def delete_revocation(self, kind: str, number: str) -> None:
        """Raises SecurityPolicyInvalid."""
        unknown = SecurityPolicyInvalid(f"{kind[:50]} {number[:50]!a} is not revoked")
        if kind not in (TOKEN, CERTIFICATE):
            raise unknown
        await self._delete(_revocation_key(kind, number), RevocationRecord, unknown)

    async def set_quota(self, record: QuotaRecord) -> QuotaRecord:
        """Raises SecurityPolicyInvalid, PrincipalInvalid, SecurityPolicyLimit."""
        record = msgspec.structs.replace(record, principal=_quota_principal(record.principal))
        self._check_room(self.quotas, record.principal, MAX_QUOTAS, "quotas")

        def decide(found: Versioned[QuotaRecord]) -> RecordChange[QuotaRecord] | None:
            return None if found.value == record else RecordChange(record)

        key = f"{QUOTA_KEYS}{_hash(record.principal)}"
        return await self._set(key, QuotaRecord, decide, f"the quota of {record.principal}")

    async def delete_quota(self, principal: str) -> None:
        """Raises SecurityPolicyInvalid, PrincipalInvalid."""
        principal = _quota_principal(principal)
        key, unknown = (
            f"{QUOTA_KEYS}{_hash(principal)}",
            SecurityPolicyInvalid(f"{principal} has no quota of its own"),
        )
        await self._delete(key, QuotaRecord, unknown)

    async def _forget_old(self) -> None:
        """Revocations of what would be refused by now without them."""
        now = _now_ms()
        for record in list(self.revoked.values()):
            if 0 < record.until_ms < now:
                await self._store.delete(_revocation_key(record.kind, record.id))

    async def _set(self, key: str, kind: type[T], decide: Decide[T], what: str) -> T:
        """The record as it is then, in this broker's copy, too."""
        updated = await self._records.update(key, kind, decide, what=what, repairs=True)
        assert updated.value is not None
        await self._caught_up(updated.revision)
        return updated.value

    async def _delete(self, key: str, kind: type[T], unknown: CallerError) -> None:
        def decide(found: Versioned[T]) -> RecordChange[T] | None:
            if found.kv is None and not found.is_in_doubt:
                raise unknown
            return RecordChange(None) if found.kv is not None else None

        updated = await self._records.update(key, kind, decide, repairs=True)
        await self._caught_up(updated.revision)

    async def _caught_up(self, revision: int) -> None:
        """Until this broker decides by the change, so that the caller who made it does not see the former
        state. Bounded: the change is made in any case."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CAUGHT_UP_S):
                while self._revision < revision:
                    self._applied.clear()
                    await self._applied.wait()

    def _check_room(self, known: dict[T_Key, T], key: T_Key, limit: int, what: str) -> None:
        if key not in known and len(known) >= limit:
            raise SecurityPolicyLimit(
                f"there are {len(known)} {what} already, and no more than {limit} can be"
            )

    # -- following -----------------------------------------------------------------------------

    def load(self) -> int:
        """From this node's copy of the store. The revision that it is of."""
        for each in (self.roles, self.bindings, self.revoked, self.quotas, self._by_key):
            each.clear()
        self.policies.grants.clear()
        self.policies.roles = dict(ROLES)
        local = self._store.local
        for kv in local.range(PREFIX).kvs:
            self._apply(kv.key, kv)
        self._tell(local.revision)
        return local.revision

    def start(self, supervisor: Supervisor) -> None:
        self._task = supervisor.essential(self._follower.run(), name="security policies")

    async def close(self) -> None:
        await cancelled(self._task)

    async def _follow(self) -> None:
        """Without a wait between reading and watching, so that nothing is between them. It ends, also without
        an error, when the store is being closed."""
        watch = self._store.watch(PREFIX, from_revision=self.load() + 1)
        try:
            async for batch in watch:
                for event in batch.events:
                    self._apply(event.key, event.kv)
                self._tell(batch.revision)
        except Compacted:
            self._follower.wake()
        finally:
            watch.close()

    def _tell(self, revision: int) -> None:
        self._revision = revision
        self._applied.set()
        self.policies.changed()
        for listener in self._listeners:
            listener()

    def _apply(self, key: str, kv: KeyValue | None) -> None:
        self._drop(key)
        if kv is None:
            return
        try:
            self._add(key, kv)
        except (RecordCorrupt, ValueError, CallerError) as error:
            log.error("security: a record cannot be read, and gives nothing key=%s error=%s", key, error)

    def _drop(self, key: str) -> None:
        match self._by_key.pop(key, None):
            case RoleRecord():
                name = key.removeprefix(ROLE_KEYS)
                self.roles.pop(name, None)
                self.policies.roles.pop(name, None)
            case BindingRecord() as binding:
                self.bindings.pop(key.removeprefix(BINDING_KEYS), None)
                self._regrant(Principal.parse(binding.principal))
            case RevocationRecord() as revocation:
                self.revoked.pop((revocation.kind, revocation.id), None)
            case QuotaRecord() as quota:
                self.quotas.pop(quota.principal, None)

    def _add(self, key: str, kv: KeyValue) -> None:
        if key.startswith(ROLE_KEYS):
            role, name = decode(kv, RoleRecord), key.removeprefix(ROLE_KEYS)
            if name in ROLES:
                return  # what is built in does not change
            self.roles[name] = role
            self.policies.roles[name] = frozenset(each for each in Permission if each in role.permissions)
            self._by_key[key] = role
        elif key.startswith(BINDING_KEYS):
            binding = check_binding(decode(kv, BindingRecord))
            self.bindings[key.removeprefix(BINDING_KEYS)] = binding
            self.policies.grants.setdefault(Principal.parse(binding.principal), set()).add(binding.grant)
            self._by_key[key] = binding
        elif key.startswith(REVOCATION_KEYS):
            revocation = decode(kv, RevocationRecord)
            self.revoked[revocation.kind, revocation.id] = revocation
            self._by_key[key] = revocation
        elif key.startswith(QUOTA_KEYS):
            quota = decode(kv, QuotaRecord)
            self.quotas[quota.principal] = quota
            self._by_key[key] = quota

    def _regrant(self, principal: Principal) -> None:
        """Two bindings can grant the same; one of them may be left."""
        text = str(principal)
        left = {each.grant for each in self.bindings.values() if each.principal == text}
        if left:
            self.policies.grants[principal] = left
        else:
            self.policies.grants.pop(principal, None)


T_Key = TypeVar("T_Key")


def _revocation_key(kind: str, number: str) -> str:
    return f"{REVOCATION_KEYS}{kind}/{_hash(number)}"


def _quota_principal(text: str) -> str:
    return text if text == EVERYONE else str(Principal.parse(check_text(text, "principal")))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
