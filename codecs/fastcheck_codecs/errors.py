"""The one error of the codecs; this layer lies beneath FastCheck and has a root of its own."""

from __future__ import annotations


class CodecError(ValueError):
    """A payload is damaged, is not ours, or does not fit the base or buffer that it came with."""
