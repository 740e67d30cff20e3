"""Guard: stands before every handler of the client port and the admin port.

    call ──▶ who is it? ──▶ may it? (the table) ──▶ forwarding ──▶ handler

**Who is it?** A bearer token of an issuer that is configured; else the certificate of the connection; else
``anonymous``, where that is allowed. A token that is not valid refuses the call, whatever is allowed without
one. Nothing else that a caller sends says who it is.

**Forwarded calls.** A broker that passes a call on says so in the header ``sava-forwarded``: which broker it
is, whose call it passes on, and when, with a MAC by the cluster's secret over all that and the method. A
header without a right MAC is not looked at: it comes from a stranger, who gets what strangers get. The token
itself does not travel. The broker that answers decides by the principal as the first broker has, by its own
copy of roles and bindings. ``Streams.Append`` and a few others are for what brokers do themselves
(``is_own``), with and without roles.

**Open streams** are looked through when roles or bindings change, or a credential is revoked, and end when it
does; the broker that passes a stream on and the one that serves it do so each. So what was taken away is
taken away within the time of one watch event.

Without roles (``auth`` neither has ``tls`` nor ``tokens``) nothing of this runs but the check of that header.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
from grpc import aio

from sava.errors import RetryableError, SavaError
from sava.security import calls, principal
from sava.security.audit import Audit, AuditedCall
from sava.security.calls import Call, Credential
from sava.security.certificates import principal_of, read_certificate
from sava.security.cluster_secret import ClusterSecret
from sava.security.delegation import CheckMac, DelegationInvalid, IsDelegated, is_delegation, verified
from sava.security.permissions import (
    CLUSTER,
    TABLE,
    Authorizer,
    CallAccess,
    GrantScope,
    Need,
    On,
    Permission,
    PermissionDenied,
    Resource,
    Row,
    Unauthenticated,
    denied,
    subject_resource,
)
from sava.security.principal import ANONYMOUS, BROKER, Principal
from sava.security.store import CERTIFICATE, TOKEN, SecurityPolicies, SecurityPolicyInvalid
from sava.security.tokens import TokenInvalid, TokenVerifier
from sava.tasks import spawn
from sava.topics.errors import OwnedByAnother
from sava.topics.names import TopicName, check_name

log = logging.getLogger(__name__)

FORWARDED: Final = "sava-forwarded"
AUTHORIZATION: Final = "authorization"
METRICS_PAGE: Final = "/metrics"
"""Of the HTTP port, as the audit names it."""
REQUEST_ID: Final = "x-request-id"
"""By which a caller finds its call in the audit."""
PURPOSE: Final = b"forwarded call"
MAX_AGE_S: Final = 30.0
"""Between a broker's clock when it passes a call on and the other's when it gets it."""
MAX_HEADER_CHARS: Final = 4096
OPENING_S: Final = 1.0
"""For the opening of a stream that is refused whatever it says."""
HOLD_S: Final = 1.0
"""Before a stream of Danube's protocol is refused: its client opens it again at once."""
LOOKUP: Final = (Permission.LOOKUP,)
MANAGE: Final = (Permission.MANAGE_TOPIC,)
CLAIM_LOOK_S: Final = 1.0
STEP: Final = 200
"""Streams that are looked through between two turns of the event loop."""
DENIALS_PER_S: Final = 5
"""Lines of the log."""

Metadata = tuple[tuple[str, str | bytes], ...]
Handler = Callable[[Any, Any], Awaitable[Any]]
AnswerError = Callable[[Any, SavaError], Awaitable[NoReturn]]
"""Ends a call with an error."""


class ClocksDiffer(RetryableError):
    """A broker has passed a call on, and its clock is too far from this one's."""


# -- the header of forwarded calls -----------------------------------------------------------------


class _Passed(msgspec.Struct, frozen=True, array_like=True):
    """What a broker says of a call that it passes on, or makes."""

    broker: int
    at: float
    is_own: bool
    kind: str
    name: str
    credential: str
    credential_id: str
    expires_at: float


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_Passed).decode


