from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from fastcheck_dask.testing.checkpoints import write_checkpoint, write_joint

CHUNK = "00000003-step_10000/model/w/c/0"


def test_verify_intact_says_that_it_can_be_restored(saved, run, answer):
    text = run("verify", saved).stdout
    assert text == "00000003-step_10000: intact (24.00 kB); it can be restored\n"
    found = answer("verify", saved, "--all", "--strict")
    assert [(c["tag"], c["intact"], c["restorable"]) for c in found["checkpoints"]] == [
        ("step_500", True, True),
        ("step_2500", True, True),
        ("step_10000", True, True),
    ]


def test_verify_names_what_is_wrong(saved, run, answer):
    (saved / CHUNK).write_bytes(b"x")
    (saved / "00000003-step_10000/model/zarr.json").unlink()
    found = answer("verify", saved, "step_10000", status=1)["checkpoints"][0]
    assert {(p["name"], p["fault"], p["fatal"]) for p in found["problems"]} == {
        (CHUNK, "damaged", True),
        ("00000003-step_10000/model/zarr.json", "missing", False),
    }
    assert not found["restorable"]
    text = run("verify", saved, status=1).stdout
    assert f"damaged: {CHUNK}" in text
    assert "can NOT be restored" in text
    run("verify", saved, "step_500")
    run("verify", saved, "--all", status=1)


def test_verify_all_sees_lost_and_damaged_markers(saved, answer):
    (saved / ".fastcheck/commits/00000001-step_500.json").unlink()
    (saved / ".fastcheck/commits/00000002-step_2500.json").write_bytes(b"{}")
    found = answer("verify", saved, "--all", status=1)
    assert [(p["name"], p["fault"]) for p in found["problems"]] == [
        (".fastcheck/commits/00000002-step_2500.json", "damaged"),
        (".fastcheck/commits/00000001-step_500.json", "unmarked"),
    ]
    assert [c["tag"] for c in found["checkpoints"]] == ["step_10000"]


def test_verify_repair_takes_another_copy(saved, run, answer, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    (saved / CHUNK).unlink()
    (saved / "00000003-step_10000/zarr.json").write_bytes(b"{}")
    found = answer("verify", saved, "--repair", status=1)
    assert [p["name"] for p in found["checkpoints"][0]["problems"]] == [CHUNK]
    assert found["repaired"] == ["00000003-step_10000/zarr.json from the manifest"]
    text = run("verify", saved, "--repair", "--from", tmp_path / "copy").stdout
    assert f"repaired: {CHUNK} from model/w/c/0 of 00000003-step_10000 in {tmp_path}/copy" in text
    assert "it can be restored" in text
    run("verify", saved, "--all", "--strict")


def test_verify_repair_makes_a_damaged_marker_again(saved, answer):
    marker = saved / ".fastcheck/commits/00000003-step_10000.json"
    good = marker.read_bytes()
    marker.write_bytes(b"{}")
    found = answer("verify", saved, "--all", "--repair")
    assert found["repaired"] == [".fastcheck/commits/00000003-step_10000.json from the checkpoint itself"]
    assert marker.read_bytes() == good


def test_verify_newest_marker_damaged_or_gone_is_told_of_that_checkpoint_alone(saved, run, answer):
    marker = saved / ".fastcheck/commits/00000003-step_10000.json"
    good = marker.read_bytes()
    meant = ([], ["step_10000"], ["00000003-step_10000"])
    for fault in ("damaged", "unmarked"):
        marker.write_bytes(b"{}") if fault == "damaged" else marker.unlink()
        for chosen in meant:
            found = answer("verify", saved, *chosen, status=1)
            assert [(p["name"], p["fault"]) for p in found["problems"]] == [
                (".fastcheck/commits/00000003-step_10000.json", fault)
            ]
        answer("verify", saved / "00000003-step_10000", status=1)
        run("verify", saved, "step_500")
    marker.write_bytes(good[:-1])
    assert answer("verify", saved, "--repair")["repaired"] == [
        ".fastcheck/commits/00000003-step_10000.json from the checkpoint itself"
    ]
    # What is older than the newest checkpoint is not it.
    (saved / ".fastcheck/commits/00000001-step_500.json").unlink()
    run("verify", saved)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--all", "step_500"], "not both"),
        (["--from", "."], "are for --repair"),
        (["--repair", "--coordinator", "http://x"], "sqlite:///"),
        (["--repair", "--from", "/no/where"], "does not exist"),
    ],
)
def test_verify_wrong_usage_is_status_2(saved, run, arguments, said):
    assert said in run("verify", saved, *arguments, status=2).stderr


