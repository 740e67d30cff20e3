"""``SecurityAdmin``: roles and bindings, which this version does not have. A tool that asks is told so,
instead of getting an empty list that looks like "nobody may do anything" or "everybody may"."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from typing import Any, Final

from sava.api.danube.codes import unimplemented
from sava.proto import danube_admin_pb2 as pb
from sava.proto import danube_admin_pb2_grpc as rpc

TEXT: Final = (
    "roles and bindings are not part of this version; access is by mutual TLS (auth.mode: tls) or open"
)


class SecurityAdmin(rpc.SecurityAdminServicer):
    async def CreateRole(self, request: pb.CreateRoleRequest, context: Any) -> pb.CreateRoleResponse:
        await unimplemented(context, TEXT)

    async def GetRole(self, request: pb.GetRoleRequest, context: Any) -> pb.GetRoleResponse:
        await unimplemented(context, TEXT)

    async def ListRoles(self, request: pb.Empty, context: Any) -> pb.ListRolesResponse:
        await unimplemented(context, TEXT)

    async def DeleteRole(self, request: pb.DeleteRoleRequest, context: Any) -> pb.DeleteRoleResponse:
        await unimplemented(context, TEXT)

    async def CreateBinding(self, request: pb.CreateBindingRequest, context: Any) -> pb.CreateBindingResponse:
        await unimplemented(context, TEXT)

    async def GetBinding(self, request: pb.GetBindingRequest, context: Any) -> pb.GetBindingResponse:
        await unimplemented(context, TEXT)

    async def ListBindings(self, request: pb.ListBindingsRequest, context: Any) -> pb.ListBindingsResponse:
        await unimplemented(context, TEXT)

    async def ListAllBindings(self, request: pb.Empty, context: Any) -> pb.ListBindingsResponse:
        await unimplemented(context, TEXT)

    async def DeleteBinding(self, request: pb.DeleteBindingRequest, context: Any) -> pb.DeleteBindingResponse:
        await unimplemented(context, TEXT)
