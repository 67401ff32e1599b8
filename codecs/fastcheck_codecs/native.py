"""The kernels in C, where they were compiled: each is one pass for what takes numpy several.

An installation without a compiler lacks them. Only speed depends on them: whoever calls a kernel has the
same in numpy beside it, and both write the same bytes.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

#: Set to ``numpy``, it keeps the compiled kernels out of use.
VARIABLE = "FASTCHECK_KERNELS"


def _load() -> Any:
    if os.environ.get(VARIABLE) == "numpy":
        return None
    try:
        return importlib.import_module("fastcheck_codecs._kernels")
    except ImportError:
        return None


#: The module, or None. Its functions take contiguous buffers, let other threads run, and raise ValueError
#: where sizes or alignment do not fit; ``codecs/kernels.c`` describes them.
KERNELS: Any = _load()


def kernels() -> str:
    """Tell which kernels are in use.

    Returns
    -------
    str
        ``"c"`` or ``"numpy"``.

    Examples
    --------
    >>> kernels() in ("c", "numpy")
    True
    """
    return "numpy" if KERNELS is None else "c"