class BrokerIdentity:
    """By what this broker is known to the others of its cluster, and they to it."""

    def __init__(self, broker: int, secret: ClusterSecret) -> None:
        self.broker = broker
        self._secret = secret

    def pass_on(self, method: str, call: Call) -> tuple[str, str]:
        """The header by which the running call is made again at another broker."""
        who, shown = call.principal, call.credential
        return self._header(method, who, shown, is_own=call.is_own)

    def own(self, method: str) -> tuple[str, str]:
        """The header of a call that this broker makes for itself."""
        return self._header(method, Principal(BROKER, str(self.broker)), calls.NO_CREDENTIAL, is_own=True)

    def _header(self, method: str, who: Principal, shown: Credential, *, is_own: bool) -> tuple[str, str]:
        said = _encode(
            _Passed(
                self.broker,
                time.time(),
                is_own,
                who.kind,
                who.name,
                shown.kind,
                shown.id,
                shown.expires_at,
            )
        )
        mac = self._secret.mac(PURPOSE, method.encode() + b"\n" + said)
        return FORWARDED, f"{base64.urlsafe_b64encode(said).decode()}.{mac.hex()}"

    def read(self, method: str, header: str | bytes, authorizer: Authorizer | None) -> Call | None:
        """The call that another broker passes on. None: no broker has made this header. Raises
        ClocksDiffer."""
        if not isinstance(header, str) or len(header) > MAX_HEADER_CHARS:
            return None
        text, _, mac = header.partition(".")
        try:
            said = base64.urlsafe_b64decode(text)
            if not self._secret.verify(PURPOSE, method.encode() + b"\n" + said, bytes.fromhex(mac)):
                return None
            passed = _decode(said)
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            return None
        lag = time.time() - passed.at
        if abs(lag) > MAX_AGE_S:
            raise ClocksDiffer(
                f"the clocks of brokers {passed.broker} and {self.broker} differ by {abs(lag):.0f} s; keep "
                "them together, for example by NTP"
            )
        return Call(
            Principal(passed.kind, passed.name),
            Credential(passed.credential, passed.credential_id, passed.expires_at),
            authorizer,
            forwarder=passed.broker,
            is_own=passed.is_own,
        )


# -- who calls -------------------------------------------------------------------------------------


class Delegations(NamedTuple):
    """By what runners act for the creators of the pipelines that they have claimed
    (``sava.security.delegation``)."""

    check: CheckMac
    is_delegated: IsDelegated

    def read(self, token: str) -> tuple[Principal, Credential]:
        """Raises DelegationInvalid."""
        said = verified(token, self.check, self.is_delegated)
        return said.principal, Credential(calls.DELEGATION, f"{said.pipeline}/{said.claim}")

    def is_held(self, call: Call) -> bool:
        """Whether the claim that the call was made by is held still."""
        pipeline, _, claim = call.credential.id.rpartition("/")
        return self.is_delegated(str(call.principal), pipeline, int(claim))


