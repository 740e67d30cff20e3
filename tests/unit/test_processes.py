"""Children of asynchronous tests."""

from __future__ import annotations

import io
import os
import subprocess
import sys

from tests.support.processes import Child


class Retaken(io.FileIO):
    """Its number belongs to another file as soon as it is closed."""

    taken = -1

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.taken = os.open(os.devnull, os.O_RDONLY)


async def test_the_pipe_of_a_child_is_closed_once() -> None:
    """Once in a few thousand tests, a gRPC channel could not connect: Bad file descriptor."""
    source, ours = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", "print('here')"], stdout=ours)  # noqa: ASYNC220
    os.close(ours)
    process.stdout = pipe = Retaken(source)
    child = Child(process)
    await child.connect(1 << 16)

    assert child.stdout is not None
    assert await child.stdout.read() == b"here\n"
    assert await child.wait() == 0
    assert pipe.taken == source
    os.fstat(pipe.taken)
    os.close(pipe.taken)
