"""The command line of every process, derived from its config dataclass.

    @config_command(WorkerConfig, name="prefill", help="A prefill worker.")
    def command(config: WorkerConfig) -> int | None: ...

    if __name__ == "__main__":
        run_main(command)

Each field becomes one option (a bool becomes `--exact/--no-exact`). Precedence is file < environment < flags. Nothing
here imports torch or grpc, so `--help` is instant.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, NoReturn, TypeVar, get_type_hints

import click

from baton.core.errors import BatonError, StartupError
from baton.runtime.config import differences, resolve
from baton.runtime.paths import read_text
from baton.runtime.process import record_error
from baton.runtime.status import printable

Config = TypeVar("Config")

EXIT_STARTUP_ERROR = 3
"""The exit code of a process that could not start and reported why in one line."""

EXIT_OUTPUT_LOST = 1
"""The exit code of a process that did its work but could not write its output."""

MAX_ERROR_CHARS = 4000
"""Of the line that a command ends with."""

_CONFIG_FILE = "config_file"
_PRINT_CONFIG = "print_config"
_POSITIONAL = "positional_argument"


class NumberRange(click.FloatRange):
    """click's range, which also refuses NaN: that is neither below nor above any bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{number} is not in the range {self._describe_range()}.", param, ctx)
        return number


def config_command(
    cls: type[Config], *, name: str, help: str, positional: str = ""
) -> Callable[[Callable[[Config], int | None]], click.Command]:
    """Returns a decorator that turns `fn(config)` into a click command whose options are the fields of `cls`. The field
    `positional` may also be given as a positional argument."""

    def decorate(fn: Callable[[Config], int | None]) -> click.Command:
        def callback(**given: Any) -> int | None:
            path, show, word = given.pop(_CONFIG_FILE), given.pop(_PRINT_CONFIG), given.pop(_POSITIONAL, None)
            if word is not None:
                if given.get(positional) not in (None, word):
                    raise StartupError(f"{word!r} and --{positional} {given[positional]!r} conflict; give one of them")
                given[positional] = word
            for f in _several(cls):
                given[f.name] = _one_text(f, given[f.name])
            flags = {key: value for key, value in given.items() if value is not None}
            config = resolve(cls, file=read_config_file(path), env=os.environ, flags=flags)
            for name in _secrets(cls):
                os.environ.pop(f"BATON_{name.upper()}", None)  # child processes would inherit it
            if show:
                click.echo(describe(config))
                return 0
            return fn(config)

        words = [click.Argument([_POSITIONAL], required=False, metavar=f"[{positional.upper()}]")] if positional else []
        command = click.Command(name, params=[*words, *_parameters(cls)], callback=callback, help=help)
        command.context_settings = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
        return command

    return decorate


def run_main(command: click.Command, argv: Sequence[str] | None = None, *, prog_name: str | None = None) -> NoReturn:
    """Runs `command` and exits with its return value. An error at start is one plain line on stderr and code 3, a
    failed write to stdout such a line and code 1; nothing is printed if the reader of a pipe has closed it."""
    code = 0
    try:
        code = _run(command, argv, prog_name)
        lost = flush_stdout()
    except OSError as error:
        lost = flush_stdout("\n")  # did stdout fail? If unbuffered, only writing a newline shows it
        if lost is None or lost.errno != error.errno:
            raise
    if lost is not None and lost.errno != errno.EPIPE:
        print(f"error: standard output cannot be written: {lost.strerror}", file=sys.stderr, flush=True)
    sys.exit(code or (0 if lost is None else EXIT_OUTPUT_LOST))


