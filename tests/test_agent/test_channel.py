from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.agent.async_channel import AsyncChannel
from fastcheck_dask.agent.channel import BlockingChannel, pack, unpack
from fastcheck_dask.errors import ClosedError, CorruptDataError

values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=10,
)


@pytest.fixture
def pair() -> Iterator[tuple[BlockingChannel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = BlockingChannel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


@given(st.dictionaries(st.text(), values, max_size=4))
def test_message_packed_and_unpacked_is_equal(message: dict[str, object]) -> None:
    packed = pack(message)
    assert struct.unpack_from("<I", packed)[0] == len(packed) - 4
    assert unpack(packed[4:]) == message


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01", b"\x01", b"\x81\x01\x02"])
def test_unpack_what_is_no_message_raises(body: bytes) -> None:
    with pytest.raises(CorruptDataError, match="not a message"):
        unpack(body)


def test_receive_in_pieces_then_end(pair: tuple[BlockingChannel, socket.socket]) -> None:
    channel, other = pair
    data = pack({"a": 1}) + pack({"b": b"x" * 5000})
    sender = threading.Thread(
        target=lambda: [other.send(data[i : i + 700]) for i in range(0, len(data), 700)]
    )
    sender.start()
    assert channel.receive() == {"a": 1}
    assert channel.receive() == {"b": b"x" * 5000}
    sender.join()
    other.sendall(pack({"half": True})[:-1])
    other.close()
    assert channel.receive() is None


def test_receive_length_beyond_limit_raises_before_allocating(
    pair: tuple[BlockingChannel, socket.socket],
) -> None:
    channel, other = pair
    other.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(CorruptDataError, match="4,294,967,295"):
        channel.receive()


def test_send_other_end_gone_raises(pair: tuple[BlockingChannel, socket.socket]) -> None:
    channel, other = pair
    other.close()
    with pytest.raises(ClosedError):
        channel.send({"a": 1})


def test_shut_copy_of_other_end_elsewhere_receives_the_rest_and_ends(
    pair: tuple[BlockingChannel, socket.socket],
) -> None:
    channel, other = pair
    copy = os.dup(other.fileno())
    try:
        other.sendall(pack({"last": True}))
        other.close()
        channel.shut()
        assert channel.receive() == {"last": True}
        assert channel.receive() is None
        with pytest.raises(ClosedError):
            channel.send({})
    finally:
        os.close(copy)


def test_close_wakes_a_receiver(pair: tuple[BlockingChannel, socket.socket]) -> None:
    channel, _ = pair
    got: list[object] = ["nothing"]
    receiver = threading.Thread(target=lambda: got.append(channel.receive()))
    receiver.start()
    channel.close()
    channel.close()
    receiver.join(10)
    assert got == ["nothing", None]


def test_async_channel_speaks_to_blocking_one_and_stops() -> None:
    async def talk() -> None:
        ours, theirs = socket.socketpair()
        one, other = await AsyncChannel.over(ours), BlockingChannel(theirs)
        other.send({"q": 1})
        assert await one.receive() == {"q": 1}
        await one.send({"a": 2})
        assert await asyncio.to_thread(other.receive) == {"a": 2}
        waiting = asyncio.ensure_future(one.receive())
        await asyncio.sleep(0)
        one.stop_receiving()
        one.stop_receiving()
        assert await waiting is None
        other.close()
        await one.close()
        await one.close()

    asyncio.run(talk())
