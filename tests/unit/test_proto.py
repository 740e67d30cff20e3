"""The committed code is what the .proto files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import protos


def test_generated_code_matches_the_proto_files(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    protos.generate(tmp_path)
    made = {path.name: path.read_text() for path in (tmp_path / "sava" / "proto").iterdir()}
    assert made
    committed = {path.name: path.read_text() for path in protos.PROTOS.glob("*_pb2*.py*")}
    differing = sorted(
        name for name in made.keys() | committed.keys() if made.get(name) != committed.get(name)
    )
    assert not differing, f"run `make proto`, remove what has no .proto file any more: {differing}"
