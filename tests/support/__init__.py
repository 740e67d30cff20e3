"""What tests of several packages share. Helpers of one package stand beside its tests.

* ``brokers``: brokers in processes of their own, one or a cluster of them
* ``storage``, ``topics``: brokers in this process, one after the other on the same metadata and disk
* ``clients``, ``copying``, ``replication``: programs that use a broker, and links between clusters
* ``processes``, ``leftovers``: child processes, and their end
* ``network``, ``objects``: free ports, proxies, an S3 server
* ``memory_store``, ``local_network``, ``metadata_patterns``: metadata without disk or network
* ``waiting``, ``long``: how long tests wait, and which do more with ``SAVA_LONG=1``
* ``commands``, ``messages``, ``pages``: what commands say, batches, the pages of the documentation
"""
