"""Topics: the topics of a broker, their producers and subscriptions, on top of storage and the metadata
store.

What exists, and who serves it:

==================  ==================================================================================
``names``           how topics are written, and how a partition is called
``specs``           what the metadata store holds, and under which keys
``registry``        which namespaces and topics exist; creating, growing and deleting them
``limits``          what the policies of topic, namespace and configuration come to
``topic_schemas``   which schema a topic's messages follow, and whether they do
``ownership``       which broker serves a topic, and what may become of that
``tenure``          the fencing token of a broker that serves a topic
``served``          the topics that this broker serves
``deletions``       how a topic goes, wherever it is served
``maintenance``     what is done for all of them from time to time
``topic``           one of them
==================  ==================================================================================

The write path: ``producers`` (who publishes) ─▶ ``publishing`` (single messages joined into batches) ─▶
``storage.topic_log``. ``staged`` publishes the batches of a pipeline from the object store, and
``source_copier`` what another cluster has.

The read path: ``storage.topic_log`` ─▶ ``dispatch`` (which message goes to which consumer, and when again) ─▶
``subscription`` ─▶ ``consumer``. ``subscriptions`` has those of one reliable topic, ``non_reliable`` those of
a topic that keeps nothing; ``cursors`` has what was acked, ``origin_acks`` says it to other clusters, and
``consumer_ids`` has the ids under which consumers of Danube's protocol come back. All of them count in
``ranges`` of offsets.

Everything here is owned by the event loop. Nothing here knows gRPC: ``api`` translates.
"""
