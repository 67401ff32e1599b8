"""A storage node says when it starts and when it ends, so that any other end is known as such."""

from __future__ import annotations

import logging
import os
import time
from types import TracebackType

from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.coordination.entries import Entries
from fastcheck_dask.coordination.lives import Cause, End, Here, Life, begin, end
from fastcheck_dask.errors import CoordinationError

logger = logging.getLogger(__name__)


class NodeLife:
    """The life of a registered node, from the begin of the block to its end; an exception is named.

    A coordinator that is away does not keep the node from starting or ending.
    """

    def __init__(self, entries: Entries, info: NodeInfo) -> None:
        here = Here.of_this_machine(info.host)
        self._entries, self._here, self._ended = entries, here, False
        self._life = Life(
            info.name,
            info.address,
            info.host,
            info.rack,
            started_unix=time.time(),
            pid=os.getpid(),
            boot=here.boot,
            oom_kills=here.oom_kills,
            group=here.group,
        )

    def __enter__(self) -> NodeLife:
        try:
            begin(self._entries, self._life, now=time.time(), here=self._here)
        except CoordinationError as error:
            logger.warning("the start of node %s is not noted: %s", self._life.name, error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end("failed", f"{type(error).__name__}: {error}")

    def end(self, cause: Cause, why: str) -> None:
        """Say that and why the node ends; blocks. The first call counts."""
        if self._ended:
            return
        self._ended = True
        try:
            end(self._entries, self._life, End(time.time(), cause, why, self._life.started_unix))
        except CoordinationError as error:
            logger.debug("the end of node %s is not noted: %s", self._life.name, error)
