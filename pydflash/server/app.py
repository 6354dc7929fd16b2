"""The routes, and what every request passes first: keys, limits, origins, the access log."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pydflash.errors import PydflashError
from pydflash.server import anthropic, completion, native_api, openai_chat, openai_text, responses
from pydflash.server.errors import ApiError, from_exception
from pydflash.server.service import Service
from pydflash.server.streams import CLIENT_GONE, ClientGone, error_response

log = logging.getLogger(__name__)
access = logging.getLogger("pydflash.server.access")

Handler = Callable[[Service, Request], Awaitable[Response]]

_PUBLIC: Final = frozenset({"/health", "/v1/health", "/", "/index.html"})
_ROUTES: Final[tuple[tuple[str, str, Handler], ...]] = (
    ("GET", "/health", native_api.health),
    ("GET", "/v1/health", native_api.health),
    ("GET", "/metrics", native_api.metrics),
    ("GET", "/props", native_api.props),
    ("POST", "/props", native_api.set_props),
    ("GET", "/models", native_api.models),
    ("GET", "/v1/models", native_api.models),
    ("GET", "/slots", native_api.slots),
    ("POST", "/slots/{slot}", native_api.slot_action),
    ("POST", "/tokenize", native_api.tokenize),
    ("POST", "/detokenize", native_api.detokenize),
    ("POST", "/apply-template", native_api.apply_template),
    ("GET", "/lora-adapters", native_api.lora_adapters),
    ("POST", "/completion", completion.completion),
    ("POST", "/completions", completion.completion),
    ("POST", "/infill", completion.infill),
    ("POST", "/v1/completions", openai_text.text_completions),
    ("POST", "/chat/completions", openai_chat.chat_completions),
    ("POST", "/v1/chat/completions", openai_chat.chat_completions),
    ("POST", "/chat/completions/input_tokens", native_api.count_tokens),
    ("POST", "/v1/chat/completions/input_tokens", native_api.count_tokens),
    ("POST", "/responses", responses.responses),
    ("POST", "/v1/responses", responses.responses),
    ("POST", "/v1/responses/input_tokens", responses.count_tokens),
    ("POST", "/v1/messages", anthropic.messages),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    *(
        ("POST", path, native_api.not_supported)
        for path in (
            *("/embedding", "/embeddings", "/v1/embeddings", "/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
            *("/lora-adapters", "/v1/audio/transcriptions"),
        )
    ),
)


def make_app(service: Service) -> ASGIApp:
    """The whole application."""
    routes = [Route(path, _endpoint(service, handler), methods=[method]) for method, path, handler in _ROUTES]
    if service.options.web_page:
        routes += [Route(path, _endpoint(service, _web_page), methods=["GET"]) for path in ("/", "/index.html")]
    return Gate(Starlette(routes=routes, exception_handlers={HTTPException: _http_error}), service)


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        # Anthropic's clients read errors in a form of their own.
        body_of = anthropic.error_body if request.url.path.startswith("/v1/messages") else None
        try:
            return await handler(service, request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        except Exception as failure:
            if not isinstance(failure, PydflashError):
                log.exception("%s failed", request.url.path)
            error = from_exception(failure)
            return error_response(error, None if body_of is None else body_of(error))

    return endpoint


async def _http_error(request: Request, failure: Exception) -> Response:
    code = failure.status_code if isinstance(failure, HTTPException) else 500
    if code == 404:
        return error_response(ApiError(404, "File Not Found"))
    if code == 405:
        return error_response(ApiError(405, f"{request.method} is not possible here"))
    return error_response(ApiError(code, str(failure)))


async def _web_page(_service: Service, _request: Request) -> Response:
    page = files("pydflash.server").joinpath("static", "index.html").read_bytes()
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-cache",
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
    }
    return Response(page, headers=headers)


class Gate:
    """Around the routes: who may ask, how much may be sent, what is logged."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._keys = [hashlib.sha256(key.encode()).digest() for key in service.options.api_keys]
        self._origins = frozenset(service.options.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request; other kinds of connections are left alone."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = CLIENT_GONE
        headers = Headers(scope=scope)
        limit = self._service.options.max_body
        received = 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                out["Server"] = "pydflash"
                self._allow_origin(headers, out)
            await send(message)

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > limit:
                    raise ApiError(413, f"the body has more than {limit} bytes")
            return message

        try:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                await refusal(scope, receive, note)
            else:
                await self._app(scope, limited, note)
        finally:
            ms = (time.perf_counter() - begun) * 1e3
            route = scope.get("route")
            path = route.path if isinstance(route, Route) else "other"
            self._service.metrics.note_response(path, status)
            client = scope.get("client") or ("-", 0)
            # Nothing of a client's own is printed as it came: a path could hold line breaks.
            access.info("%s %s %r %d %.1f ms", client[0], scope["method"], scope["path"], status, ms)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["method"] == "OPTIONS":
            response = Response(status_code=204)
            response.headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
            response.headers["Access-Control-Allow-Headers"] = "authorization, content-type, x-api-key"
            return response
        if self._keys and scope["path"] not in _PUBLIC and not self._knows(headers):
            error = ApiError(401, "a valid API key is needed")
            messages = scope["path"].startswith("/v1/messages")
            return error_response(error, anthropic.error_body(error) if messages else None)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._service.options.max_body:
            return error_response(ApiError(413, f"the body has more than {self._service.options.max_body} bytes"))
        return None

    def _knows(self, headers: Headers) -> bool:
        given = headers.get("x-api-key", "")
        authorization = headers.get("authorization", "")
        if authorization[:7].lower() == "bearer ":
            given = authorization[7:].strip()
        digest = hashlib.sha256(given.encode()).digest()
        known = False
        for key in self._keys:  # all of them, so that the time tells nothing
            known |= hmac.compare_digest(digest, key)
        return known

    def _allow_origin(self, headers: Headers, out: MutableHeaders) -> None:
        origin = headers.get("origin")
        if origin is None or not self._origins:
            return
        if "*" in self._origins or origin in self._origins:
            out["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else origin
            out.add_vary_header("Origin")
