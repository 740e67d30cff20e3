"""Dispatch: which offsets of a subscription go to which consumer, and when.

    members.py      a consumer as dispatch sees it: credits, what is queued for it, key filters; the ring that
                    gives each key a consumer; what was sent and not answered yet, and what failed
    core.py         what all types share, the dispatch rate, and those that are dispatched in ranges of
                    offsets: exclusive, failover, shared
    key_shared.py   keys in order, each with one consumer at a time
    reading.py      an open position in the topic's log; dead letters, which are read and handed on

All but ``reading`` know no event loop and no clock: time is an argument, and every decision is one call that
returns. ``sava.topics.subscription`` is the loop that joins them."""
