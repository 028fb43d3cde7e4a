"""Changes: the theme of the pages, and purging what is stored."""

from __future__ import annotations

import urllib.parse
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import BaseModel, Field

from lifeboat_cache.config import Config
from lifeboat_cache.dashboard.errors import RefusedError
from lifeboat_cache.dashboard.inventory import Inventory
from lifeboat_cache.dashboard.rendering import THEME_COOKIE, THEMES, Pages
from lifeboat_cache.dashboard.source import Source

__all__ = ["change_routes", "editable_config", "form_of"]

_YEAR_S = 365 * 86400


class PurgeRequest(BaseModel):
    """What to purge.

    Attributes
    ----------
    target, digest
        The target's name and the namespace's digest, as ``GET /api/contents`` shows them.
    confirm
        The first 12 digits of the digest, to remove; without it the answer says what would be.
    """

    target: str = Field(max_length=200)
    digest: str = Field(max_length=64)
    confirm: str = Field(default="", max_length=64)


def form_of(request: Request) -> dict[str, str]:
    """The fields of a form; of a repeated one the last counts."""
    form: list[tuple[str, str]] | None = getattr(request.state, "form", None)
    if form is None:
        raise RefusedError(415, "send application/x-www-form-urlencoded, as the page's form does")
    return dict(form)


def editable_config(source: Source) -> Config:
    """The configuration, if it allows changes.

    Raises
    ------
    RefusedError
        If it does not, or cannot be used.
    """
    config = source.view().config
    if config is None:
        raise RefusedError(
            409,
            "the configuration cannot be used: see `lifeboat-cache config validate`",
        )
    if not config.dashboard.allow_config_edit:
        raise RefusedError(
            403, "dashboard.allow_config_edit is false: change that in the configuration file"
        )
    return config


def change_routes(source: Source, inventory: Inventory, pages: Pages) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    @routes.post("/theme", include_in_schema=False)
    def theme(request: Request) -> Response:
        form = form_of(request)
        # Only the path: it must not lead to another machine.
        try:
            back = urllib.parse.urlsplit(form.get("back", "/"))
        except ValueError:  # not what the page's form sends
            back = urllib.parse.urlsplit("/")
        path = "/" + back.path.lstrip("/\\")
        answer = RedirectResponse(path + (f"?{back.query}" if back.query else ""), status_code=303)
        chosen = form.get("theme", "")
        if chosen not in THEMES:
            raise RefusedError(422, f"choose one of: {', '.join(THEMES)}")
        answer.set_cookie(
            THEME_COOKIE, chosen, max_age=_YEAR_S, httponly=True, samesite="lax", path="/"
        )
        return answer

    @routes.post("/contents/purge", include_in_schema=False)
    def purge_form(request: Request) -> Response:
        form = form_of(request)
        config = editable_config(source)
        wanted = PurgeRequest.model_construct(
            target=form.get("target", ""),
            digest=form.get("digest", ""),
            confirm=form.get("confirm", ""),
        )
        done = _purge(inventory, config, wanted)
        found = {
            "home": source.view().document["home"],
            **done,
            "model": form.get("model", "")[:200],
        }
        return pages.page(request, "purge", found)

    @routes.post("/api/contents/purge", tags=["changes"])
    def purge(wanted: PurgeRequest) -> dict[str, Any]:
        """Remove what ended processes have stored for a namespace; a dry run without `confirm`."""
        return _purge(inventory, editable_config(source), wanted)

    return routes


def _purge(inventory: Inventory, config: Config, wanted: PurgeRequest) -> dict[str, Any]:
    name = wanted.digest[:12]
    if wanted.confirm and wanted.confirm != name:
        raise RefusedError(
            409, f"confirm must be {name!r}, the first 12 digits of what is to be removed"
        )
    report = inventory.purge(config, wanted.digest, wanted.target, dry_run=not wanted.confirm)
    return {
        "target": wanted.target,
        "digest": wanted.digest,
        "removed": bool(wanted.confirm),
        **asdict(report),
    }
