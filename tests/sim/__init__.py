"""The deterministic simulator: a cluster of real replicas in one process, on virtual time, over a faulty
network, disk and clock.

What is real: ``Replica``, ``RaftCore``, the log and its recovery, every codec, the snapshot files, the state
machine, the lessor and the watch hub. What is a twin: the network (``net``), the disk (``disk``), the threads
of the log writer and of the snapshot saver (``writer``), and time (``world``). One run is a pure function of
its seed and its knobs, so whatever goes wrong can be run again, traced and shrunk: ``python -m tests.sim
--seed N --trace``."""
