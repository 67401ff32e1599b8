"""Benchmarks: each prints a table, with a baseline measured in the same run beside every figure."""
