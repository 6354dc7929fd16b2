"""llama.cpp's other routes: health, properties, models, slots, tokens, templates, metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pydflash import __version__
from pydflash.server.chat_prompt import ChatFields, chat_prompt
from pydflash.server.completion import generation_settings
from pydflash.server.errors import ApiError, loading, refuse
from pydflash.server.fields import Fields, read_fields
from pydflash.server.messages import SlotState
from pydflash.server.service import Service
from pydflash.server.streams import unless_gone

_ACTIONS: Final = ("save", "restore", "erase")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class TokenizeFields(Fields):
    """Fields of POST /tokenize."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeFields(Fields):
    """Fields of POST /detokenize."""

    tokens: list[int]


class SlotFields(Fields):
    """Fields of POST /slots/{id}."""

    filename: str | None = None


async def health(service: Service, _request: Request) -> Response:
    """GET /health: answers whatever the engine is doing."""
    if service.process.ready is None:
        raise loading()
    return JSONResponse({"status": "ok"})


async def metrics(service: Service, _request: Request) -> Response:
    """GET /metrics."""
    if not service.options.metrics:
        raise ApiError(501, "this server does not show metrics: start it with --metrics")
    return Response(
        service.metrics.text(service.process.status, service.process.restarts),
        headers={
            "Content-Type": "text/plain; version=0.0.4",
            "Process-Start-Time-Unix": str(int(service.started)),
        },
    )


async def props(service: Service, _request: Request) -> Response:
    """GET /props."""
    ready = service.process.ready
    if ready is None:
        raise loading()
    tokenizer, options = service.tokenizer, service.options
    kept = service.process.status.prefix_cache
    return JSONResponse(
        {
            "default_generation_settings": {
                "params": generation_settings(service, options.sampling),
                "n_ctx": service.n_ctx,
            },
            "total_slots": options.n_slots,
            "model_alias": service.model_name,
            "model_path": service.path.name,
            "model_ftype": str(service.metadata.get("general.file_type", "")),
            "modalities": {"vision": False, "audio": False},
            "endpoint_slots": options.slots,
            "endpoint_props": options.props,
            "endpoint_metrics": options.metrics,
            "ui": options.web_page,
            "chat_template": "" if service.template is None else service.template.source,
            "bos_token": "" if tokenizer.bos_id is None else tokenizer.piece(tokenizer.bos_id),
            "eos_token": "" if tokenizer.eos_id is None else tokenizer.piece(tokenizer.eos_id),
            "build_info": build_info(),
            "is_sleeping": False,
            "drafter": ready.drafter,
            "max_draft": ready.max_width - 1,
            "device": ready.device,
            "model_digest": ready.digest,
            "engine_pid": service.process.pid,
            "prefix_cache": None if kept is None else asdict(kept),
        }
    )


async def set_props(service: Service, request: Request) -> Response:
    """POST /props: there is nothing that can be changed."""
    if not service.options.props:
        raise ApiError(501, "this server does not change properties: start it with --props")
    read_fields(Fields, await request.body() or b"{}")
    return JSONResponse({"success": True})


async def models(service: Service, _request: Request) -> Response:
    """GET /models, /v1/models."""
    if service.process.ready is None:
        raise loading()
    name = service.model_name
    meta = {
        "vocab_type": 2,  # llama.cpp's number for byte-level BPE
        "n_vocab": service.tokenizer.n_vocab,
        "n_ctx": service.n_ctx,
        "n_ctx_train": service.meta("context_length", service.n_ctx),
        "n_embd": service.meta("embedding_length", 0),
        "n_params": service.n_parameters,
        "size": service.n_bytes,
        "ftype": str(service.metadata.get("general.file_type", "")),
    }
    entry = {
        "id": name,
        "aliases": list(service.options.alias),
        "tags": [],
        "object": "model",
        "created": int(service.started),
        "owned_by": "pydflash",
        "meta": {key: _plain(value) for key, value in meta.items()},
    }
    listed = {
        "name": name,
        "model": name,
        "type": "model",
        "capabilities": ["completion"],
        "details": {"format": "gguf"},
    }
    return JSONResponse({"object": "list", "data": [entry], "models": [listed]})


