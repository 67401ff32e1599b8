from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastcheck_dask.engine.compression import MEASURED_FROM_BYTES, CompressionPolicy, Meter

BYTES = 2 * MEASURED_FROM_BYTES
#: Bytes a second.
GIGA = 1e9


class Clock:
    """Goes as it is told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class World:
    """Saves over a link, by encoders of a rate: what the policy would see."""

    def __init__(self, policy, *, encoders=1, encode=GIGA, link=GIGA / 10, ratio=2.0, store=20 * GIGA):
        self.policy, self.encoders = policy, encoders
        self.encode, self.link, self.ratio, self.store = encode, link, ratio, store

    def save(self, nbytes=BYTES):
        """Return whether it was compressed."""
        compressed = self.policy.compresses(nbytes)
        sent = nbytes / self.ratio if compressed else nbytes
        seconds = nbytes / (self.encode if compressed else self.store)
        meter = Meter(nbytes, int(sent), encode_seconds=seconds, link_seconds=sent / self.link)
        self.policy.observe(meter, compressed=compressed)
        return compressed

    def saves(self, count, **options):
        return [self.save(**options) for _ in range(count)]


def test_meter_overlapping_messages_count_their_time_once():
    clock = Clock()
    meter = Meter(clock=clock)
    with meter.sending(100):
        clock.now += 1
        with meter.sending(50):
            clock.now += 2
        clock.now += 1
    clock.now += 10
    with meter.sending(250):
        clock.now += 4
    assert (meter.sent_bytes, meter.link_seconds) == (400, 8)
    assert meter.link_bytes_per_second == 50


def test_meter_failed_message_is_over_and_not_counted():
    clock = Clock()
    meter = Meter(clock=clock)
    with pytest.raises(OSError, match="lost"), meter.sending(100):
        raise OSError("lost")
    clock.now += 5
    with meter.sending(10):
        clock.now += 1
    assert (meter.sent_bytes, meter.link_seconds) == (10, 1)


def test_meter_without_anything_has_no_rates():
    meter = Meter()
    assert (meter.encode_bytes_per_second, meter.link_bytes_per_second) == (None, None)
    meter.encoded(100, 0.5)
    assert meter.encode_bytes_per_second == 200


def test_policy_slow_link_always_compresses():
    assert all(World(CompressionPolicy("auto", 1)).saves(100))


def test_policy_fast_link_goes_raw_after_three_saves_and_probes_now_and_then():
    done = World(CompressionPolicy("auto", 1), link=3 * GIGA).saves(3 + 33 * 3)
    assert done == [True] * 3 + ([False] * 32 + [True]) * 3


@pytest.mark.parametrize(("link", "compressed"), [(1.15, True), (1.25, False)])
def test_policy_link_a_little_faster_than_the_encoders_is_not_enough(link, compressed):
    done = World(CompressionPolicy("auto", 2), encode=0.5 * GIGA, link=link * GIGA).saves(10)
    assert done[-1] is compressed


def test_policy_more_encoders_keep_up_with_the_link():
    assert World(CompressionPolicy("auto", 8), link=3 * GIGA).saves(10)[-1] is True


def test_policy_small_saves_are_compressed_and_say_nothing():
    policy = CompressionPolicy("auto", 1)
    world = World(policy, link=50 * GIGA)
    assert all(world.saves(20, nbytes=MEASURED_FROM_BYTES - 1))
    assert world.saves(4) == [True, True, True, False]
    assert world.save(nbytes=1000) is True
    assert world.save() is False


def test_policy_one_slow_encoding_changes_nothing():
    world = World(CompressionPolicy("auto", 1), link=GIGA)
    for _ in range(30):
        world.encode = GIGA
        world.saves(5)
        world.encode = 0.5 * GIGA
        assert world.save() is True


def test_policy_link_that_gets_slow_is_compressed_again_soon():
    world = World(CompressionPolicy("auto", 1), link=5 * GIGA)
    assert world.saves(6)[-1] is False
    world.link = GIGA / 10
    done = world.saves(60)
    assert done.index(True) <= 3
    assert all(done[4:])


def test_policy_storing_raw_no_faster_than_compressing_goes_back():
    world = World(CompressionPolicy("auto", 1), link=5 * GIGA, store=0.9 * GIGA)
    done = world.saves(100)
    assert done.count(False) < 30


def test_policy_link_that_is_fast_only_for_little_does_not_flap():
    policy = CompressionPolicy("auto", 1)
    world = World(policy)
    done = []
    for _ in range(500):
        # A buffer somewhere takes what is compressed at once.
        world.link = (3 if policy.compresses(BYTES) else 0.2) * GIGA
        done += world.saves(1)
    changes = sum(before != after for before, after in itertools.pairwise(done))
    assert changes <= 20
    assert done.count(False) < 50
    assert sum(done[:250]) < sum(done[250:])


@pytest.mark.parametrize(("mode", "compressed"), [("always", True), ("never", False)])
def test_policy_forced_mode_is_kept_whatever_is_measured(mode, compressed):
    for link in (0.01, 100):
        assert set(World(CompressionPolicy(mode, 1), link=link * GIGA).saves(50)) == {compressed}


def test_policy_node_without_room_gets_compressed_for_long():
    policy = CompressionPolicy("auto", 1)
    world = World(policy, link=5 * GIGA)
    assert world.saves(5)[-1] is False
    assert policy.refuse_raw() is True
    assert all(world.saves(90))


def test_policy_node_without_room_for_what_was_ordered_raw_stays_so():
    policy = CompressionPolicy("never", 1)
    assert policy.refuse_raw() is False
    assert policy.compresses(BYTES) is False


@given(
    st.integers(1, 16),
    st.floats(1e6, 1e11),
    st.floats(1e6, 1e11),
    st.floats(1.0, 50.0),
    st.floats(1e9, 1e11),
)
def test_policy_steady_world_settles_on_what_is_not_slower(encoders, encode, link, ratio, store):
    world = World(CompressionPolicy("auto", encoders), encode=encode, link=link, ratio=ratio, store=store)
    done = world.saves(200)
    pace = {
        True: max(1 / (encode * encoders), 1 / (ratio * link)),
        False: max(1 / (store * encoders), 1 / link),
    }
    chosen = max(set(done[100:]), key=done[100:].count)
    assert pace[chosen] <= 1.21 * pace[not chosen]


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.booleans()), max_size=50))
@example([(5e-324, 5e-324, True)])
def test_policy_any_measurements_are_taken(measured):
    policy = CompressionPolicy("auto", 2)
    for encode_seconds, link_seconds, compressed in measured:
        meter = Meter(BYTES, BYTES, encode_seconds=encode_seconds, link_seconds=link_seconds)
        policy.observe(meter, compressed=compressed)
        assert policy.compresses(BYTES) in (True, False)
