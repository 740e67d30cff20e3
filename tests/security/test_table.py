"""The table of permissions has a row for every call, and each row names fields that are there."""

from __future__ import annotations

import pytest

from sava.security.permissions import TABLE, CallAccess, On, Permission
from tests.security.secured import RPCS, Rpc


def test_every_call_has_a_row_and_every_row_a_call() -> None:
    assert set(RPCS) - set(TABLE) == set(), "calls without a row"
    assert set(TABLE) - set(RPCS) == set(), "rows without a call"


@pytest.mark.parametrize("rpc", RPCS.values(), ids=lambda rpc: rpc.path)
def test_a_row_names_fields_of_its_request(rpc: Rpc) -> None:
    row = TABLE[rpc.path]
    fields = rpc.request.DESCRIPTOR.fields_by_name
    for need in row.needs:
        assert need.any_of
        assert bool(need.field) == (need.on not in (On.CLUSTER, On.ANYWHERE))
        assert not need.when or need.when in fields
        if need.field:
            need.names(rpc.request())
    assert (row.access is CallAccess.CHECKED) == bool(row.needs)


def test_what_changes_rights_or_members_needs_the_administrator() -> None:
    """And is always in the audit trail."""
    for path, row in TABLE.items():
        method = path.rpartition("/")[2]
        if "Security" in path and method.startswith(("Set", "Create", "Delete", "Revoke")):
            assert row.needs[0].any_of == (Permission.CLUSTER_ADMIN,), path
            assert row.needs[0].on is On.CLUSTER
            assert row.always_audited
