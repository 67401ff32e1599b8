"""Adapters for training frameworks, each in a module of its own that alone imports its framework.

`pytorch` has `FastCheckWrapper` and `FastCheckCallback` for training loops of one's own.
"""
