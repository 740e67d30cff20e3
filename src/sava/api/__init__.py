"""api: the services of a broker's ports. Nothing is decided here: requests become calls of ``topics``,
``cluster``, ``replication`` and ``metadata``, and their errors become codes.

* client port: ``streams``, ``writers`` for exactly-once batches, ``replica`` for other clusters; Danube's
  protocol in ``danube/``;
* admin port: ``admin/``; ``admin_client`` is its other end, ``recovery`` the one command without a broker;
* HTTP port: ``http``, and the metrics in ``metrics/``;
* ``remotes`` asks other clusters.
"""
