"""How long tests wait for what must come.

Only a test that fails waits so long, so the bound is generous: it stands for "never", on a machine that does
ten other things, and says nothing about how fast something should be.

Where a thing must not wait for a timeout of its own, that timeout is ``FAR_S``: whoever waits for it is seen
to. What must be done before a deadline, or is cut off by it, is tried with each of ``HURRIES`` until the
machine is fast enough for one.
"""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 60.0
FAR_S: Final = 10 * PATIENCE_S
HURRIES: Final = (2.0, 8.0, 30.0)
