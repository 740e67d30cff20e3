"""A simulated network of detectors (``sava.metadata.suspicion``): ``python -m tests.suspicion_sim``."""