async def slots(service: Service, request: Request) -> Response:
    """GET /slots."""
    if not service.options.slots:
        raise ApiError(501, "this server does not show its slots: it was started with --no-slots")
    if service.process.ready is None:
        raise loading()
    states = service.process.status.slots
    if request.query_params.get("fail_on_no_slot") and all(state.request is not None for state in states):
        raise ApiError(503, "no slot is idle")
    return JSONResponse([_slot(service, state) for state in states])


async def slot_action(service: Service, request: Request) -> Response:
    """POST /slots/{id}?action=save|restore|erase."""
    action = request.query_params.get("action", "")
    if action not in _ACTIONS:
        raise refuse("action", action, "save, restore or erase")
    text = request.path_params["slot"]
    if not text.isdecimal() or int(text) >= service.options.n_slots:
        raise refuse("the slot's id", text, f"0 to {service.options.n_slots - 1}")
    slot = int(text)
    fields = read_fields(SlotFields, await request.body() or b"{}")
    if action != "erase":
        if service.options.slot_folder is None:
            raise ApiError(501, "this server saves no slots: start it with --slot-save-path")
        if fields.filename is None or not _NAME.fullmatch(fields.filename):
            raise refuse("filename", fields.filename, "1 to 128 letters, digits, dots, dashes and underscores")
    answer = await unless_gone(request, service.process.act(slot, action, fields.filename or ""))
    if action == "erase":
        return JSONResponse({"id_slot": slot, "n_erased": answer.n_tokens})
    done, moved = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    return JSONResponse(
        {
            "id_slot": slot,
            "filename": fields.filename,
            done: answer.n_tokens,
            moved: answer.n_bytes,
            "timings": {f"{action}_ms": answer.ms},
        }
    )


async def tokenize(service: Service, request: Request) -> Response:
    """POST /tokenize."""
    fields = read_fields(TokenizeFields, await request.body())
    ids = await service.encode(fields.content, add_special=fields.add_special, parse_special=fields.parse_special)
    if not fields.with_pieces:
        return JSONResponse({"tokens": list(ids)})
    return JSONResponse(
        {"tokens": [{"id": token, "piece": _piece(service.tokenizer.token_bytes(token))} for token in ids]}
    )


async def detokenize(service: Service, request: Request) -> Response:
    """POST /detokenize."""
    fields = read_fields(DetokenizeFields, await request.body())
    service.check_ids("tokens", fields.tokens)
    return JSONResponse({"content": service.tokenizer.decode(fields.tokens)})


async def apply_template(service: Service, request: Request) -> Response:
    """POST /apply-template."""
    fields = read_fields(ChatFields, await request.body())
    return JSONResponse({"prompt": (await chat_prompt(service, fields)).text})


async def count_tokens(service: Service, request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens."""
    fields = read_fields(ChatFields, await request.body())
    prompt = await chat_prompt(service, fields)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def not_supported(_service: Service, request: Request) -> Response:
    """Routes of llama.cpp's server for models of other kinds."""
    raise ApiError(501, f"{request.url.path} is not supported: the model generates text and nothing else")


async def lora_adapters(_service: Service, _request: Request) -> Response:
    """GET /lora-adapters: there are none."""
    return JSONResponse([])


def build_info() -> str:
    """What responses say about the program."""
    return f"pydflash-{__version__}"


def _slot(service: Service, state: SlotState) -> dict[str, object]:
    result: dict[str, object] = {
        "id": state.slot,
        "n_ctx": service.n_ctx,
        "speculative": state.speculative,
        "is_processing": state.request is not None,
        "n_held": state.held,
    }
    if state.request is not None:
        submit = service.process.submitted(state.request)
        result |= {
            "id_task": state.request,
            "n_prompt_tokens": state.prompt_tokens,
            "n_prompt_tokens_processed": state.processed,
            "n_prompt_tokens_cache": state.cached,
            "params": {
                **({} if submit is None else generation_settings(service, submit.options, submit.grammar)),
                "speculative.types": "dflash" if state.speculative else "none",
            },
            "next_token": [
                {"has_next_token": True, "n_remain": state.remaining, "n_decoded": state.emitted},
            ],
        }
    return result


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)