def test_gc_removes_what_died_and_says_what_it_keeps(saved, run, answer):
    write_checkpoint(str(saved), {"w": np.ones(500)}, "old", generation=4, publish=False)
    for path in saved.rglob("*"):
        os.utime(path, (1.0, 1.0))
    write_checkpoint(str(saved), {"w": np.ones(500)}, "new", generation=5, publish=False)
    assert "would be removed: unfinished 00000004-old" in run("gc", saved, "--dry-run").stdout
    assert (saved / "00000004-old").exists()
    found = answer("gc", saved, "--grace", "1h")
    assert [f["name"] for f in found["removed"]] == ["00000004-old"]
    assert not (saved / "00000004-old").exists()
    assert "kept: unfinished 00000005-new" in run("gc", saved).stdout
    run("verify", saved, "--all")


@pytest.mark.parametrize("grace", ["5min", "soon", "-1h", "nan"])
def test_gc_grace_that_cannot_be_is_status_2(saved, run, grace):
    assert "--grace" in run("gc", saved, "--grace", grace, status=2).stderr or grace == "-1h"


def test_verify_of_several_ranks_names_and_repairs_any_part(tmp_path, run, answer):
    location = tmp_path / "ckpts"
    for number in (1, 2):
        states = [{"w": np.full(500, 10 * number + rank, np.float32)} for rank in range(2)]
        write_joint(str(location), states, f"t{number}", number=number)
    shutil.copytree(location, tmp_path / "copy")
    text = run("verify", location).stdout
    assert text.count("it can be restored") == 2
    assert "rank-00001/00000002-t2: intact" in text
    chunk = "rank-00001/00000002-t2/w/c/0"
    (location / chunk).write_bytes(b"x")
    assert f"damaged: {chunk}" in run("verify", location, status=1).stdout
    run("verify", location, "t1")
    text = run("verify", location, "--repair", "--from", tmp_path / "copy").stdout
    assert f"repaired: {chunk} from w/c/0 of 00000002-t2 in {tmp_path}/copy/rank-00001" in text
    (location / "rank-00000/.fastcheck/commits/00000001-t1.json").write_bytes(b"{}")
    found = answer("verify", location, "--all", "--repair")
    assert [c["directory"] for c in found["checkpoints"]] == [
        f"rank-0000{rank}/0000000{number}-t{number}" for rank in range(2) for number in (1, 2)
    ]
    shutil.rmtree(location / "rank-00001")
    found = answer("verify", location, status=1)
    assert [p["name"] for p in found["problems"]] == ["rank-00001/.fastcheck/commits/00000002-t2.json"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted"])
def test_verify_repairs_a_joint_marker_that_all_ranks_prove(tmp_path, run, answer, damage):
    location = tmp_path / "ckpts"
    states = [{"w": np.full(500, rank, np.float32)} for rank in range(3)]
    for number in (1, 2):
        write_joint(str(location), states, f"t{number}", number=number)
    path = location / ".fastcheck/joint/00000002-t2.json"
    data = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        at = data.index(b"tokens") + 12
        path.write_bytes(data[:at] if damage == "truncated" else data[:at] + b"#" + data[at + 1 :])
    for chosen in ((), ("t2",), ("--all",)):
        found = answer("verify", location, *chosen, status=1)
        assert path.name in [p["name"].rpartition("/")[2] for p in found["problems"]]
        assert "--repair" in str(found["problems"])
    assert (
        f"repaired: .fastcheck/joint/{path.name} from its copy" in run("verify", location, "--repair").stdout
    )
    assert path.read_bytes() == data
    run("verify", location, "--all")
    # What a rank does not have is not made up.
    path.unlink()
    (location / "rank-00002/.fastcheck/commits/00000002-t2.json").unlink()
    assert answer("verify", location, "--repair")["checkpoints"][0]["tag"] == "t1"
    assert not path.exists()
