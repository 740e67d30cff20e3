"""Broker: topics, their producers and subscriptions, on top of storage and the metadata store.

=================  ===================================================================================
``names``          how topics are written, and how a partition is called
``specs``          what the metadata store holds, and under which keys
``namespaces``     namespaces and their policies
``registry``       which topics exist; creating, growing and deleting them
``limits``         what the policies of topic, namespace and configuration come to
``ownership``      who serves a topic, and what may become of that
``tenure``         this broker's hold on a topic
``topics``         the topics that this broker serves
``topic``          one of them
``sealing``        handing over what is not loaded
``deletions``      how a topic goes, wherever it is served
``upkeep``         what is done for all of them from time to time
``producers``      who publishes into a topic
``publishing``     single messages joined into batches
``schema_checks``  whether they follow the topic's schema
``subscriptions``  those of a reliable topic, and their records
``transient``      those of a topic that keeps nothing
``subscription``   one of the former: who consumes, how far they are, and what is on its way
``dispatch``       which message goes to which consumer, and when again
``non_reliable``   the same where nothing is kept
``consumer``       what the handler of a consumer's stream holds
``consumers``      the ids under which consumers of Danube's protocol come back
``cursor``         what a subscription has acked
``cursors``        positions of subscriptions, written to the metadata store
=================  ===================================================================================

Nothing here knows gRPC: services translate.
"""
