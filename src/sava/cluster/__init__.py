"""Who serves what: brokers that come and go, and topics that follow them.

======================  ==========================================================================
``records``             what the metadata store holds of brokers, and what the controller refuses
``view``                brokers, topics and owners as this node knows them; the owner of a topic
``registration``        a broker's lease: how it keeps it, loses it, and how the leader ends it
``agent``               on every broker: takes up, hands over and lets go of its own topics
``controller``          on the leader: assigns topics, notices dead brokers, counts offline topics
``planning``            placement, and what the controller decides; no clock, no store
``moves``               one move of a topic, from request to outcome
``drains``              moves of all topics of a broker
``loads``               what brokers report of themselves
``rebalancer``          moves that make the brokers' loads more equal
``writer_records``      batches of many topics: the records, and when one may be decided
``writers``             deciding and publishing such batches
``writer_maintenance``  finishing those that a broker left, on the leader
``pipelines``           work that runners do on Spark
======================  ==========================================================================

The record of who has a topic, and the table of what may become of it, is ``sava.topics.ownership``: a broker
must hold it to write anything, so it lies further down.
"""
