"""A broker that looks all the time for what it may delete: ``python -m tests.spark.quick_retention broker``.
It is the ``sava`` command otherwise."""

from __future__ import annotations

from sava.broker.upkeep import TopicsOptions

if __name__ == "__main__":
    # Before anything is imported that makes the options.
    defaults = TopicsOptions.__init__.__kwdefaults__
    assert defaults is not None
    defaults["retention_interval_s"] = 0.3

    from sava.cli.main import main

    main()
