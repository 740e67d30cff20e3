"""What ``sava doctor`` does: look at a cluster from here, as a client would see it, and say what is wrong and
what to do about it.

================  =====================================================================================
``findings``      what is said: how bad, about what, why, and the way out
``reach``         one address: whether anybody answers there, and until when its certificate holds
``observation``   everything that is looked at, gathered at one time, and what moves at two
``cluster``       judgements about brokers: addresses, leader, terms, modes, clocks, versions, disks
``contents``      judgements about what they keep: topics, subscriptions, object store
``journals``      judgements about journals of brokers that are gone
``pipelines``     judgements about pipelines that nobody runs, and topics that are not copied
``clients``       judgements about what a client sees
``signs``         judgements about what brokers say of themselves in metrics
================  =====================================================================================

Gathering judges nothing, and judging asks nobody: a judgement is a function from an observation to findings.
"""
