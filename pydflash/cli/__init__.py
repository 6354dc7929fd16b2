"""The command line. The only place that reads environment variables, configures logging, and prints."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from pydflash import __version__
from pydflash.cli.bench import bench
from pydflash.cli.chat import chat
from pydflash.cli.convert import convert
from pydflash.cli.devices import devices
from pydflash.cli.generate import generate
from pydflash.cli.inspect import inspect
from pydflash.cli.serve import serve
from pydflash.errors import DeviceError, InternalError, OutOfMemoryError, PoisonedError, PydflashError

_USAGE = 2
_FAILURE = 1
_INTERRUPTED = 130
_OUR_FAULT = (DeviceError, InternalError, OutOfMemoryError, PoisonedError)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run Qwen3.5-family GGUF models with DFlash speculative decoding.",
    epilog="Environment: PYDFLASH_MODEL, PYDFLASH_DRAFT, PYDFLASH_DEVICE stand in for --model, --draft, --device.",
)
for command in (generate, chat, serve, inspect, bench, devices, convert):
    app.command()(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pydflash {__version__}")
        raise typer.Exit


@app.callback()
def root(
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Show the log; -vv in detail.")] = 0,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options for every command."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr, force=True)
    logging.getLogger("pydflash").setLevel(level)


def main() -> None:
    """Run the command line and end the process.

    Exit status: 0, 1 after a failure, 2 for what the user can correct, 130 after Ctrl-C.
    """
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; the exit status. Errors are one line on standard error."""
    try:
        result = typer.main.get_command(app).main(arguments, prog_name="pydflash", standalone_mode=False)
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
    except typer.Abort:
        return _INTERRUPTED
    except TyperException as error:
        return _complain(error.format_message(), _USAGE)
    except PydflashError as error:
        return _complain(error.message, _FAILURE if isinstance(error, _OUR_FAULT) else _USAGE)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough; what is still buffered must not raise once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILURE
    return result if isinstance(result, int) else 0


def _complain(message: str, status: int) -> int:
    print(f"pydflash: {' '.join(message.split())}", file=sys.stderr)
    return status
