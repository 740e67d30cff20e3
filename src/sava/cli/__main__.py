"""Where the ``sava`` command begins, installed or as ``python -m sava.cli``."""

from __future__ import annotations

import os
import signal
import sys

if sys.argv[1:2] not in (["broker"], ["up"]):
    # gRPC prints line after line of a handshake that fails by itself; the command's error says it once, in
    # words. A broker's log keeps it: it may be the only trace of a stranger who was turned away.
    # gRPC reads this when it is imported, so it is set before anything else is.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C among the imports, which take most of a short command's time, would show where in a traceback.
    # A process that ignores it (nohup, a job in the background of a script) still does.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from sava.cli.main import main

if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if __name__ == "__main__":
    main()
