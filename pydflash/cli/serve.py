"""pydflash serve"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from pathlib import Path
from typing import Annotated

import typer

from pydflash.cli import flags
from pydflash.cli.terminal import error_console
from pydflash.errors import InvalidArgumentError, NotFoundError
from pydflash.options import CacheType, EngineOptions, SamplingOptions

_SERVER = "Server"


def serve(
    model: flags.Model = None,
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            "--model-draft",
            "-d",
            "-md",
            envvar="PYDFLASH_DRAFT",
            metavar="auto|none|PATH",
            help="Drafter: a GGUF file or a Hugging Face folder. auto: the built-in one for the built-in model.",
            rich_help_panel="Model",
        ),
    ] = "auto",
    ctx_size: Annotated[
        int, typer.Option("--ctx-size", "-c", min=2, help="Context of each slot.", rich_help_panel="Model")
    ] = 4096,
    parallel: Annotated[
        int, typer.Option("--parallel", "-np", min=1, help="Slots: requests that run side by side.")
    ] = 4,
    ubatch_size: Annotated[
        int,
        typer.Option(
            "--ubatch-size",
            "-ub",
            min=1,
            help="Prompt tokens of one chunk; other slots step in between.",
            rich_help_panel="Model",
        ),
    ] = 512,
    device: flags.Device = "cpu",
    threads: flags.Threads = 0,
    cache_type_k: Annotated[
        CacheType, typer.Option("--cache-type-k", "-ctk", help="Storage of keys.", rich_help_panel="Model")
    ] = "f16",
    cache_type_v: Annotated[
        CacheType, typer.Option("--cache-type-v", "-ctv", help="Storage of values.", rich_help_panel="Model")
    ] = "f16",
    draft_max: Annotated[
        int | None,
        typer.Option(
            "--draft-max",
            "--spec-draft-n-max",
            min=0,
            max=63,
            show_default=False,
            rich_help_panel="Model",
            help="Proposals verified in a step, 0: none. Chosen by measured cost by default.",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0: a free one.", rich_help_panel=_SERVER)
    ] = 8080,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            envvar="PYDFLASH_API_KEY",
            help="Key that requests have to bring; commas, or again, for more.",
            rich_help_panel=_SERVER,
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help="Keys, one a line.", rich_help_panel=_SERVER, show_default=False),
    ] = None,
    alias: Annotated[
        str | None,
        typer.Option("--alias", "-a", help="Name of the model in responses.", rich_help_panel=_SERVER),
    ] = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="GET /metrics.", rich_help_panel=_SERVER)] = False,
    props: Annotated[bool, typer.Option("--props", help="POST /props.", rich_help_panel=_SERVER)] = False,
    slots: Annotated[bool, typer.Option("--slots/--no-slots", help="GET /slots.", rich_help_panel=_SERVER)] = True,
    slot_save_path: Annotated[
        Path | None,
        typer.Option(
            "--slot-save-path",
            help="Folder for saved slots; this version cannot save any yet.",
            rich_help_panel=_SERVER,
            show_default=False,
        ),
    ] = None,
    web_page: Annotated[
        bool, typer.Option("--ui/--no-ui", "--webui/--no-webui", help="The page at /.", rich_help_panel=_SERVER)
    ] = True,
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=0, help="Requests that may wait; more get 429.", rich_help_panel=_SERVER)
    ] = 256,
    max_body: Annotated[
        int, typer.Option("--max-body", min=1024, help="Bytes of a request's body.", rich_help_panel=_SERVER)
    ] = 32 * 2**20,
    drain: Annotated[
        float,
        typer.Option("--drain", min=0, help="Seconds that requests may go on after SIGTERM.", rich_help_panel=_SERVER),
    ] = 30.0,
    cors_origins: Annotated[
        str,
        typer.Option("--cors-origins", help="Origins that browsers may call from; *: any.", rich_help_panel=_SERVER),
    ] = "",
    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", min=-1, help="Default of max_tokens; -1: no limit.")
    ] = -1,
    temperature: Annotated[float, typer.Option("--temp", "--temperature", min=0, help="Default of temperature.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Default of top_k; 0: off.")] = 40,
    top_p: Annotated[float, typer.Option("--top-p", min=0, max=1, help="Default of top_p; 1: off.")] = 0.95,
    min_p: Annotated[float, typer.Option("--min-p", min=0, max=1, help="Default of min_p; 0: off.")] = 0.05,
    seed: Annotated[int, typer.Option("--seed", "-s", min=-1, help="Default of seed; -1: random.")] = -1,
    _jinja: Annotated[bool, typer.Option("--jinja", hidden=True, help="Templates are always used so.")] = True,
) -> None:
    """Serve HTTP requests in the forms of llama.cpp's server, OpenAI and Anthropic.

    \b
    Examples:
      pydflash serve
      pydflash serve --model big.gguf --model-draft drafter.gguf --ctx-size 32768 --parallel 4 --metrics
      curl http://127.0.0.1:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hi"}]}'
    """
    missing = [
        name for name in ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance") if not _has(name)
    ]
    if missing:
        raise NotFoundError(f"`pydflash serve` needs {', '.join(missing)}: pip install 'pydflash[server]'")
    from pydflash.server.options import ServerOptions
    from pydflash.server.serve import serve as run
    from pydflash.server.service import Service

    options = ServerOptions(
        model=model,
        draft=flags.draft_path(draft),
        engine=EngineOptions(
            n_ctx=ctx_size,
            device=device,
            n_threads=threads,
            k_type=cache_type_k,
            v_type=cache_type_v,
            prefill_chunk=ubatch_size,
        ),
        n_slots=parallel,
        sampling=SamplingOptions(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=None if seed == -1 else seed,
            max_tokens=n_predict if n_predict > 0 else None,
            width=None if draft_max is None else draft_max + 1,
        ),
        host=host,
        port=port,
        alias=[] if alias is None else [name.strip() for name in alias.split(",") if name.strip()],
        api_keys=_keys(api_key or (), api_key_file),
        metrics=metrics,
        slots=slots,
        props=props,
        slot_folder=slot_save_path,
        max_queue=max_queue,
        max_body=max_body,
        drain_seconds=drain,
        web_page=web_page,
        cors_origins=[origin.strip() for origin in cors_origins.split(",") if origin.strip()],
    )
    console = error_console()
    if not options.is_loopback and not options.api_keys:
        console.print(f"{host} can be reached from other machines, and no --api-key is asked for", markup=False)

    def ready(service: Service) -> None:
        engine = service.process.ready
        drafter = engine.drafter if engine is not None and engine.drafter else "no drafter"
        console.print(f"ready: {service.model_name}, {drafter}, {parallel} slots of {ctx_size} tokens", markup=False)

    def listening(url: str) -> None:
        console.print(f"listening on {url}", markup=False)

    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    asyncio.run(run(options, on_listening=listening, on_ready=ready))


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _keys(given: list[str] | tuple[str, ...], file: Path | None) -> list[str]:
    keys = [key.strip() for entry in given for key in entry.split(",")]
    if file is not None:
        try:
            keys += [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError("--api-key-file", str(file), f"a readable text file ({error})") from error
    keys = [key for key in keys if key]
    if (given or file is not None) and not keys:
        raise InvalidArgumentError("--api-key", "...", "at least one key")
    return keys
