"""Benchmarks of the whole machine: its own limits, the network, and the engine around it."""
