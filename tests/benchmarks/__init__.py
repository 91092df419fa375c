"""Benchmarks: each is one command, ``python -m tests.benchmarks.<name>``."""
