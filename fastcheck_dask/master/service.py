"""Runs the duties for as long as an office lasts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.master.duty import Duty, Leadership

#: How often the service looks whether it is still master, and shows that it lives.
LOOK_SECONDS = 0.1

logger = logging.getLogger(__name__)


class MasterService:
    """The service of an `Election`: each duty in a task of its own, until the office is over.

    Parameters
    ----------
    duties : callable
        Makes the duties of one office.
    """

    def __init__(self, duties: Callable[[], Sequence[Duty]]) -> None:
        self._duties = duties

    def __call__(self, leadership: Leadership) -> None:
        """Serve; returns when the office is over. Blocks its thread.

        Raises
        ------
        Exception
            Whatever a duty raised that is no error of FastCheck: a defect, and another node may do better.
        """
        asyncio.run(self._serve(leadership))

    async def _serve(self, leadership: Leadership) -> None:
        tasks = [asyncio.create_task(_repeat(duty, leadership)) for duty in self._duties()]
        try:
            while leadership.wait(0.0, "duties") and not any(task.done() for task in tasks):
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


async def _repeat(duty: Duty, leadership: Leadership) -> None:
    """Do one duty again and again; what goes wrong is told once for as long as it stays the same."""
    trouble = ""
    while True:
        # Without a connection the office is not in force for a while, and may be again.
        if leadership.in_force:
            try:
                await duty.run(leadership)
                trouble = ""
            except FastCheckError as error:
                if str(error) != trouble:
                    logger.warning("%s is tried again: %s", duty.name, error)
                trouble = str(error)
        await asyncio.sleep(duty.interval_seconds)
