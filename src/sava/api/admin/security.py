"""The service ``Security`` of the admin port: who the caller is, and who may do what.

A translation: what roles, bindings and revocations are, and how they change, is in ``sava.security``. Any
broker answers, and a change is compared and swapped in the metadata store. What a caller reads is this
broker's copy, which is as new as the caller's own last change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from sava.api.messages import from_message, to_message
from sava.peers.guard import Guard, resource_named
from sava.proto import security_pb2 as pb
from sava.proto import security_pb2_grpc as rpc
from sava.security import calls
from sava.security.permissions import CLUSTER, ROLES, Permission, denied
from sava.security.principal import Principal, current
from sava.security.store import (
    BindingRecord,
    QuotaRecord,
    RevocationRecord,
    RoleRecord,
    SecurityPolicies,
    SecurityPolicyInvalid,
)

# ruff: noqa: N802 (gRPC names the methods)


class SecurityService(rpc.SecurityServicer):
    def __init__(self, security: SecurityPolicies, guard: Guard, service: str) -> None:
        """``service``: where clients reach this broker."""
        self._service = service
        self._security = security
        self._guard = guard

    # -- the caller --------------------------------------------------------------------------

    async def WhoAmI(self, request: pb.WhoAmIRequest, context: Any) -> pb.WhoAmIResponse:
        call, rules = calls.current.get(), self._guard.rules
        who = call.principal
        return pb.WhoAmIResponse(
            principal=str(who),
            credential=call.credential.kind,
            is_super_admin=rules is not None and who in rules.authorizer.super_admins,
            is_enforced=rules is not None,
            bindings=self._bindings(str(who)),
            expires_ms=round(call.credential.expires_at * 1000),
            service=self._service,
        )

    async def CanI(self, request: pb.CanIRequest, context: Any) -> pb.CanIResponse:
        """Of another principal only to those who may see all bindings."""
        call, rules = calls.current.get(), self._guard.rules
        who = Principal.parse(request.principal) if request.principal else call.principal
        resource = resource_named(request.scope, request.resource)
        try:
            permission = Permission(request.permission)
        except ValueError:
            raise SecurityPolicyInvalid(
                f"permission {request.permission[:50]!a} does not exist; there are {', '.join(Permission)}"
            ) from None
        if who != call.principal and not call.may((Permission.CLUSTER_READ,), CLUSTER):
            raise denied(call.principal, (Permission.CLUSTER_READ,), CLUSTER)
        if rules is None:
            return pb.CanIResponse(allowed=True, reason="this cluster lets every caller do everything")
        return pb.CanIResponse(
            allowed=rules.authorizer.allows(who, (permission,), resource),
            reason=rules.authorizer.reason(who, (permission,), resource),
        )

    # -- roles -------------------------------------------------------------------------------

    async def ListRoles(self, request: pb.ListRolesRequest, context: Any) -> pb.ListRolesResponse:
        built_in = [
            pb.Role(name=name, permissions=_words(permissions), built_in=True)
            for name, permissions in ROLES.items()
        ]
        own = [_role(name, record) for name, record in sorted(self._security.roles.items())]
        return pb.ListRolesResponse(roles=built_in + own)

    async def SetRole(self, request: pb.Role, context: Any) -> pb.Role:
        record = await self._security.set_role(request.name, tuple(request.permissions), by=current.get())
        return _role(request.name, record)

    async def DeleteRole(self, request: pb.DeleteRoleRequest, context: Any) -> pb.DeleteRoleResponse:
        await self._security.delete_role(request.name)
        return pb.DeleteRoleResponse()

    # -- bindings ----------------------------------------------------------------------------

    async def ListBindings(self, request: pb.ListBindingsRequest, context: Any) -> pb.ListBindingsResponse:
        who = str(Principal.parse(request.principal)) if request.principal else ""
        return pb.ListBindingsResponse(bindings=self._bindings(who))

    async def CreateBinding(self, request: pb.Binding, context: Any) -> pb.Binding:
        wanted = BindingRecord(
            principal=request.principal, role=request.role, scope=request.scope, resource=request.resource
        )
        return _binding(await self._security.create_binding(wanted, by=current.get()))

    async def DeleteBinding(self, request: pb.DeleteBindingRequest, context: Any) -> pb.DeleteBindingResponse:
        await self._security.delete_binding(request.id)
        return pb.DeleteBindingResponse()

    def _bindings(self, principal: str) -> list[pb.Binding]:
        """Of a principal; empty: of all."""
        found = [each for each in self._security.bindings.values() if principal in ("", each.principal)]
        return [_binding(each) for each in sorted(found, key=msgspec.structs.astuple)]

    # -- revocations -------------------------------------------------------------------------

    async def Revoke(self, request: pb.Revocation, context: Any) -> pb.Revocation:
        wanted = RevocationRecord(
            kind=request.kind, id=request.id, reason=request.reason, until_ms=request.until_ms
        )
        return to_message(pb.Revocation, await self._security.revoke(wanted, by=current.get()))

    async def ListRevocations(
        self, request: pb.ListRevocationsRequest, context: Any
    ) -> pb.ListRevocationsResponse:
        found = sorted(self._security.revoked.values(), key=msgspec.structs.astuple)
        return pb.ListRevocationsResponse(revocations=[to_message(pb.Revocation, each) for each in found])

    async def DeleteRevocation(
        self, request: pb.DeleteRevocationRequest, context: Any
    ) -> pb.DeleteRevocationResponse:
        await self._security.delete_revocation(request.kind, request.id)
        return pb.DeleteRevocationResponse()

    # -- quotas ------------------------------------------------------------------------------

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Any) -> pb.ListQuotasResponse:
        found = sorted(self._security.quotas.values(), key=msgspec.structs.astuple)
        return pb.ListQuotasResponse(quotas=[to_message(pb.Quota, each) for each in found])

    async def SetQuota(self, request: pb.Quota, context: Any) -> pb.Quota:
        return to_message(pb.Quota, await self._security.set_quota(from_message(QuotaRecord, request)))

    async def DeleteQuota(self, request: pb.DeleteQuotaRequest, context: Any) -> pb.DeleteQuotaResponse:
        await self._security.delete_quota(request.principal)
        return pb.DeleteQuotaResponse()


def _words(permissions: Iterable[Permission]) -> list[str]:
    """In the order in which they are defined."""
    return [each.value for each in Permission if each in permissions]


def _role(name: str, record: RoleRecord) -> pb.Role:
    return pb.Role(name=name, permissions=record.permissions)


def _binding(record: BindingRecord) -> pb.Binding:
    return to_message(pb.Binding, record, id=record.id)
