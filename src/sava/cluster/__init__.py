"""Who serves what: brokers that come and go, and topics that follow them.

================  ==================================================================================
``records``       what the metadata store holds of brokers
``view``          brokers, topics and owners as this node knows them, kept up to date
``registration``  being there: a lease, and what happens when it is lost
``placement``     which broker a topic should go to
``rebalancing``   which topics should go elsewhere
``loads``         what brokers report of themselves
``controller``    on the leader: assigns, moves, drains, notices the dead
``planning``      what it makes of what it sees
``decisions``     how it writes that down, many topics at a time
``unserved``      topics for which it can do nothing
``moves``         one move, from request to outcome
``drains``        all topics of a broker
``rounds``        as many topics as make brokers more equal
``agent``         on every broker: takes up, hands over and lets go of its own topics
``router``        who has a topic, as soon as somebody has
================  ==================================================================================

The record of who has a topic, and the table of what may become of it, is ``sava.topics.ownership``: a broker
must hold it to write anything, so it is known further down.
"""
