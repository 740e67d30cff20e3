"""Topics: the topics of a broker, their producers and subscriptions, on top of storage and the metadata
store.

What exists, and who serves it:

==================  ==================================================================================
``names``           how topics are written, and how a partition is called
``specs``           what the metadata store holds, and under which keys
``registry``        which namespaces and topics exist; creating, growing and deleting them
``rules``           what is asked of a topic's producers, consumers and messages: limits and schema
``ownership``       which broker serves a topic, its tenure, and how a topic that is deleted is released
``served``          the topics that this broker serves
``maintenance``     what is done for all of them from time to time
``topic``           one of them
==================  ==================================================================================

The write path: ``producers`` (who publishes) ─▶ ``publishing`` (checks; single messages joined into batches;
staged batches of a pipeline) ─▶ ``storage.topic_log``. ``source_copier`` publishes what another cluster has.

The read path: ``storage.topic_log`` ─▶ ``dispatch`` (which message goes to which consumer, and when again) ─▶
``subscription`` ─▶ ``consumer``. ``subscriptions`` has those of one reliable topic, ``non_reliable`` those of
a topic that keeps nothing; ``cursors`` has what was acked, and ``origin_acks`` says it to other clusters. All
of them count in ``ranges`` of offsets.

Everything here is owned by the event loop. Nothing here knows gRPC: ``api`` translates.
"""
