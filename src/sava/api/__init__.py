"""services: what a broker answers on its ports, and how it calls others'. Nothing is decided here: requests
become calls of ``broker``, ``cluster``, ``replication`` and ``metadata``, and their errors become codes.

* client port: ``streams`` (with ``sessions``, ``deliveries``), ``writers``; for other clusters ``replica``
  (with ``appending``, ``several``); Danube's protocol: ``danube/``;
* admin port: ``*_admin``, with what they say (``topic_descriptions``, ``replication_messages``) and do at
  length (``unloading``); ``examination`` for the doctor; ``admin_client`` is its other end, and ``recovery``
  what a command does of it without a broker;
* HTTP port: ``http``, ``metrics_page``, and what the parts tell there: ``*metrics``, ``disks``;
* calls that belong to another broker: ``peers.forwarding`` passes them on whole, ``peers.partition_calls``
  and ``topic_parts`` ask for the part that others have, ``load_reports`` send the leader theirs;
  ``remotes`` has the connections to other clusters;
* for all of them: ``peers.error_mapping`` (errors on the wire), ``security``.
"""
