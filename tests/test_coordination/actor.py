"""A process that holds a coordinator: reads commands as JSON lines, answers each with one."""

from __future__ import annotations

import json
import sys

from fastcheck_dask.coordination import CommitRecord, NodeInfo, connect
from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.errors import FastCheckError


def decision(run: str, generation: int, token: str, fence: int) -> CommitRecord:
    # The fencing token goes where a test can read it back.
    return CommitRecord(run, generation, "t", token, "d", (), (), 0, False, 0, float(fence))


def main(url: str, session_seconds: str) -> None:
    coordinator = connect(url, session_seconds=float(session_seconds))
    claims = {}
    registrations = {}
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: object = True
        try:
            if command == "register":
                registrations[arguments[0]] = coordinator.register(
                    NodeInfo(arguments[0], "fcs://other:1", "r", "other", 1)
                )
            elif command == "claim":
                claim = coordinator.claim(arguments[0], "actor", wait_seconds=arguments[1])
                claims[claim.run] = claim
                answer = claim.fencing_token
            elif command == "make":
                coordinator.entries.apply(Create(arguments[0], b"", ephemeral=True))
                answer = coordinator.entries.session
            elif command == "standing":
                answer = [coordinator.entries.connected, coordinator.entries.session]
            elif command == "commit":
                record = CommitRecord.from_bytes(arguments[0].encode())
                answer = coordinator.commit(record, claims[record.run]).token
            elif command == "claim and commit":
                record = CommitRecord.from_bytes(arguments[0].encode())
                claim = coordinator.claim(record.run, "actor", wait_seconds=60.0)
                try:
                    answer = coordinator.commit(record, claim).token
                finally:
                    claim.close()
            elif command == "own":
                # Again and again: take the run, commit what comes next, give it back.
                run, rounds, token = arguments
                for turn in range(rounds):
                    claim = coordinator.claim(run, "actor", wait_seconds=60.0)
                    latest = coordinator.latest(run)
                    generation = latest.generation + 1 if latest else 0
                    coordinator.commit(
                        decision(run, generation, f"{token}-{turn}", claim.fencing_token), claim
                    )
                    claim.close()
        except FastCheckError as error:
            answer = type(error).__name__
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
