"""The core is deterministic: no I/O, no clock, no chance, no order that depends on the process."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import TypeGuard

import pytest

import sava.raft

SOURCES = sorted(Path(sava.raft.__file__).parent.glob("*.py"))
ALLOWED = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "itertools",
    "msgspec",
    "sava",
    "typing",
}


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_imports_only_what_cannot_do_io_or_tell_time(path):
    for node in ast.walk(_tree(path)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] in ALLOWED, name
            assert not name.startswith("sava.") or name.startswith(("sava.raft", "sava.errors")), name


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_no_float_no_hash_order_no_identity(path):
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Constant):
            assert not isinstance(node.value, float), f"line {node.lineno}"
        if isinstance(node, ast.BinOp):
            assert not isinstance(node.op, ast.Div), f"line {node.lineno}: use //"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"id", "hash", "float", "open", "print", "input"}, (
                f"line {node.lineno}"
            )


def _is_set(node: ast.AST) -> TypeGuard[ast.expr]:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"set", "frozenset"}
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_sets_are_only_sorted_counted_or_asked(path):
    """A set may stand inside sorted(...) or len(...); anything else could iterate it in the process's own
    order."""
    tree = _tree(path)
    fine = {
        argument
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"sorted", "len"}
        for argument in node.args
    }
    for node in ast.walk(tree):
        if _is_set(node):
            assert node in fine, f"{path.name}:{node.lineno} uses a set in an order that is not its own"


STORY = """
import sys
sys.path[:0] = {paths!r}
import hashlib
from random import Random
from tests.unit.raft.harness import Cluster
from sava.raft import MembershipChange
cluster = Cluster([1, 2, 3, 4, 5], learners=[6, 7], seed=9)
rng = Random(4)
for n in range(60):
    cluster.drop = lambda m: rng.random() < 0.15
    cluster.tick(rng.randrange(1, 6))
    leader = cluster.leader()
    if leader:
        try:
            cluster.propose(leader, b"%d" % n)
            if n % 10 == 5:
                cluster[leader].core.change_membership(MembershipChange(promote=(6,), remove=(5,)))
        except Exception as refusal:
            pass
print(hashlib.sha256(repr([(k, n.outputs) for k, n in cluster.nodes.items()]).encode()).hexdigest())
"""


def test_same_inputs_same_outputs_on_every_hash_seed():
    root = Path(__file__).parents[3]
    paths = [str(Path(sava.__file__).parents[1]), str(root)]
    script = STORY.format(paths=paths)
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(digests) == 1


def test_public_names():
    assert sorted(sava.raft.__all__) == sorted(set(sava.raft.__all__))
    for name in sava.raft.__all__:
        assert hasattr(sava.raft, name)
    from sava.raft import core

    for name in (
        "Checkpoint",
        "ChunkSend",
        "ChunkWrite",
        "Output",
        "PeerStatus",
        "ReadReady",
        "Recovered",
        "Role",
        "Status",
    ):
        assert getattr(core, name) is getattr(sava.raft, name)