class Rules(NamedTuple):
    """What a broker that enforces roles decides by."""

    authorizer: Authorizer
    policies: SecurityPolicies
    verifier: TokenVerifier | None
    """None: no tokens are accepted."""
    cluster_name: str
    allows_anonymous: bool
    has_certificates: bool
    """Whether the ports speak TLS, so that callers may show one."""
    delegations: Delegations

    async def identify(self, context: Any, authorization: str | bytes) -> tuple[Principal, Credential]:
        """Raises Unauthenticated, KeysUnavailable."""
        if authorization:
            who, shown = await self._bearer(authorization)
        else:
            who, shown = self._certified(context)
        if shown.kind != "none" and self.policies.is_revoked(shown.kind, shown.id):
            raise Unauthenticated(f"the {shown.kind} of {who} is revoked")
        return who, shown

    async def _bearer(self, authorization: str | bytes) -> tuple[Principal, Credential]:
        text = authorization if isinstance(authorization, str) else ""
        scheme, _, token = text.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("the authorization of the call is no bearer token")
        if is_delegation(token):
            try:
                return self.delegations.read(token)
            except DelegationInvalid as error:
                raise Unauthenticated(str(error)) from error
        if self.verifier is None:
            raise Unauthenticated("this broker accepts no tokens: auth.tokens names no issuer")
        try:
            verified = await self.verifier.authenticate(token)
        except TokenInvalid as error:
            raise Unauthenticated(str(error)) from error
        return verified.principal, Credential(TOKEN, verified.token_id, verified.expires_at)

    def _certified(self, context: Any) -> tuple[Principal, Credential]:
        if self.has_certificates:
            for pem in context.auth_context().get("x509_pem_cert", ()):
                certificate = read_certificate(pem)
                who = principal_of(certificate, self.cluster_name)
                if who is not None:
                    expires_at = certificate.not_after.timestamp()
                    return who, Credential(CERTIFICATE, str(certificate.serial), expires_at)
        return ANONYMOUS, calls.NO_CREDENTIAL


# -- what handlers ask ---------------------------------------------------------------------------


def require_topic(permission: Permission, name: TopicName) -> None:
    """For a topic that the request does not name. Raises PermissionDenied."""
    call = calls.current.get()
    if call.authorizer is not None:
        call.require((permission,), _topic_of(name))
        principal.is_admin.set(call.may(MANAGE, _topic_of(name)))


def may_see(name: TopicName) -> bool:
    """Whether the topic is in the caller's lists."""
    call = calls.current.get()
    return call.authorizer is None or call.may(LOOKUP, _topic_of(name))


def may_see_namespace(namespace: str) -> bool:
    return calls.current.get().may_within(LOOKUP, namespace)


def may_see_subject(subject: str) -> bool:
    return calls.current.get().may((*LOOKUP, Permission.MANAGE_SCHEMA), subject_resource(subject))


@lru_cache(maxsize=8192)
def _topic_of(name: TopicName) -> Resource:
    return Resource(GrantScope.TOPIC, str(name.head))


# -- what a call is about --------------------------------------------------------------------------


@lru_cache(maxsize=8192)
def _topic(text: str) -> Resource:
    return _topic_of(TopicName.parse(text))


@lru_cache(maxsize=8192)
def _namespace(text: str) -> Resource:
    return Resource(GrantScope.NAMESPACE, check_name(text, "namespace"))


def resources_of(need: Need, request: Any) -> Iterator[Resource]:
    """What the request is about, as far as this need is concerned. Raises InvalidName."""
    on = need.on
    if on is On.CLUSTER:
        yield CLUSTER
        return
    for text in need.names(request):
        if not text and need.otherwise is On.CLUSTER:
            yield CLUSTER
        elif not text and need.is_optional:
            continue
        elif on is On.TOPIC or (on is On.SCOPE and text.startswith("/")):
            yield _topic(text)
        elif on is On.SUBJECT:
            yield subject_resource(text)
        else:
            yield _namespace(text)


def resource_named(scope: str, text: str) -> Resource:
    """As people name it: ``topic`` and ``/sales/orders``. Raises SecurityPolicyInvalid, InvalidName."""
    match scope:
        case GrantScope.CLUSTER if not text:
            return CLUSTER
        case GrantScope.NAMESPACE:
            return _namespace(text)
        case GrantScope.TOPIC:
            return _topic(text)
        case _:
            raise SecurityPolicyInvalid(
                f"{scope[:50]!a} {text[:50]!a} is no resource; name topic /sales/orders, namespace sales, or "
                "cluster and nothing"
            )


