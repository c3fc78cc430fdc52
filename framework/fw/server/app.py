"""The routes of the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from fw import __version__
from fw.server import batches, bodies, chat, completions, files, large, others, response_schemas, responses, schemas, stats
from fw.server.api import Api, Begun
from fw.server.errors import ApiError, shown
from fw.server.guard import Guard
from fw.server.logs import Log
from fw.server.metrics import CONTENT_TYPE
from fw.server.traces import Trace, no_traces
from fw.server.watching import Gone

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
_WRONG = {
    400: "The request is wrong.",
    401: "A key is missing, or wrong.",
    403: "The server does not do this, or not for who asks by this Host.",
    404: "There is no such model.",
    408: "It has taken too long.",
    413: "It is too large.",
    429: "The queue is full.",
    500: "The server has failed.",
    503: "The model is being loaded, or the server is being shut down.",
}
_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": schemas.ErrorBody, "description": text} for status, text in _WRONG.items()}
_STATE = {**_ERRORS, 503: {"model": schemas.Condition, "description": "It is not so; the status says how it is."}}
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}, "required": ["data"]}


def _events(model: type, name: str) -> dict[int | str, dict[str, Any]]:
    """Of a route that may be asked to stream."""
    description = f"A {name}, or with ``stream`` events of its pieces."
    return {**_ERRORS, 200: {"model": model, "description": description, "content": {"text/event-stream": {"schema": _EVENT}}}}


def create_app(api: Api, batching: batches.Batches, log: Log, trace: Trace = no_traces) -> ASGIApp:
    """The server as an ASGI application, whose engines somebody else begins and ends."""
    app = FastAPI(title="fw", version=__version__, docs_url=None, redoc_url=None, summary="A language model, by OpenAI's interface.")
    app.router.route_class = bodies.JsonRoute

    async def answer(request: Request, begun: Begun, stream: bool | None) -> Response:
        if stream:
            return api.streamed(begun.events(), begun.tickets)
        return await large.response(begun.whole, await api.answers(request, begun.tickets))

    @app.post("/v1/completions", responses=_events(schemas.CompletionResponse, "completion"), tags=["generation"])
    async def create_completion(request: Request, body: schemas.CompletionRequest) -> Response:
        return await answer(request, await completions.begin(api, body), body.stream)

    @app.post("/v1/chat/completions", responses=_events(schemas.ChatResponse, "chat completion"), tags=["generation"])
    async def create_chat_completion(request: Request, body: schemas.ChatRequest) -> Response:
        return await answer(request, await chat.begin(api, body), body.stream)

    @app.post("/v1/embeddings", responses=_ERRORS, response_model=schemas.EmbeddingResponse, tags=["generation"])
    async def create_embedding(request: Request, body: schemas.EmbeddingRequest) -> Response:
        return await others.embeddings(api, request, body)

    @app.post("/tokenize", responses=_ERRORS, response_model=schemas.TokenizeResponse, tags=["tokens"])
    async def tokenize(body: schemas.TokenizeRequest) -> Response:
        return await others.tokenize(api, body)

    @app.post("/detokenize", responses=_ERRORS, response_model=schemas.DetokenizeResponse, tags=["tokens"])
    async def detokenize(body: schemas.DetokenizeRequest) -> Response:
        return await others.detokenize(api, body)

    @app.post("/v1/load_lora_adapter", responses=_ERRORS, response_model=schemas.Condition, tags=["models"])
    async def load_lora_adapter(body: schemas.LoadAdapterRequest) -> Response:
        return await others.load_adapter(api, body)

    @app.post("/v1/unload_lora_adapter", responses=_ERRORS, response_model=schemas.Condition, tags=["models"])
    async def unload_lora_adapter(body: schemas.DropAdapterRequest) -> Response:
        return await others.drop_adapter(api, body)

    @app.get("/v1/models", responses=_ERRORS, response_model=schemas.ModelList, tags=["models"])
    async def list_models() -> Response:
        return others.models(api)

    @app.get("/v1/models/{model:path}", responses=_ERRORS, response_model=schemas.ModelCard, tags=["models"])
    async def retrieve_model(model: str) -> Response:
        return others.model(api, model)

    @app.get("/health", responses=_STATE, response_model=schemas.Condition, tags=["state"])
    async def health() -> Response:
        """Whether the process lives, and its engines do."""
        failed = api.engines.condition == "failed"
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    @app.get("/ready", responses=_STATE, response_model=schemas.Condition, tags=["state"])
    async def ready() -> Response:
        """Whether requests are taken."""
        condition = api.engines.condition
        return JSONResponse({"status": condition}, 200 if condition == "ready" else 503)

    @app.get("/version", responses=_ERRORS, response_model=schemas.Version, tags=["state"])
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics", responses=_ERRORS, response_class=PlainTextResponse, tags=["state"])
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(api.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/stats", responses=_ERRORS, tags=["state"])
    async def statistics() -> dict[str, Any]:
        """What the page shows."""
        return stats.stats(api)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> Response:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        return HTMLResponse(_page(), headers=headers)

    responses.register(app, api, _events(response_schemas.ResponseBody, "response"))
    files.register(app, api, batching.files, _ERRORS)
    batches.register(app, batching, _ERRORS, _invalid)
    _handle_errors(app)
    _document(app)
    serve = api.settings.serve
    guarded: ASGIApp = Guard(app, serve, api.settings.keys, log, trace)
    if serve.cors_origins:
        from starlette.middleware.cors import CORSMiddleware

        guarded = CORSMiddleware(guarded, allow_origins=serve.cors_origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"])
    return guarded


@cache
def _page() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _handle_errors(app: FastAPI) -> None:
    Handler = Callable[[Request, Any], Awaitable[Response]]

    def handled(kind: type[Exception] | int) -> Callable[[Handler], Handler]:
        return app.exception_handler(kind)

    @handled(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @handled(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        found = _invalid(error)
        return JSONResponse(found.body(), found.status)

    @handled(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        if isinstance(error, bodies.Refused):
            return JSONResponse(error.error.body(), error.error.status, error.error.headers)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.method} {shown(request.url.path)} here"
        elif error.status_code == 405:
            message = f"{shown(request.url.path)} does not take {request.method}"
        return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, error.headers)

    @handled(Gone)
    async def gone(request: Request, error: Gone) -> Response:
        return Response(status_code=499)

    @handled(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(500, "the server has failed; its log says how, by the request's id", "internal_error").body(), 500)


def _invalid(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, in words."""
    errors = error.errors()
    first = errors[0]
    place, branch = _place(first, error.body)
    if branch is not None:  # of several forms that it may have, what is wrong by the one that it comes nearest to
        for each in errors[1:]:
            found, other = _place(each, error.body)
            if other == branch and found[:branch] == place[:branch] and len(found) > len(place):
                first, place = each, found
    param = ".".join(place) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}", "invalid_json")
    if not place and not isinstance(error.body, dict | None):
        return ApiError(400, "the body is no JSON object; send one, with the header Content-Type: application/json", "invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {shown(param or '')}", "unknown_parameter", param)
    if first["type"] == "missing" and param is not None:
        return ApiError(400, f"Missing required parameter: '{param}'", "missing_required_parameter", param)
    return ApiError(400, f"{param or 'the body'}: {first['msg']}", "invalid_value", param)


def _place(error: Mapping[str, Any], body: Any) -> tuple[list[str], int | None]:
    """The field that is meant by where pydantic found something, and at which of its parts the first name of one of several forms stands,
    which are not the client's words; None where there is none."""
    of, *where = error["loc"]
    if of != "body":  # but the address
        return [of, *map(str, where)], None
    place: list[str] = []
    branch = None
    for at, part in enumerate(where):
        if part in (body if isinstance(body, Mapping) else range(len(body)) if isinstance(body, list) else ()):
            body = body[part]
        elif error["type"] != "missing" or at < len(where) - 1:
            branch = at if branch is None else branch
            continue
        place.append(str(part))
    return place, branch


def _document(app: FastAPI) -> None:
    """What is wrong with a body is told by 400 here."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                document.get("components", {}).get("schemas", {}).pop(name, None)
            app.openapi_schema = document
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
