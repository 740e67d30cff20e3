"""All mutants, whichever catalogue they are in."""

from __future__ import annotations

from tests.mutants.audit_catalogue import AUDIT_MUTANTS
from tests.mutants.broker_catalogue import BROKER_MUTANTS
from tests.mutants.catalogue import MUTANTS as RAFT_MUTANTS
from tests.mutants.limits_catalogue import LIMITS_MUTANTS
from tests.mutants.mirror_catalogue import MIRROR_MUTANTS
from tests.mutants.outcome_catalogue import OUTCOME_MUTANTS
from tests.mutants.ownership_catalogue import OWNERSHIP_MUTANTS
from tests.mutants.security_catalogue import SECURITY_MUTANTS
from tests.mutants.storage_catalogue import STORAGE_MUTANTS
from tests.mutants.suspicion_catalogue import SUSPICION_MUTANTS

MUTANTS = (
    *RAFT_MUTANTS,
    *MIRROR_MUTANTS,
    *STORAGE_MUTANTS,
    *BROKER_MUTANTS,
    *OUTCOME_MUTANTS,
    *OWNERSHIP_MUTANTS,
    *SUSPICION_MUTANTS,
    *LIMITS_MUTANTS,
    *SECURITY_MUTANTS,
    *AUDIT_MUTANTS,
)
