"""A replication link in a process of its own, as a runner has it but for Spark: it starts again when it ends.

python -m tests.torture.link ADMINS SERVICES REMOTE [CA CERT KEY]
"""

from __future__ import annotations

import logging
import sys
import time

from sava.client import Tls
from sava.client.errors import ClientError
from sava.pipeline.cluster import ClusterAccess
from sava.pipeline.replicate.background import AdminLinkControl
from sava.pipeline.replicate.job import LinkJob
from tests.support.replication import ThreadEngine


def main() -> None:
    admins, services, remote, *files = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    tls = Tls(*files) if files else None
    access = ClusterAccess(services, timeout_s=5.0, **dict(zip(("ca", "cert", "key"), files, strict=False)))
    while True:
        try:
            control = AdminLinkControl(admins, tls=tls)
            job = LinkJob(f"replicate-{remote}", remote, "torture", control, ThreadEngine(), access)
            while job.end is None:
                time.sleep(0.1)
            logging.info("the link has ended: %s", job.end)
        except ClientError:
            logging.exception("the link could not begin")
        time.sleep(1.0)


if __name__ == "__main__":
    main()
