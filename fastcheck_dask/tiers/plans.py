"""Plans: what the first author of a checkpoint says of how it is going to lie in the object tier."""

from __future__ import annotations

import json
from dataclasses import asdict

from fastcheck_dask.errors import CommitConflictError, CorruptDataError, FastCheckError, ShardUnavailableError
from fastcheck_dask.layout.manifest import parse_json
from fastcheck_dask.layout.zarr_tree import PRIVATE
from fastcheck_dask.tiers.commit_marker import Apart, Mix, Needs, Plan
from fastcheck_dask.tiers.store import ObjectStore


def path_of(directory: str) -> str:
    """Return where the plan of a checkpoint lies, relative to the location."""
    return f"{PRIVATE}/plans/{directory}.json"


def planned(store: ObjectStore, directory: str, token: str) -> Plan | None:
    """Return the plan of a checkpoint; None if no author with that token made one.

    Raises
    ------
    CorruptDataError
        If there is one that cannot be read.
    """
    path = path_of(directory)
    try:
        data = store.read(path)
    except ShardUnavailableError:
        return None
    where = f"{path} in {store.location}"
    try:
        found = parse_json(data, where)
        if found["token"] != token:
            return None
        mix, apart = found.get("mix"), found.get("apart")
        needs = Needs.from_document({"base": found["base"], "refs": found.get("refs", ())})
        return Plan(
            needs,
            None if mix is None else Mix.from_document(mix),
            None if apart is None else Apart.from_document(apart),
        )
    except CorruptDataError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, FastCheckError) as error:
        raise CorruptDataError(f"{where}: damaged ({error!r}); remove it") from error


def plan(store: ObjectStore, directory: str, token: str, *, wanted: Plan) -> Plan:
    """Make a plan; the first author of a token decides for all, and what was decided is returned.

    Two processes may write one generation at once, and what one leaves to other checkpoints, the other must
    not declare to be there.
    """
    document = {"token": token, "mix": None if wanted.mix is None else asdict(wanted.mix)}
    if wanted.apart is not None:
        document["apart"] = wanted.apart.to_document()
    data = json.dumps(document | wanted.needs.to_document()).encode()
    for _ in range(2):
        if store.create(path_of(directory), data):
            return wanted
        found = planned(store, directory, token)
        if found is not None:
            return found
        # Of an author whose attempt came to nothing.
        store.delete(path_of(directory))
    raise CommitConflictError(f"{directory} in {store.location}: its plan comes and goes")
