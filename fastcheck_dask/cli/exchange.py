"""The commands ``export`` and ``import``: files of other programs."""

from __future__ import annotations

from pathlib import Path

import click

from fastcheck_dask.cli.arguments import checked_coordinator, checked_name
from fastcheck_dask.cli.command import Command
from fastcheck_dask.cli.location import opened_checkpoint, rank_option
from fastcheck_dask.cli.output import emit, json_option, progress, size
from fastcheck_dask.errors import ConfigError


@click.command(cls=Command)
@click.argument("url")
@click.argument("tag", required=False)
@click.option(
    "--to", "file", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file."
)
@click.option("--include", help="Only tensors and values whose path matches, like 'model/*'.")
@click.option("--strip", default="", help="A beginning that the names in a safetensors file do without.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@rank_option
@json_option
def export(
    url: str,
    tag: str | None,
    *,
    file: Path,
    include: str | None,
    strip: str,
    force: bool,
    rank: int | None,
    as_json: bool,
) -> None:
    """Write a checkpoint (the newest, or TAG) into FILE.safetensors, or FILE.pt for torch.load."""
    from fastcheck_dask.inspection import export as exporting

    checkpoint = opened_checkpoint(url, tag, rank=rank)
    try:
        with progress("exporting", checkpoint.nbytes) as advance:
            done = exporting.export(
                checkpoint, file, include=include, strip=strip, force=force, advance=advance
            )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    left = f"; {len(done.left_out)} plain values have no place in it" if done.left_out else ""
    emit(
        done,
        as_json=as_json,
        show=lambda console: console.print(
            f"{done.file}: {done.tensors} tensors, {size(done.nbytes)}{left}", markup=False, soft_wrap=True
        ),
    )


@click.command(name="import", cls=Command)
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--to", "url", required=True, help="Checkpoint directory: a folder, or s3://bucket/folder.")
@click.option("--tag", required=True, callback=checked_name, help="Tag of the new checkpoint.")
@click.option(
    "--coordinator",
    callback=lambda ctx, option, value: None if value is None else checked_coordinator(ctx, option, value),
    help="Of the run, if it has one.",
)
@click.option("--trust", is_flag=True, help="Run what torch would unpickle. Only for files that you made.")
@json_option
def import_(source: Path, *, url: str, tag: str, coordinator: str | None, trust: bool, as_json: bool) -> None:
    """Save what is in SOURCE as a checkpoint.

    SOURCE is a file of torch.save, a safetensors file, or a folder of safetensors files or of
    torch.distributed.checkpoint. Nothing in it is run unless --trust is given.
    """
    from fastcheck_dask.inspection.foreign import read_foreign
    from fastcheck_dask.manager import FastCheckManager

    state = read_foreign(source, trust=trust)
    with FastCheckManager(url, coordinator=coordinator, persist_every=1) as manager:
        handle = manager.save_async(state, tag)
        handle.wait("object")
        path, generation = manager.path(tag), handle.generation
    emit(
        {"path": path, "tag": tag, "generation": generation},
        as_json=as_json,
        show=lambda console: console.print(
            f"{source} is {tag}, generation {generation}: {path}", markup=False, soft_wrap=True
        ),
    )
