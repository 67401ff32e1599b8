"""One slot and several processes and threads: what the others see, also of one that is killed."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from fastcheck_dask.errors import (
    CorruptDataError,
)
from fastcheck_dask.tiers.local import Slot, SlotState

MIB = 2**20

#: Begins a snapshot in slot 1, copies half of it, says so, and waits to be killed.
_HALF_A_COPY = """
import sys
from pathlib import Path
from fastcheck_dask.tiers.local import LocalTier
slot = LocalTier("run", Path(sys.argv[1])).slots[1]
slot.reserve(2**20)
slot.begin("half", "half")
slot.data[: 2**19] = 7
print("WRITING", flush=True)
sys.stdin.read()
"""
#: Saves for ever, into the slots in turn; each byte of generation g, and its manifest, say g.
_SAVE_FOR_EVER = """
import sys
from pathlib import Path
from fastcheck_dask.tiers.local import LocalTier
slots = LocalTier("run", Path(sys.argv[1])).slots
generation = 0
while True:
    generation += 1
    slot = slots[generation % 2]
    slot.reserve(2**20)
    slot.begin(f"token{generation}", f"tag{generation}")
    slot.data[: 2**20] = generation % 251
    slot.complete(b"draft %d" % generation, 2**20)
    slot.seal(b"%d" % generation)
    slot.commit(generation)
    print(generation, flush=True)
"""
_DIGEST = """
import hashlib, sys
from pathlib import Path
from fastcheck_dask.tiers.local import LocalTier
slot = LocalTier("run", Path(sys.argv[1]), readonly=True).slots[0]
print(hashlib.sha256(slot.data[: slot.status.data_bytes]).hexdigest(), slot.read_manifest().decode())
"""
_SAVE_ONCE = """
import hashlib, sys
import numpy as np
from pathlib import Path
from fastcheck_dask.tiers.local import LocalTier
slot = LocalTier("run", Path(sys.argv[1])).slots[0]
slot.reserve(10_000)
slot.begin("token", "tag")
slot.data[:10_000] = np.random.default_rng(5).integers(0, 256, 10_000)
slot.complete(b"draft", 10_000)
slot.seal(b"manifest")
slot.commit(3)
print(hashlib.sha256(slot.data[:10_000]).hexdigest())
"""


def _output(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_slot_written_by_one_process_is_read_by_another(save_slot, tier, root):
    digest = _output(_SAVE_ONCE, root)
    target = tier.slots[0]
    assert (target.status.state, target.status.generation) == (SlotState.COMMITTED, 3)
    assert hashlib.sha256(target.data[:10_000]).hexdigest() == digest
    save_slot(target, 4, nbytes=5000)
    digest = hashlib.sha256(bytes([4]) * 5000).hexdigest()
    assert _output(_DIGEST, root) == f"{digest} manifest 4"


def test_slot_writer_killed_in_mid_copy_is_torn_and_the_other_intact(save_slot, tier, root, running):
    save_slot(tier.slots[0], 1, generation=8)
    save_slot(tier.slots[1], 2, generation=9)
    with running(_HALF_A_COPY, root) as process:
        assert process.stdout.readline() == "WRITING\n"
        half = tier.slots[1]
        assert half.status.state is SlotState.WRITING
        assert not half.torn
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert half.torn
    assert (half.status.token, half.status.generation) == ("half", None)
    with pytest.raises(CorruptDataError, match="WRITING"):
        half.read_manifest()
    assert not tier.slots[0].torn
    assert (tier.slots[0].status.state, tier.slots[0].status.generation) == (SlotState.COMMITTED, 8)
    assert tier.slots[0].read_manifest() == b"manifest 1"
    assert set(tier.slots[0].data[:MIB].tolist()) == {1}
    half.clear()
    save_slot(half, 5, generation=10)
    assert half.read_manifest() == b"manifest 5"


@pytest.mark.parametrize("seed", range(6))
def test_slot_writer_killed_anywhere_leaves_a_whole_checkpoint(save_slot, tier, root, seed, running):
    chance = random.Random(seed)
    with running(_SAVE_FOR_EVER, root) as process:
        reached = 0
        for _ in range(chance.randint(2, 40)):
            reached = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
    whole = []
    for target in tier.slots:
        status = target.status
        if status.state in (SlotState.SEALED, SlotState.COMMITTED):
            number = int(target.read_manifest())
            assert (status.token, status.data_bytes) == (f"token{number}", MIB)
            assert set(target.data[:MIB].tolist()) == {number % 251}
            if status.state is SlotState.COMMITTED:
                assert status.generation == number
                whole.append(number)
        elif status.state is SlotState.SNAPSHOT:
            assert target.read_draft().split()[1] == status.tag.removeprefix("tag").encode()
            assert len(np.unique(target.data[:MIB])) == 1
    assert max(whole) >= reached - 1
    # A save that was under way when the process was killed is no obstacle to the next.
    for target in tier.slots:
        target.clear()
        save_slot(target, 1)


def test_slot_read_while_it_is_written_shows_one_state_at_a_time(save_slot, tier):
    target, reader = tier.slots[0], Slot(tier.slots[0].path, readonly=True)
    stop, failures = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                status = reader.status
                if status.state is SlotState.COMMITTED:
                    assert status.token == f"token{status.generation}"
                manifest = reader.read_manifest()
                assert manifest.startswith(b"manifest ")
            except CorruptDataError as error:
                if "while the slot is" not in str(error):
                    failures.append(error)
            except AssertionError as error:
                failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(200):
        save_slot(target, number, nbytes=10, generation=number)
    stop.set()
    thread.join()
    assert failures == []
