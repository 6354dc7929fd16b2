"""pydflash devices"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pydflash.cli.terminal import size
from pydflash.devices import devices as list_devices


def devices(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List the devices that a model can be put on.

    \b
    Examples:
      pydflash devices
      pydflash generate "import os" --device cuda:1
    """
    found = list_devices()
    if as_json:
        print(json.dumps([asdict(device) for device in found]))
        return
    table = Table("name", "kind", "description", "free", "total")
    for device in found:
        table.add_row(device.name, device.kind, device.description, size(device.memory_free), size(device.memory_total))
    Console().print(table)
