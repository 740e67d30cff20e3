"""Dispatch: which offsets of a subscription go to which consumer, and when.

    members.py      a consumer as dispatch sees it: credits, what is queued for it, key filters; and the ring
                    that gives each key a consumer
    outstanding.py  what was sent and not answered yet, and what was nacked or timed out
    core.py         what all types share, and the dispatch rate
    slices.py       exclusive, failover, shared: ranges of offsets
    key_shared.py   keys in order, each with one consumer at a time

These know no event loop and no clock: time is an argument, and every decision is one call that returns.
Around them, ``reading`` follows the log, ``dead_letters`` hands messages on, and ``sava.topics.subscription``
is the loop that joins them."""
