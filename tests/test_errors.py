"""Every error survives its trips, and says what, where, wanted, got and what to do."""

from __future__ import annotations

import copy
import inspect
import pickle

import msgpack
import pytest

from fastcheck_dask import errors
from fastcheck_dask.errors import FastCheckError, TierError, from_wire, to_wire

TEXT = {"message": "something went wrong; do this"}
ARGUMENTS = {
    "UnsupportedLeafError": {"path": "model/x", "got": "a lambda", "advice": "leave it out"},
    "ShardCorruptError": {"chunk": "w/c/0", "where": "node n1", "want": "0x01", "got": "0x02"},
    "UnrecoverableError": {"what": "generation 7", "causes": ("n0 is down", "no marker")},
    "TierFullError": {"where": "/dev/shm", "wanted_bytes": 2000, "free_bytes": 10, "advice": "make room"},
    "NodeFullError": {"node": "n1", "wanted_bytes": 2000, "free_bytes": 10},
    "NodeUnavailableError": {"node": "n1", "why": "did not answer in time"},
    "NodeRefusedError": {"node": "n1", "why": "its data port speaks TLS"},
    "NoMasterError": {"asked": "n1", "master": "n2", "address": "fcs://h:1"},
    "TooFewNodesError": {"wanted": 4, "alive": 2, "advice": "start more"},
    "FastCheckError": None,
}


def classes():
    found, waiting = [], [FastCheckError]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if cls.__module__ == errors.__name__ and not cls.__name__.startswith("_"):
            found.append(cls)
    return sorted(set(found), key=lambda cls: cls.__name__)


def arguments_of(cls):
    return ARGUMENTS.get(cls.__name__, TEXT)


def made(cls):
    arguments = arguments_of(cls)
    return cls("text") if arguments is None else cls(*arguments.values())


def test_classes_are_those_of_the_module():
    public = {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, FastCheckError) and not value.__name__.startswith("_")
    }
    assert public == set(classes())
    assert len(public) >= 24


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
class TestEveryClass:
    @pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
    def test_pickle_round_trip_keeps_class_text_and_fields(self, cls, protocol):
        error = made(cls)
        back = pickle.loads(pickle.dumps(error, protocol))
        assert type(back) is cls
        assert (back.args, str(back)) == (error.args, str(error))
        assert vars(back) == vars(error)

    def test_copy_is_equal(self, cls):
        error = made(cls)
        assert str(copy.copy(error)) == str(copy.deepcopy(error)) == str(error)

    def test_wire_round_trip_keeps_class_text_and_fields(self, cls):
        error = made(cls)
        sent = msgpack.unpackb(msgpack.packb(to_wire(error), strict_types=True))
        back = from_wire(sent)
        assert type(back) is cls
        assert str(back) == str(error)
        assert vars(back) == vars(error)
        assert back.retryable is error.retryable

    def test_text_says_every_argument(self, cls):
        text = str(made(cls))
        for name, value in (arguments_of(cls) or {}).items():
            for part in value if isinstance(value, tuple) else (value,):
                assert (f"{part:,}" if name.endswith("bytes") else str(part)) in text
        assert text
        assert not text.startswith("(")

    def test_retryable_is_said_and_docstring_explains(self, cls):
        assert isinstance(cls.retryable, bool)
        assert cls.__doc__
        assert cls.__doc__ is not cls.__mro__[1].__doc__

    def test_can_be_caught_as_root_and_chained(self, cls):
        with pytest.raises(FastCheckError) as caught:
            raise made(cls) from OSError("cause")
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("cls", "standard"),
    [
        ("ConfigError", ValueError),
        ("LayoutError", ValueError),
        ("UnsupportedLeafError", TypeError),
        ("ShardUnavailableError", LookupError),
        ("CheckpointNotFoundError", LookupError),
        ("UnrecoverableError", LookupError),
        ("TierTimeoutError", TimeoutError),
        ("ClosedError", RuntimeError),
    ],
)
def test_class_is_also_the_standard_one(cls, standard):
    assert issubclass(getattr(errors, cls), standard)


@pytest.mark.parametrize(
    ("cls", "retryable"),
    [
        ("TierError", True),
        ("TierFullError", False),
        ("CheckpointNotFoundError", False),
        ("NodeUnavailableError", True),
        ("CoordinationError", True),
        ("FencedError", False),
        ("CommitConflictError", False),
        ("RunInUseError", False),
        ("UnrecoverableError", False),
    ],
)
def test_retryable_only_where_the_same_call_may_succeed_later(cls, retryable):
    assert getattr(errors, cls).retryable is retryable


def test_unsupported_leaf_at_the_root_names_the_root():
    assert "its root" in str(errors.UnsupportedLeafError("", "a lambda", "leave it out"))


def test_unrecoverable_many_causes_are_all_kept_and_the_first_shown():
    causes = tuple(f"cause {number}" for number in range(20))
    error = errors.UnrecoverableError("it", causes)
    assert error.causes == causes
    assert "cause 7" in str(error)
    assert "cause 8" not in str(error)
    assert "and 12 more" in str(error)
    assert "more" not in str(errors.UnrecoverableError("it", causes[:8]))
    assert errors.UnrecoverableError("it", ["a"]).causes == ("a",)
    assert "nothing" in str(errors.UnrecoverableError("it", ()))


def test_to_wire_foreign_error_becomes_a_tier_error_that_names_it():
    error = from_wire(to_wire(KeyError("x")))
    assert type(error) is TierError
    assert str(error) == "KeyError: 'x'"


def test_from_wire_class_of_a_newer_version_becomes_a_tier_error():
    error = from_wire(["QuantumError", "a", 7])
    assert type(error) is TierError
    assert "QuantumError" in str(error)
    assert "7" in str(error)


@pytest.mark.parametrize(
    "values",
    [
        ["TierFullError", "a"],
        ["TierFullError", "a", "b", "c", "d"],
        ["UnrecoverableError", "what", 7],
        ["TierError"],
        ["TierError", 7],
        ["TierError", "a", "b"],
        [],
    ],
    ids=str,
)
def test_from_wire_arguments_that_do_not_fit_are_refused(values):
    with pytest.raises(ValueError, match=str(values[0]) if values else "unpack"):
        from_wire(values)


@pytest.mark.parametrize("name", ["_MessageError", 7, ["TierError"]], ids=str)
def test_from_wire_name_that_is_no_public_class_becomes_a_tier_error(name):
    assert type(from_wire([name, "a"])) is TierError
