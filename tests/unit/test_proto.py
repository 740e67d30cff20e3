"""The committed code is what the .proto files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from sava.proto import generate


def test_generated_code_matches_the_proto_files(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    generate.generate(tmp_path)
    made = {path.name: path.read_text() for path in (tmp_path / "sava" / "proto").iterdir()}
    assert made
    committed = {name: (generate.HERE / name).read_text() for name in made}
    changed = [name for name, text in made.items() if committed[name] != text]
    assert not changed, f"run `make proto`: {changed}"
