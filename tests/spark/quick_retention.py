"""A broker that looks all the time for what it may delete: ``python -m tests.spark.quick_retention broker``.
It is the ``sava`` command otherwise."""

from __future__ import annotations

from sava.cli.main import main
from sava.topics.maintenance import TopicsOptions
from sava.topics.served import ServedTopics

if __name__ == "__main__":
    defaults = ServedTopics.__init__.__kwdefaults__
    assert defaults is not None
    assert "options" in defaults
    defaults["options"] = TopicsOptions(retention_interval_s=0.3)
    main()
