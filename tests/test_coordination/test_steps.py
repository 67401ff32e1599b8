"""Steps with a real coordinator: answers, errors, deadlines, and waiting without missing a change."""

from __future__ import annotations

import threading

import pytest

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.entries import Create, EntryConflictError, Write
from fastcheck_dask.coordination.steps import (
    Apply,
    Ask,
    DeadlineError,
    Get,
    Names,
    Pause,
    Session,
    Wait,
    perform,
)
from fastcheck_dask.errors import ClosedError, CoordinationError, NoMasterError
from fastcheck_dask.testing.entries import SharedEntries


@pytest.fixture
def shared():
    return SharedEntries()


@pytest.fixture
def entries(shared):
    return shared.session()


class Link:
    def ask(self, request):
        if request["op"] == "fail":
            raise NoMasterError("x", "", "")
        return {"asked": request["op"]}


def test_perform_answers_every_step(entries):
    def steps():
        yield Apply((Create("a/b", b"1"),))
        yield Pause(0.0)
        session = yield Session()
        names = yield Names("a")
        found = yield Get(("a/b", "a/c"))
        reply = yield Ask({"op": "it"})
        return session, names, [one and one.value for one in found], reply

    got = perform(steps(), entries, link=Link())
    assert got == (entries.session, ("b",), [b"1", None], {"asked": "it"})


@pytest.mark.parametrize(
    ("step", "error"),
    [(Apply((Write("a", b"", 0),)), EntryConflictError), (Ask({"op": "fail"}), NoMasterError)],
)
def test_perform_errors_are_raised_in_the_steps_and_out_of_them(entries, step, error):
    def handled():
        try:
            yield step
        except error:
            return "handled"

    def unhandled():
        yield step

    assert perform(handled(), entries, link=Link()) == "handled"
    with pytest.raises(error):
        perform(unhandled(), entries, link=Link())


def test_perform_deadline_passed_is_not_for_the_steps_to_handle(entries):
    def steps():
        while True:
            try:
                yield Pause(0.01)
            except CoordinationError:
                raise AssertionError("the steps saw it") from None

    with pytest.raises(DeadlineError):
        perform(steps(), entries, deadline=Deadline.after(0.05))


def test_perform_stopped_while_it_waits_ends(entries):
    stopping, waiting = threading.Event(), threading.Event()

    def steps():
        yield Wait("a", 60.0)
        waiting.set()
        yield Wait("a", 60.0)

    def stop():
        assert waiting.wait(20)
        stopping.set()

    stopper = threading.Thread(target=stop)
    stopper.start()

    def forever():
        yield from steps()
        yield Pause(60.0)

    with pytest.raises(ClosedError):
        perform(forever(), entries, stopping=stopping)
    stopper.join()


def test_wait_change_between_reading_and_waiting_is_not_missed(shared, entries):
    """The first wait for a path only begins to watch: whoever looks again sees what came before."""
    other = shared.session()
    looked = []

    def steps():
        while True:
            (found,) = yield Get(("a",))
            looked.append(found)
            if found is not None:
                return found.value
            if len(looked) == 2:
                # Nobody is waiting at this moment.
                other.apply(Create("a", b"1"))
            yield Wait("a", 60.0)

    assert perform(steps(), entries, deadline=Deadline.after(20.0)) == b"1"
    assert len(looked) == 3
