"""Conditions of transactions, in words."""

from __future__ import annotations

from sava.metadata.commands import Compare, Relation, Target


def absent(key: str) -> Compare:
    return Compare(key, Target.VERSION, Relation.EQUAL, 0)


def present(key: str) -> Compare:
    return Compare(key, Target.VERSION, Relation.GREATER, 0)


def unchanged(key: str, revision: int) -> Compare:
    """Since it had this ``mod_revision``; 0: since it was absent."""
    return Compare(key, Target.MOD_REVISION, Relation.EQUAL, revision)
