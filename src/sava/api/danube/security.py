"""Danube's ``SecurityAdmin``: roles and bindings as ``danube-admin`` shows and changes them, on Sava's own.

Danube's permissions are Sava's under other names. Those that Danube does not know are shown by Sava's name,
and taken by it:

    Lookup            lookup                ManageNamespace   manage-namespace
    Produce           produce               ManageTopic       manage-topic
    Consume           consume               ManageSchema      manage-schema
    Replicate         replicate             ManageBroker      cluster-read
                                            ManageCluster     cluster-admin

``ManageBroker`` moves topics in Danube, too. Here that needs ``ManageTopic`` on the cluster: the name of one
permission would grant two.

A binding of Danube's has a name that its maker chose, and several roles. It is kept as one of Sava's for each
role, all of which carry the name. Creating it again replaces it. One that ``sava auth`` made is shown
with its id for a name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sava.api.danube.wire import required
from sava.proto import danube_admin_pb2 as pb
from sava.proto import danube_admin_pb2_grpc as rpc
from sava.security.permissions import ROLES, GrantScope, Permission
from sava.security.principal import Principal, current
from sava.security.store import (
    BindingRecord,
    BindingUnknown,
    RoleUnknown,
    SecurityPolicies,
    SecurityPolicyInvalid,
    check_binding,
    check_text,
)

# ruff: noqa: N802 (gRPC names the methods)

_OURS: Final = {
    "Lookup": Permission.LOOKUP,
    "Produce": Permission.PRODUCE,
    "Consume": Permission.CONSUME,
    "Replicate": Permission.REPLICATE,
    "ManageNamespace": Permission.MANAGE_NAMESPACE,
    "ManageTopic": Permission.MANAGE_TOPIC,
    "ManageSchema": Permission.MANAGE_SCHEMA,
    "ManageBroker": Permission.CLUSTER_READ,
    "ManageCluster": Permission.CLUSTER_ADMIN,
}
_DANUBES: Final = {ours.value: name for name, ours in _OURS.items()}


class SecurityAdmin(rpc.SecurityAdminServicer):
    def __init__(self, security: SecurityPolicies) -> None:
        self._security = security

    # -- roles -------------------------------------------------------------------------------

    async def CreateRole(self, request: pb.CreateRoleRequest, context: Any) -> pb.CreateRoleResponse:
        name = required(request.role.name, "role.name")
        permissions = tuple(str(_OURS.get(each, each)) for each in request.role.permissions)
        await self._security.set_role(name, permissions, by=current.get())
        return pb.CreateRoleResponse(success=True)

    async def GetRole(self, request: pb.GetRoleRequest, context: Any) -> pb.GetRoleResponse:
        found = next((role for role in self._roles() if role.name == request.name), None)
        if found is None:
            raise RoleUnknown(f"role {request.name[:50]!a} does not exist")
        return pb.GetRoleResponse(role=found)

    async def ListRoles(self, request: pb.Empty, context: Any) -> pb.ListRolesResponse:
        return pb.ListRolesResponse(roles=self._roles())

    async def DeleteRole(self, request: pb.DeleteRoleRequest, context: Any) -> pb.DeleteRoleResponse:
        await self._security.delete_role(required(request.name, "name"))
        return pb.DeleteRoleResponse(success=True)

    def _roles(self) -> list[pb.RoleDefinition]:
        built_in = [_role(name, permissions, system=True) for name, permissions in ROLES.items()]
        own = [_role(name, record.permissions) for name, record in sorted(self._security.roles.items())]
        return built_in + own

    # -- bindings ----------------------------------------------------------------------------

    async def CreateBinding(self, request: pb.CreateBindingRequest, context: Any) -> pb.CreateBindingResponse:
        wanted = request.binding
        name = check_text(required(wanted.id, "binding.id"), "binding id")
        if not wanted.role_names:
            raise SecurityPolicyInvalid("binding.role_names is missing: a binding gives at least one role")
        who = Principal(
            required(wanted.principal_type, "binding.principal_type"),
            required(wanted.principal_name, "binding.principal_name"),
        )
        records = {
            record.id: record
            for role in wanted.role_names
            for record in [
                check_binding(
                    BindingRecord(
                        principal=str(who),
                        role=role,
                        scope=wanted.scope,
                        resource=_resource(wanted.scope, wanted.resource_name),
                        name=name,
                    )
                )
            ]
        }
        former = self._named(name)
        for record in records.values():
            await self._security.create_binding(record, by=current.get())
        for number in former.keys() - records.keys():
            await self._security.delete_binding(number)
        return pb.CreateBindingResponse(success=True)

    async def GetBinding(self, request: pb.GetBindingRequest, context: Any) -> pb.GetBindingResponse:
        found = self._found(request.scope, request.resource_name, request.binding_id)
        return pb.GetBindingResponse(binding=_bindings(found.items())[0])

    async def ListBindings(self, request: pb.ListBindingsRequest, context: Any) -> pb.ListBindingsResponse:
        about = request.scope, _resource(request.scope, request.resource_name)
        return pb.ListBindingsResponse(
            bindings=_bindings(
                (number, each)
                for number, each in self._security.bindings.items()
                if (each.scope, each.resource) == about
            )
        )

    async def ListAllBindings(self, request: pb.Empty, context: Any) -> pb.ListBindingsResponse:
        return pb.ListBindingsResponse(bindings=_bindings(self._security.bindings.items()))

    async def DeleteBinding(self, request: pb.DeleteBindingRequest, context: Any) -> pb.DeleteBindingResponse:
        for number in self._found(request.scope, request.resource_name, request.binding_id):
            await self._security.delete_binding(number)
        return pb.DeleteBindingResponse(success=True)

    def _named(self, name: str) -> dict[str, BindingRecord]:
        """By their ids."""
        return {
            number: each
            for number, each in self._security.bindings.items()
            if each.name == name or (not each.name and number == name)
        }

    def _found(self, scope: str, resource: str, name: str) -> dict[str, BindingRecord]:
        """Raises BindingUnknown, SecurityPolicyInvalid."""
        about = scope, _resource(scope, resource)
        found = {
            number: each for number, each in self._named(name).items() if (each.scope, each.resource) == about
        }
        if not found:
            raise BindingUnknown(f"binding {name[:50]!a} of {scope} {about[1][:50]} does not exist")
        return found


def _resource(scope: str, text: str) -> str:
    """As Sava writes it: Danube's tools name the cluster as well, and a namespace with or without a slash.
    Raises SecurityPolicyInvalid."""
    match scope:
        case GrantScope.CLUSTER:
            return ""
        case GrantScope.NAMESPACE:
            return text.removeprefix("/")
        case GrantScope.TOPIC:
            return text
        case _:
            raise SecurityPolicyInvalid(
                f"scope {scope[:50]!a} does not exist; there are {', '.join(GrantScope)}"
            )


def _role(name: str, permissions: Iterable[str], *, system: bool = False) -> pb.RoleDefinition:
    held = set(permissions)
    shown = [_DANUBES.get(each.value, each.value) for each in Permission if each in held]
    return pb.RoleDefinition(name=name, permissions=shown, system=system)


def _bindings(records: Iterable[tuple[str, BindingRecord]]) -> list[pb.BindingDefinition]:
    """Those of one name, principal and resource are one of Danube's."""
    found: dict[tuple[str, ...], pb.BindingDefinition] = {}
    for number, each in sorted(records, key=lambda item: (item[1].name or item[0], item[1].role)):
        who = Principal.parse(each.principal)
        key = each.name or number, each.principal, each.scope, each.resource
        binding = found.get(key)
        if binding is None:
            binding = found[key] = pb.BindingDefinition(
                id=key[0],
                principal_type=who.kind,
                principal_name=who.name,
                scope=each.scope,
                resource_name=each.resource,
            )
        binding.role_names.append(each.role)
    return list(found.values())
