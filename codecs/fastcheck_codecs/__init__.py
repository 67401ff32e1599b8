"""Codecs."""