def flush_stdout(end: str = "") -> OSError | None:
    """Flushes stdout and writes `end`. If that fails, discards the data, which the interpreter would otherwise write
    again at exit, and returns the error."""
    if sys.stdout is None or sys.stdout.closed:
        return None
    try:
        print(end=end, file=sys.stdout, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        return error
    return None


def error_line(error: BatonError, where: str = "") -> str:
    """Returns `error: ...`, always a single line without control characters; `where` precedes the message."""
    return "error: " + printable(where + " ".join(error.message.split()), MAX_ERROR_CHARS)


def read_config_file(path: str | None) -> Mapping[str, object]:
    """Returns the keys of a TOML file, or none without a path.

    Raises:
        StartupError: the file cannot be read, or is not TOML that can be parsed.
    """
    if path is None:
        return {}
    try:
        return tomllib.loads(read_text(path).removeprefix("\ufeff"))  # some editors write a byte order mark first
    except OSError as error:
        raise StartupError(f"config file {path}: {error.strerror or error}") from None
    except RecursionError:
        raise StartupError(f"config file {path} is nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number longer than Python parses
        raise StartupError(f"config file {path} is not TOML: {error}") from None


def describe(config: object) -> str:
    """Returns the values that are not defaults, as TOML, one per line; `--print-config` prints them. Secrets are only
    named."""
    changed, secrets = differences(config), _secrets(type(config))
    if not changed:
        return "# every value is at its default"
    lines = [
        f"# {key} is set, and not shown" if key in secrets else f"{key} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in changed.items()
    ]
    return "\n".join(lines)


def _secrets(cls: type[Any]) -> list[str]:
    return [f.name for f in fields(cls) if f.metadata.get("secret")]


def _several(cls: type[Any]) -> list[Field[Any]]:
    return [f for f in fields(cls) if f.metadata["several"]]


def _one_text(f: Field[Any], given: Sequence[str]) -> str | None:
    """Returns the words of an option that was given several times as one text; None if it was not given. A launcher
    passes its own empty value on to its processes."""
    if tuple(given) == ("",) and not f.metadata["secret"]:
        return ""
    for word in given:
        if not word.split() or (f.metadata["secret"] and len(word.split()) != 1):
            raise StartupError(f"--{f.name.replace('_', '-')}: a value is empty or contains white space")
    return " ".join(given) or None


def flags_of(options: Mapping[str, object]) -> list[str]:
    """Returns the command line flags that set these options."""
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _run(command: click.Command, argv: Sequence[str] | None, prog_name: str | None) -> int:
    try:
        code = command.main(args=argv, prog_name=prog_name, standalone_mode=False)
    except click.ClickException as exception:
        record_error(exception.format_message())
        exception.show()
        return exception.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except StartupError as error:
        record_error(error.message)
        flush_stdout()
        print(error_line(error), file=sys.stderr, flush=True)
        return EXIT_STARTUP_ERROR
    except UnicodeEncodeError as error:  # from the system: a path of a file, for example, in a locale without UTF-8
        lacks = f"this locale's encoding, {error.encoding}, lacks characters of {ascii(error.object)[:200]}"
        print(f"error: {lacks}; set LC_ALL=C.UTF-8", file=sys.stderr, flush=True)
        return EXIT_STARTUP_ERROR
    return code if isinstance(code, int) else 0


def _parameters(cls: type[Any]) -> list[click.Parameter]:
    types = get_type_hints(cls)
    parameters: list[click.Parameter] = [_parameter(f, types[f.name]) for f in fields(cls)]
    parameters.append(
        click.Option(["--config", _CONFIG_FILE], metavar="FILE", help="TOML file with any of these settings")
    )
    parameters.append(
        click.Option(
            ["--print-config", _PRINT_CONFIG],
            is_flag=True,
            help="print the values that differ from their defaults, and exit",
        )
    )
    return parameters


def _parameter(f: Field[Any], kind: type) -> click.Option:
    flag = "--" + f.name.replace("_", "-")
    shown = {True: "on", False: "off", "": "none"}.get(f.default, f.default) if kind in (bool, str) else f.default
    text = f"{f.metadata['help']}  [default: {shown}; BATON_{f.name.upper()}]"
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}", f.name], default=None, help=text)
    if f.metadata["several"]:
        return click.Option([flag, f.name], multiple=True, help=text)
    choices = f.metadata.get("choices")
    type_ = click.Choice(choices) if choices else {int: click.INT, float: click.FLOAT}.get(kind, click.STRING)
    return click.Option([flag, f.name], type=type_, default=None, help=text)
