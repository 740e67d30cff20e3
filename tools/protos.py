"""Turn every ``.proto`` file of ``sava.proto`` into the Python code next to it: ``make proto``.

The generated files are committed, so that installing Sava needs no compiler; a unit test runs this into an
empty directory and compares. The proto path is the package's parent, so that generated modules import each
other as ``sava.proto.…``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent / "src"
PROTOS = ROOT / "sava" / "proto"


def generate(into: Path) -> None:
    """Write the generated package below ``into`` (as ``sava/proto/*``). Raises RuntimeError when protoc
    refuses."""
    scripts = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--proto_path={ROOT}",
        f"--python_out={into}",
        f"--grpc_python_out={into}",
        f"--mypy_out=quiet:{into}",
        f"--mypy_grpc_out=quiet:{into}",
        *(str(path) for path in sorted(PROTOS.glob("*.proto"))),
    ]
    if status := protoc.main(arguments):
        raise RuntimeError(f"protoc failed with status {status}")


if __name__ == "__main__":
    generate(ROOT)
    sys.stdout.write("generated\n")
