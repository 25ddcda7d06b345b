"""The options of commands to a coordinator's control port, which `--help` shows without loading grpc."""

from __future__ import annotations

from collections.abc import Callable

import click

from baton.core.commands import Role

FLIP_S: dict[Role, float] = {"decode": 0.5, "prefill": 30.0}
"""Time for running requests before a worker takes that role: prompts are short and can start again elsewhere, streams
are not and would be computed again."""


def control_options(command: Callable[..., int]) -> Callable[..., int]:
    """Adds the options of commands that a coordinator's control port takes."""
    for option in (
        click.option(
            "--cluster-tls-dir",
            default="",
            metavar="DIR",
            help="directory with operator.pem, for a cluster that uses TLS",
        ),
        click.option(
            "--cluster-token-file",
            default="",
            envvar="BATON_CLUSTER_TOKEN_FILE",
            metavar="FILE",
            help="file with the cluster token; needed off loopback",
        ),
        click.option(
            "--coordinator", default="", metavar="HOST:PORT", help="control address, if URL does not report it"
        ),
    ):
        command = option(command)
    return command
