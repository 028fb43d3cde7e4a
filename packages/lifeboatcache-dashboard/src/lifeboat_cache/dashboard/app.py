"""The application: pages, their JSON twins, metrics and health."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from lifeboat_cache.config.paths import ENV_HOME
from lifeboat_cache.dashboard import facts
from lifeboat_cache.dashboard.access import Access
from lifeboat_cache.dashboard.changes import change_routes
from lifeboat_cache.dashboard.configure import configure_routes
from lifeboat_cache.dashboard.editor import Editor
from lifeboat_cache.dashboard.errors import CODES, ErrorBody, RefusedError
from lifeboat_cache.dashboard.gate import Gate, Scope, wants_json
from lifeboat_cache.dashboard.history import SPANS, Span
from lifeboat_cache.dashboard.inventory import Inventory
from lifeboat_cache.dashboard.plots import draw
from lifeboat_cache.dashboard.rendering import Pages
from lifeboat_cache.dashboard.source import Source
from lifeboat_cache.dashboard.version import __version__
from lifeboat_cache.registry.metrics import families

__all__ = ["create_app"]

_log = logging.getLogger("lifeboat_cache")

_HERE = Path(__file__).parent

Range = Annotated[
    Literal["1h", "24h", "14d"], Query(alias="range", description="What history covers.")
]

#: Errors that every answer may be, for the description of the interface.
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 405, 409, 413, 415, 421, 422)
}


def create_app(source: Source, access: Access) -> FastAPI:
    """Return the application.

    Parameters
    ----------
    source
        Where statistics come from; closed with the application.
    access
        Who may talk to it.
    """
    inventory = Inventory()

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        inventory.close()
        source.close()
        source.history.close()

    app = FastAPI(
        title="LifeboatCache dashboard",
        version=__version__,
        description="What the pages show, as JSON. Errors have one shape: `ErrorBody`.",
        # Their pages load assets from the network.
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=_ERRORS,
    )
    pages = Pages(source)
    editor = Editor(source.home, source.config_path, {**os.environ, ENV_HOME: str(source.home)})
    app.include_router(_page_routes(source, inventory, pages))
    app.include_router(_api_routes(source, inventory))
    app.include_router(_plain_routes(source))
    app.include_router(change_routes(source, inventory, pages))
    app.include_router(configure_routes(source, editor, pages))
    app.mount("/static", StaticFiles(directory=_HERE / "static"), name="static")

    def refuse(scope: Scope, error: RefusedError) -> Response:
        if wants_json(scope["path"]):
            return JSONResponse(error.body(), status_code=error.status, headers=_extra(error))
        return pages.error(Request(scope), error)

    @app.exception_handler(RefusedError)
    def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)
        return refuse(request.scope, error)

    @app.exception_handler(HTTPException)
    def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = {
            404: "there is no such page: the pages are linked above",
            405: "that cannot be done with this address: see /openapi.json",
        }
        message = said.get(error.status_code, str(error.detail))
        answer = refuse(request.scope, RefusedError(error.status_code, message))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = tuple(
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            for item in error.errors()
        )
        said = "the request is not as /openapi.json describes it: correct it"
        return refuse(request.scope, RefusedError(422, said, problems))

    @app.exception_handler(Exception)
    def broken(request: Request, _error: Exception) -> Response:
        said = "the dashboard failed; the log of the agent says more: please report it"
        return refuse(request.scope, RefusedError(500, said))

    app.add_middleware(Gate, access=access, refuse=refuse)
    return app


def _extra(error: RefusedError) -> dict[str, str]:
    return {"www-authenticate": "Bearer"} if error.status == 401 else {}


def _span(name: str) -> Span:
    return next(span for span in SPANS if span.name == name)


def _page_routes(source: Source, inventory: Inventory, pages: Pages) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    def overview(request: Request, name: Range = "1h") -> Response:
        view, span = source.view(), _span(name)
        found = facts.overview_facts(view, source.history, span)
        now = time.time()
        plots = draw(
            source.history.read(span, now), span, now, facts.medium_limit(view.document["targets"])
        )
        return pages.page(request, "overview", found, plots=plots, spans=SPANS)

    @routes.get("/targets")
    def targets(request: Request) -> Response:
        return pages.page(request, "targets", facts.targets_facts(source.view()))

    @routes.get("/contents")
    def contents(request: Request) -> Response:
        view = source.view()
        found = facts.contents_facts(view, inventory.contents(view.config))
        editable = view.config is not None and view.config.dashboard.allow_config_edit
        return pages.page(request, "contents", found, editable=editable)

    @routes.get("/recovery")
    def recovery(request: Request) -> Response:
        return pages.page(request, "recovery", facts.recovery_facts(source.view()))

    @routes.get("/processes")
    def processes(request: Request) -> Response:
        return pages.page(request, "processes", facts.processes_facts(source.view()))

    return routes


def _api_routes(source: Source, inventory: Inventory) -> APIRouter:
    routes = APIRouter(prefix="/api", tags=["pages"])

    @routes.get("/overview")
    def overview(name: Range = "1h") -> dict[str, Any]:
        """Whether it works, what it has saved, and what is wrong."""
        return facts.overview_facts(source.view(), source.history, _span(name))

    @routes.get("/history")
    def history(name: Range = "1h") -> dict[str, Any]:
        """Samples over time: sums that only grow, and levels."""
        return facts.history_facts(source.history, _span(name))

    @routes.get("/targets")
    def targets() -> dict[str, Any]:
        """Targets: state, space, queue, throughput and latency."""
        return facts.targets_facts(source.view())

    @routes.get("/contents")
    def contents() -> dict[str, Any]:
        """Namespaces and the prefixes that are shared most."""
        view = source.view()
        return facts.contents_facts(view, inventory.contents(view.config))

    @routes.get("/recovery")
    def recovery() -> dict[str, Any]:
        """How far engines are with reading what is stored."""
        return facts.recovery_facts(source.view())

    @routes.get("/processes")
    def processes() -> dict[str, Any]:
        """Engines, the agent, and their versions."""
        return facts.processes_facts(source.view())

    return routes


class _Families:
    """A collector of what one look has found."""

    def __init__(self, collect: Callable[[], Any]) -> None:
        self.collect = collect


def _plain_routes(source: Source) -> APIRouter:
    routes = APIRouter(tags=["probes"])

    @routes.head("/healthz", include_in_schema=False)
    @routes.get("/healthz", response_class=PlainTextResponse)
    def healthz() -> PlainTextResponse:
        """Whether the dashboard runs; whether the cache is well is in `/api/overview`."""
        return PlainTextResponse("ok\n")

    @routes.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        """The metrics of the agent's exporter, in Prometheus's text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(lambda: families(source.view().found)))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes


if set(CODES) < {int(status) for status in _ERRORS}:  # a new status needs a word
    raise AssertionError("a status has no code")
