"""Commands and groups that say in one line what is wrong."""

from __future__ import annotations

from typing import Any

import click

from fastcheck_dask.errors import FastCheckError


class OneLineError(click.ClickException):
    """An error that is shown as one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class WrongValueError(OneLineError):
    """An option has a value that it cannot have."""

    exit_code = 2


class Command(click.Command):
    """Says in one line what is wrong: exit status 2 for a value, 1 for an error of FastCheck."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments."""
        try:
            return super().make_context(info_name, args, parent=parent, **extra)
        except click.UsageError as error:
            raise WrongValueError(error.format_message()) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise WrongValueError(error.format_message()) from error
        except FastCheckError as error:
            raise OneLineError(str(error)) from error


class Group(click.Group):
    """A group of such commands."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; an unknown one is named in one line."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise WrongValueError(error.format_message()) from error
