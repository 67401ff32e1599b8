"""When a training loop of one's own saves, and how it ends in order when the job is told to stop."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any, Protocol

from fastcheck_dask.clock import Deadline
from fastcheck_dask.errors import (
    ConfigError,
    CoordinationError,
    FastCheckError,
    FencedError,
    RunInUseError,
    SaveBusyError,
    TierError,
)
from fastcheck_dask.manager import SaveHandle
from fastcheck_dask.manager.handle import LEVELS, Level

log = logging.getLogger(__name__)

Position = tuple[int, int]


class Training(Protocol):
    """What a callback needs of a `FastCheckWrapper`."""

    @property
    def optimizer(self) -> Any:
        """The optimizer, or None."""
        ...

    @property
    def position(self) -> Position | None:
        """Epoch and step that were saved or loaded last."""
        ...

    @property
    def last_handle(self) -> SaveHandle | None:
        """Handle of the last save."""
        ...

    def save_checkpoint(
        self, epoch: int, step: int, *, tag: str | None = None, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle:
        """Save the training as it is now."""
        ...

    def close(self, *, timeout: float | None = None) -> None:
        """Finish what is in flight."""
        ...


class FastCheckCallback:
    """Decides when a training loop of one's own saves, and ends it in order when the job is told to stop.

    Epochs and steps *count what is finished*: `step` is the number of optimizer steps done since the very
    beginning, 1 at the first call; `epoch` is the number of epochs that were finished before the running one.
    A training that goes on from what `load_checkpoint` returned saves under the same tags as one that was
    never interrupted.

    Parameters
    ----------
    wrapper : FastCheckWrapper
    every_n_steps : int, optional
        Save when `step` is a multiple of it.
    every_n_epochs : int, optional
        Save when the number of finished epochs is a multiple of it.
    wait_at_end : {"local", "peers", "object"} or None
        What `on_train_end` waits for; where there are no peers, for the object tier. None waits for nothing.
    save_on_exception : bool
        Let `on_exception` save what the last finished step left. It is off by default: the step that failed
        may have drawn random numbers and changed buffers (the statistics of batch norm), so training does
        not go on from there bit for bit as it does from a checkpoint that was saved between steps.

    Raises
    ------
    ConfigError
        If neither interval is given, or one cannot be used.
    """

    def __init__(
        self,
        wrapper: Training,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        wait_at_end: Level | None = "peers",
        save_on_exception: bool = False,
    ) -> None:
        if every_n_steps is None and every_n_epochs is None:
            raise ConfigError("give every_n_steps, every_n_epochs or both")
        self.wrapper = wrapper
        self._every_n_steps = _interval(every_n_steps, "every_n_steps")
        self._every_n_epochs = _interval(every_n_epochs, "every_n_epochs")
        if wait_at_end is not None and wait_at_end not in LEVELS:
            raise ConfigError(f"wait_at_end is one of {', '.join(LEVELS)} or None; got {wait_at_end!r}")
        self._wait_at_end = wait_at_end
        #: Epoch and step at the end of the last step or epoch.
        self._last: Position | None = None
        #: What was measured there.
        self._metrics: Mapping[str, float] | None = None
        #: Whether the optimizer began a step since then: the weights are not those of `_last`.
        self._step_begun = False
        self._hook: Any = None
        self._save_on_exception = save_on_exception
        if save_on_exception:
            if wrapper.optimizer is None:
                raise ConfigError("save_on_exception needs the optimizer: it tells when a step was half done")
            self._hook = wrapper.optimizer.register_step_pre_hook(self._note_step)
        self._pid = os.getpid()
        self._previous_handlers: dict[int, Any] = {}
        self._grace_seconds = 0.0
        self._exit_process = True
        #: The first signal and when its grace ends; written by the handler, which does nothing else.
        self._signal: tuple[int, Deadline] | None = None

    def on_step_end(self, epoch: int, step: int, *, metrics: Mapping[str, float] | None = None) -> bool:
        """Save if it is time to; call it when a step is complete, LR scheduler and scaler included.

        Parameters
        ----------
        epoch, step : int
            Epochs finished before this one; steps finished, this one included.
        metrics : mapping of str to float, optional
            What a save of this step is noted with, for `keep_best`; as for `FastCheckManager.save_async`.

        Returns
        -------
        bool
            True if training has to stop: a signal came, and the state is saved.

        Raises
        ------
        ConfigError
            If `step` is not at least 1: it counts finished steps.
        SystemExit
            If a signal came and `install_signal_handler` was told to exit.
        """
        if step < 1:
            raise ConfigError(f"step counts the finished steps and is 1 after the first; got {step}")
        return self._at((epoch, step), metrics, due=_due(step, self._every_n_steps))

    def on_epoch_end(self, epoch: int, step: int, *, metrics: Mapping[str, float] | None = None) -> bool:
        """Save if it is time to, as epoch `epoch` + 1: the one that training goes on with.

        Parameters
        ----------
        epoch, step : int
            As for `on_step_end`: the epoch that is complete now, counted from 0; steps finished.
        metrics : mapping of str to float, optional
            As for `on_step_end`.

        Returns
        -------
        bool
            As `on_step_end`.
        """
        return self._at((epoch + 1, step), metrics, due=_due(epoch + 1, self._every_n_epochs))

    def on_train_end(self) -> bool:
        """Save the last step, unless it is saved, and wait for it; the signal handler is gone after that.

        Returns
        -------
        bool
            True if a signal came.

        Raises
        ------
        FastCheckError
            If the last checkpoint is neither with the peers nor in the object tier.
        """
        if self._stop_asked():
            return self._stop()
        try:
            self._settle(self._wait_at_end, Deadline(None))
        finally:
            self.close()
        return self._stop() if self._stop_asked() else False

    def on_exception(self, error: BaseException) -> None:
        """Note that training failed; saves only with `save_on_exception`, and only what a whole step left.

        Nothing is saved if the optimizer began a step since the last `on_step_end`: the weights are half
        those of the next step. Never raises a `FastCheckError`: `error` is what the user has to see.

        Parameters
        ----------
        error : BaseException
            What ended the training.
        """
        self.close()
        if not self._save_on_exception or self._last is None or self._last == self.wrapper.position:
            log.warning("training ended by %r; the newest save is of %s", error, self.wrapper.position)
            return
        if self._step_begun:
            log.warning("training ended by %r within an optimizer step: nothing is saved", error)
            return
        epoch, step = self._last
        try:
            tag = f"epoch{epoch}_step{step}_exception"
            handle = self.wrapper.save_checkpoint(epoch, step, tag=tag, metrics=self._metrics)
            _wait(handle, self._wait_at_end or "local", Deadline(None))
        except FastCheckError as failure:
            log.error("training ended by %r, and the last save failed: %s", error, failure)

    def install_signal_handler(
        self,
        signals: Iterable[int] = (signal.SIGTERM,),
        *,
        grace_seconds: float = 20.0,
        exit_process: bool = True,
    ) -> None:
        """Save and stop at the end of the step during which a signal comes.

        The handler only notes the signal. The next `on_step_end` or `on_epoch_end` saves, waits until the
        object tier has it (or the peers, if there is nothing else), puts the former handlers back and ends
        the training. Further signals change nothing. Forked children die of the signal as without a handler.

        Parameters
        ----------
        signals : iterable of int
            Signals.
        grace_seconds : float
            How long the save may take, in seconds from the signal; less than what the batch system allows
            before it kills the job, of which a step takes its part.
        exit_process : bool
            Whether to close the wrapper and raise ``SystemExit(128 + signal)``, 143 for SIGTERM; otherwise
            the methods return True.

        Raises
        ------
        ConfigError
            If called elsewhere than in the main thread.
        """
        self._restore_handlers()
        self._grace_seconds, self._exit_process = grace_seconds, exit_process
        self._pid = os.getpid()
        try:
            for number in signals:
                self._previous_handlers[number] = signal.getsignal(number)
                signal.signal(number, self._note_signal)
        except ValueError as error:
            self._previous_handlers.clear()
            raise ConfigError(f"the signal handler cannot be installed: {error}") from error

    def close(self) -> None:
        """Put the former signal handlers back and leave the optimizer alone. Idempotent."""
        self._restore_handlers()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _note_step(self, *_: Any) -> None:
        self._step_begun = True

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            signal.signal(number, self._previous_handlers.get(number) or signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._signal is None:
            self._signal = number, Deadline.after(self._grace_seconds)

    def _restore_handlers(self) -> None:
        while self._previous_handlers:
            number, previous = self._previous_handlers.popitem()
            # None stands for a handler that was not installed from Python, and cannot be put back from it.
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)

    def _stop_asked(self) -> bool:
        return self._signal is not None

    def _at(self, position: Position, metrics: Mapping[str, float] | None, *, due: bool) -> bool:
        self._last, self._metrics, self._step_begun = position, metrics, False
        if self._stop_asked():
            return self._stop()
        if due and self.wrapper.position != position:
            self._save(position)
        return False

    def _save(self, position: Position) -> None:
        try:
            self.wrapper.save_checkpoint(*position, metrics=self._metrics)
        except (FencedError, RunInUseError, SaveBusyError):
            raise
        except (TierError, CoordinationError) as error:
            log.error("epoch %d step %d is not saved, training goes on: %s", *position, error)

    def _settle(self, level: Level | None, deadline: Deadline) -> None:
        """Save the last position, unless it is saved or was loaded, and wait for it."""
        handle = self.wrapper.last_handle
        if self._last is not None and (self._last != self.wrapper.position or _failed(handle)):
            if handle is not None:
                # So that a slot is free: this save may neither be skipped nor wait beyond the deadline.
                handle.exception(deadline.left())
            handle = self.wrapper.save_checkpoint(*self._last, metrics=self._metrics)
        if handle is not None and level is not None:
            _wait(handle, level, deadline)

    def _stop(self) -> bool:
        assert self._signal is not None
        number, deadline = self._signal
        log.warning("signal %d: saving epoch and step %s and stopping", number, self._last)
        try:
            self._settle("object", deadline)
        except FastCheckError as error:
            log.error("the last save is not durable after %.0f s of grace: %s", self._grace_seconds, error)
        if self._exit_process:
            self.wrapper.close(timeout=max(2.0, deadline.left() or 0.0))
        self.close()
        if self._exit_process:
            raise SystemExit(128 + number)
        return True


def _interval(value: object, what: str) -> int | None:
    if value is None or (type(value) is int and value >= 1):
        return value
    raise ConfigError(f"{what} must be a whole number of at least 1, got {value!r}")


def _due(count: int, interval: int | None) -> bool:
    return interval is not None and count % interval == 0


def _failed(handle: SaveHandle | None) -> bool:
    return handle is not None and handle.done() and handle.level in (None, "local")


def _wait(handle: SaveHandle, level: Level, deadline: Deadline) -> None:
    """Wait for a level, or where it cannot be reached, for the other one that outlives this host."""
    # None asks for the peers where there are any, and else for the object tier.
    wanted: Level | None = None if level == "peers" else level
    other: Level = "object" if level == "peers" else "peers"
    try:
        handle.wait(wanted, deadline.left())
    except FastCheckError as error:
        if deadline.passed or level == "local":
            raise
        try:
            handle.wait(other, deadline.left())
        except ConfigError:
            raise error from None
        log.warning("save %r reached the %s tier only: %s", handle.tag, other, error)
