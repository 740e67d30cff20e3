"""How long tests wait for what must come.

Only a test that fails waits so long, so the bound is generous: it stands for "never", on a machine that does
ten other things, and says nothing about how fast something should be.
"""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 60.0
