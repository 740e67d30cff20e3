"""Mutants: thirty known ways to get consensus wrong, each put into the code on purpose.

A test suite that passes proves little until it is known to fail. Every mutant here is a bug that some system
shipped or that the paper warns of; ``python -m tests.mutants`` puts each into a copy of the sources and
demands that the simulator, or a named scenario test, notices. A mutant that survives is a hole in the tests,
and the command fails."""
