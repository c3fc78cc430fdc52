"""``/v1/files``: what batches read and write, on the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, Query
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from fw.server.api import Api
from fw.server.errors import ApiError, not_found, wrong
from fw.server.file_schemas import Batch, FileDeleted, FileList, FileObject
from fw.server.storage import FILE, Storage, is_id, made_at, new_id, no_room, undivided
from fw.server.uploads import SCHEMA, Form
from fw.server.watching import Gone, while_there

_PIECE = 1 << 20
_T = TypeVar("_T", FileObject, Batch)


class Files:
    """All that there are.

    Args:
        space: bytes that they may take; those that batches write are not refused, and count.

    Attributes:
        needed: whether a file may not be deleted yet.
    """

    def __init__(self, storage: Storage, space: int) -> None:
        self._storage, self._space = storage, space
        self._coming = 0
        self.known = storage.records(FileObject, FILE)
        self.needed: Callable[[str], bool] = lambda id: False

    def get(self, id: str, param: str | None = None) -> FileObject:
        """One.

        Raises:
            ApiError: there is none.
        """
        if not is_id(id, FILE) or id not in self.known:
            raise not_found(f"No such File object: {id}", param, "file_not_found")
        return self.known[id]

    def path(self, id: str) -> Path:
        """Of its content."""
        return self._storage.path(id)

    async def receive(self, request: Request) -> FileObject:
        """Keep what a form brings.

        Raises:
            ApiError: it is no such form, or there is no room.
            Gone: it does not come as a whole.
        """
        form, id = Form(request.headers.get("content-type", "")), new_id(FILE)
        come, kept = 0, sum(told.bytes for told in self.known.values())
        try:
            with self._storage.create(id) as out:
                async for piece in request.stream():
                    form.read(piece)
                    come, self._coming = come + len(piece), self._coming + len(piece)
                    if self._coming + kept > self._space:
                        raise ApiError(507, "the server's space for files is taken (serve.files_space); delete some", "storage_full")
                    if len(form.content) >= _PIECE:
                        await undivided(asyncio.to_thread(out.write, form.taken()))
                await undivided(asyncio.to_thread(out.write, form.taken()))
            name = form.finished()
            await undivided(asyncio.to_thread(self._storage.finish, id))
            return await self.keep(id, name, "batch")
        except ClientDisconnect:
            raise Gone from None
        except OSError as error:
            self._storage.remove(id)
            raise no_room(error) from None
        finally:
            self._coming -= come
            self._storage.discard(id)

    async def keep(self, id: str, name: str, purpose: Literal["batch", "batch_output"]) -> FileObject:
        """A content that is there is a file from now on."""
        size = self.path(id).stat().st_size
        told = FileObject(id=id, bytes=size, created_at=made_at(id), filename=name, purpose=purpose)
        await self._storage.write(id, told)
        self.known[id] = told
        return told

    async def remove(self, id: str) -> None:
        """One.

        Raises:
            ApiError: there is none, or a batch needs it, or it cannot be deleted.
        """
        told = self.get(id)
        if self.needed(id):
            raise wrong(f"{id} is the input of a batch that has not ended; cancel it first", code="file_in_use")
        del self.known[id]
        try:
            await undivided(asyncio.to_thread(self._storage.remove, id))
        except OSError as error:
            self.known[id] = told
            raise ApiError(507, f"the server cannot delete this: {error.strerror or error}", "storage_failed") from None


class _Content(Response):
    """A file, as long as the client is there."""

    media_type = "application/octet-stream"

    def __init__(self, path: Path, told: FileObject, seconds: float) -> None:
        disposition = f"attachment; filename*=UTF-8''{quote(told.filename, safe='')}"
        super().__init__(
            headers={
                "Content-Length": str(told.bytes),
                "Content-Disposition": disposition,
                "X-Content-Type-Options": "nosniff",
                "Cache-Control": "no-store",
            }
        )
        self._path, self._seconds, self._begun = path, seconds, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        try:
            await while_there(receive, self._send(send), self._seconds)
        except (ApiError, Gone):  # once it has begun, it can only be broken off
            if not self._begun:
                raise

    async def _send(self, send: Send) -> None:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            raise not_found("the file has been deleted this moment", code="file_not_found") from None
        with file:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while piece := await undivided(asyncio.to_thread(file.read, _PIECE)):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def page(known: Mapping[str, _T], after: str | None, limit: int, ascending: bool = False) -> Response:
    """Of a list, the newest first unless told otherwise."""
    ids = sorted(known, reverse=not ascending)
    if after is not None:
        ids = [id for id in ids if (id > after if ascending else id < after)]
    data = [known[id].model_dump() for id in ids[:limit]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return JSONResponse({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(ids) > limit})


def check_taken(api: Api) -> None:
    """Whatever is begun now may yet be done; it need not be loaded for that.

    Raises:
        ApiError: the server ends.
    """
    if api.engines.condition in ("draining", "failed"):
        api.engines.check_open()


def _check_origin(api: Api, request: Request) -> None:
    """Pages of other origins may send a form without asking first; where no key is needed, they are told by their origin."""
    origin, allowed = request.headers.get("origin"), api.settings.serve.cors_origins
    if origin is None or api.settings.keys or "*" in allowed or origin in allowed:
        return
    if origin.partition("://")[2] != request.headers.get("host"):
        raise ApiError(403, f"pages of {origin} may not send files here; serve.cors_origins says whose may", "not_allowed")


def answers(errors: dict[int | str, dict[str, Any]], more: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """What one of these routes may answer, in the document: what all may, but for models and queues, and more."""
    common = {status: each for status, each in errors.items() if status not in (404, 429)}
    return common | {status: {**errors[404], "description": text} for status, text in more.items()}


def register(app: FastAPI, api: Api, files: Files, errors: dict[int | str, dict[str, Any]]) -> None:
    """The routes.

    Args:
        errors: what each may answer, in the document.
    """
    of_all, of_one = answers(errors, {}), answers(errors, {404: "There is no such file."})
    uploading = answers(errors, {403: "The page that sends it is of another origin.", 507: "There is no room for it."})
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

    @app.post(
        "/v1/files",
        responses=uploading,
        response_model=FileObject,
        tags=["batches"],
        openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": SCHEMA}}}},
    )
    async def upload_file(request: Request) -> Response:
        check_taken(api)
        _check_origin(api, request)
        return JSONResponse((await files.receive(request)).model_dump())

    @app.get("/v1/files", responses=of_all, response_model=FileList, tags=["batches"])
    async def list_files(
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        after: Annotated[str | None, Query(pattern=rf"^{FILE}[0-9a-f]{{24}}$")] = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        known = {id: file for id, file in files.known.items() if purpose in (None, file.purpose)}
        return page(known, after, limit, order == "asc")

    @app.get("/v1/files/{file_id}", responses=of_one, response_model=FileObject, tags=["batches"])
    async def retrieve_file(file_id: str) -> Response:
        return JSONResponse(files.get(file_id).model_dump())

    @app.get("/v1/files/{file_id}/content", responses={**of_one, 200: {"content": content}}, response_class=Response, tags=["batches"])
    async def retrieve_content(file_id: str) -> Response:
        return _Content(files.path(files.get(file_id).id), files.get(file_id), api.settings.serve.timeout)

    @app.delete("/v1/files/{file_id}", responses=of_one, response_model=FileDeleted, tags=["batches"])
    async def delete_file(file_id: str) -> Response:
        await files.remove(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})
