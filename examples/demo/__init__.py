"""``make demo``: a tour of Sava on this machine, in which every claim is measured.

tour.py          the steps: start reading here
orders.py        what is published, and how it is recognised
traffic.py       a shop and a kitchen that go on while a step does harm
revenue.py       the Spark program
processes.py     two clusters and a runner, started with the ``sava`` command
interrupts.py    Ctrl-C, at any moment
steps.py         runs the steps and shows what came of them
"""