class _OpenStream:
    """A stream that is served or passed on here."""

    def __init__(self, call: Call, task: asyncio.Task[Any]) -> None:
        self.call = call
        self.error: SavaError | None = None
        self._task = task
        self._timer: asyncio.TimerHandle | None = None
        expires_at = call.credential.expires_at
        if expires_at:
            left = max(expires_at - time.time(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(left, self._expired)

    def end(self, error: SavaError) -> None:
        if self.error is None:
            self.error = error
            self._task.cancel()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expired(self) -> None:
        credential = self.call.credential
        self.end(Unauthenticated(f"the {credential.kind} of {self.call.principal} has expired"))


class Guard:
    """Of one broker. Owned by the event loop."""

    def __init__(
        self, identity: BrokerIdentity, rules: Rules | None = None, audit: Audit | None = None
    ) -> None:
        """``rules``: None where every caller may do everything."""
        self.identity = identity
        self.rules = rules
        self.audit = audit
        self.denials = 0
        """Calls that were denied, and streams that were ended."""
        self._streams: set[_OpenStream] = set()
        self._rechecks: asyncio.Task[None] | None = None
        self._is_stale = False
        self._told_at, self._told = 0.0, 0
        self._untold = 0
        if rules is not None:
            rules.policies.listen(self._policies_changed)

    # -- handlers, guarded ---------------------------------------------------------------------

    def unary(self, method: str, inner: Handler, answer: AnswerError) -> Handler:
        row = TABLE.get(method)
        if self.rules is None:
            return self._unruled(method, row, inner, answer)

        async def guarded(request: Any, context: Any) -> Any:
            try:
                call = await self._enter(method, row, context)
                self._check(method, row, request, call, context)
            except SavaError as error:
                await answer(context, error)
            return await inner(request, context)

        return guarded

    def server_stream(self, method: str, inner: Handler, answer: AnswerError) -> Handler:
        row = TABLE.get(method)
        if self.rules is None:
            return self._unruled(method, row, inner, answer)

        async def guarded(request: Any, context: Any) -> None:
            try:
                call = await self._enter(method, row, context)
                self._check(method, row, request, call, context)
            except SavaError as error:
                if row is not None and row.access is CallAccess.SESSION:
                    await asyncio.sleep(HOLD_S)
                await answer(context, error)
            await self._run(method, call, inner(request, context), context, answer)

        return guarded

    def both_ways(self, method: str, inner: Handler, answer: AnswerError) -> Handler:
        """The opening is checked when it is read: ``opening_check``."""
        row = TABLE.get(method)
        if self.rules is None:
            return self._unruled(method, row, inner, answer)

        async def guarded(request: Any, context: Any) -> None:
            try:
                call = await self._enter(method, row, context)
            except SavaError as error:
                # A stream that ends while its client writes the opening fails there with an error of gRPC's
                # own, and this one is lost.
                with suppress(TimeoutError):
                    async with asyncio.timeout(OPENING_S):
                        await context.read()
                await answer(context, error)
            await self._run(method, call, inner(request, context), context, answer)

        return guarded

    def opening_check(self, method: str) -> Callable[[Any, Any], None] | None:
        """For the first request of a stream and its context. Raises PermissionDenied, InvalidName. None:
        nothing is to be checked."""
        row = TABLE.get(method)
        if self.rules is None:
            return None
        return lambda request, context: self._check(method, row, request, calls.current.get(), context)

    def _unruled(self, method: str, row: Row | None, inner: Handler, answer: AnswerError) -> Handler:
        """Where every caller may do everything but what is for brokers."""
        is_for_brokers = row is not None and row.access is CallAccess.BROKERS

        async def marked(request: Any, context: Any) -> Any:
            call = None
            for key, value in context.invocation_metadata() or ():
                if key == FORWARDED:
                    try:
                        call = self.identity.read(method, value, None)
                    except ClocksDiffer as error:
                        await answer(context, error)
                    if call is not None:
                        calls.current.set(call)
            if is_for_brokers and (call is None or not call.is_own):
                await answer(context, self._not_a_broker(method, call or calls.EVERYTHING, context))
            return await inner(request, context)

        return marked

    # -- one call ------------------------------------------------------------------------------

    async def _enter(self, method: str, row: Row | None, context: Any) -> Call:
        """Who calls; known to the handler from here on. Raises Unauthenticated, KeysUnavailable,
        ClocksDiffer."""
        rules = self.rules
        assert rules is not None
        call: Call | None = None
        authorization: str | bytes = ""
        request_id = ""
        for key, value in context.invocation_metadata() or ():
            if key == FORWARDED:
                call = self.identity.read(method, value, rules.authorizer)
            elif key == AUTHORIZATION:
                authorization = value
            elif key == REQUEST_ID and isinstance(value, str):
                request_id = value
        if call is None:
            try:
                who, shown = await rules.identify(context, authorization)
                is_open = row is not None and row.access is CallAccess.OPEN
                if shown.kind == "none" and not rules.allows_anonymous and not is_open:
                    raise Unauthenticated(
                        "this cluster wants to know its callers: send a token (SAVA_TOKEN, "
                        "SAVA_TOKEN_FILE), or show a certificate of its authority"
                    )
            except Unauthenticated as error:
                stranger = Call(peer=context.peer(), request_id=request_id)
                self._denied(method, stranger, (), error)
                raise
            call = Call(who, shown, rules.authorizer)
        call.peer = context.peer()
        call.request_id = request_id
        call.method = method
        calls.current.set(call)
        principal.current.set(call.principal)
        return call

    def _check(self, method: str, row: Row | None, request: Any, call: Call, context: Any) -> None:
        """Whether the call may be made. Raises PermissionDenied, InvalidName."""
        if call.is_own:
            return
        if row is None:
            error = PermissionDenied(f"{method} is not in the table of permissions")
            self._denied(method, call, (), error)
            raise error
        if row.access is CallAccess.BROKERS:
            raise self._not_a_broker(method, call, context)
        asked: list[Resource] = []
        for need in row.needs:
            if need.when and not getattr(request, need.when):
                continue
            try:
                self._check_need(need, request, call, asked)
            except PermissionDenied as error:
                self._denied(method, call, tuple(map(str, asked)), error)
                raise
        topics = [each for each in asked if each.scope is GrantScope.TOPIC]
        principal.is_admin.set(bool(topics) and all(call.may(MANAGE, each) for each in topics))
        if self.audit is not None and not call.forwarder and self.audit.wants(is_change=row.always_audited):
            # One that another broker has passed on is in that broker's audit.
            about = tuple(dict.fromkeys(map(str, asked)))
            self.audit.allowed(_audited(method, call, about, is_change=row.always_audited))

    def _check_need(self, need: Need, request: Any, call: Call, asked: list[Resource]) -> None:
        rules = self.rules
        assert rules is not None
        if need.on is On.ANYWHERE:
            asked.append(CLUSTER)
            if not call.may_within(need.any_of, ""):
                raise denied(call.principal, need.any_of, CLUSTER)
            return
        for resource in resources_of(need, request):
            asked.append(resource)
            if need.on is On.WITHIN:
                if not call.may_within(need.any_of, resource.name):
                    raise denied(call.principal, need.any_of, resource)
            else:
                call.require(need.any_of, resource)

    def _not_a_broker(self, method: str, call: Call, context: Any) -> PermissionDenied:
        error = PermissionDenied(f"{method} is for brokers of this cluster alone")
        self._denied(method, Call(call.principal, peer=context.peer()), (), error)
        return error

    def refused(self, error: SavaError) -> None:
        """The running call ends with this error. What a handler denies is recorded as what is denied before
        it: another's producer, subscription or session is no less out of bounds than another's topic."""
        if self.rules is None or not isinstance(error, PermissionDenied | OwnedByAnother):
            return
        call = calls.current.get()
        if call.authorizer is not None and not call.is_denied:
            about = tuple(dict.fromkeys(str(resource) for _, resource in call.required))
            self._denied(call.method, call, about, error)

    def _denied(self, method: str, call: Call, about: tuple[str, ...], error: SavaError) -> None:
        self.denials += 1
        call.is_denied = True
        if self.audit is not None and self.audit.level != "off":
            self.audit.denied(_audited(method, call, about), str(error))
            return
        now = time.monotonic()
        if now - self._told_at >= 1.0:
            self._told_at, self._told = now, 0
        if self._told >= DENIALS_PER_S:
            self._untold += 1
            return
        self._told += 1
        log.warning(
            "security: denied principal=%s peer=%s method=%s reason=%s not_shown=%d",
            *(call.principal, call.peer, method, error, self._untold),
        )
        self._untold = 0

    async def check_metrics(self, authorization: str) -> None:
        """Whether a caller of the HTTP port may read figures. Raises Unauthenticated, PermissionDenied,
        KeysUnavailable."""
        rules = self.rules
        if rules is None:
            return
        call = Call()
        try:
            if not authorization:
                raise Unauthenticated("this page needs a token: authorization: Bearer TOKEN")
            call.principal, call.credential = await rules.identify(None, authorization)
            rules.authorizer.check(call.principal, (Permission.CLUSTER_READ,), CLUSTER)
        except (Unauthenticated, PermissionDenied) as error:
            self._denied(METRICS_PAGE, call, (str(CLUSTER),), error)
            raise

    # -- open streams --------------------------------------------------------------------------

    async def _run(
        self, method: str, call: Call, work: Awaitable[Any], context: Any, answer: AnswerError
    ) -> None:
        """Until the handler is done, or the stream's caller may not have it any more."""
        task = asyncio.current_task()
        assert task is not None
        stream = _OpenStream(call, task)
        self._streams.add(stream)
        if call.credential.kind == calls.DELEGATION:
            self._watch_claim(stream)
        try:
            await work
        except asyncio.CancelledError:
            if stream.error is None:
                raise
            task.uncancel()
        finally:
            stream.close()
            self._streams.discard(stream)
        if stream.error is not None:
            self._denied(method, call, tuple(str(about) for _, about in call.required), stream.error)
            with suppress(aio.UsageError):  # it has just ended by itself
                await answer(context, stream.error)

    def _policies_changed(self) -> None:
        self._is_stale = True
        if self._rechecks is None and self._streams:
            self._rechecks = spawn(self._recheck(), name="guard: looking through open streams")

    async def _recheck(self) -> None:
        try:
            while self._is_stale:
                self._is_stale = False
                for number, stream in enumerate(tuple(self._streams)):
                    if not number % STEP:
                        await asyncio.sleep(0)
                    if stream in self._streams:  # it may have ended meanwhile
                        self._recheck_one(stream)
        finally:
            self._rechecks = None

    def _watch_claim(self, stream: _OpenStream) -> None:
        """End a stream that a runner has opened for a pipeline, when it does not hold the claim any more."""
        if stream not in self._streams:
            return
        assert self.rules is not None
        if self.rules.delegations.is_held(stream.call):
            asyncio.get_running_loop().call_later(CLAIM_LOOK_S, self._watch_claim, stream)
        else:
            stream.end(Unauthenticated(str(DelegationInvalid())))

    def _recheck_one(self, stream: _OpenStream) -> None:
        rules, call = self.rules, stream.call
        assert rules is not None
        shown = call.credential
        if rules.policies.is_revoked(shown.kind, shown.id):
            stream.end(Unauthenticated(f"the {shown.kind} of {call.principal} was revoked"))
            return
        for any_of, resource in call.required:
            if not call.may(any_of, resource):
                stream.end(denied(call.principal, any_of, resource))
                return


@cache
def _needed(method: str) -> str:
    row = TABLE.get(method)
    return "" if row is None else ", ".join(dict.fromkeys(" or ".join(need.any_of) for need in row.needs))


def _audited(method: str, call: Call, about: tuple[str, ...], *, is_change: bool = False) -> AuditedCall:
    return AuditedCall(
        call.principal,
        method,
        resource=", ".join(about),
        permission=_needed(method),
        is_change=is_change,
        credential=call.credential.kind,
        token_id=call.credential.id,
        peer=call.peer,
        request_id=call.request_id,
    )
