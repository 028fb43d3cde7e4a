"""Making pages from templates."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from fastapi import Request
from fastapi.responses import HTMLResponse

from lifeboat_cache.dashboard.errors import RefusedError
from lifeboat_cache.dashboard.shown import FILTERS
from lifeboat_cache.dashboard.source import Source

__all__ = ["THEMES", "THEME_COOKIE", "Pages"]

_HERE = Path(__file__).parent

#: Address, title, and what the page answers.
_NAVIGATION = (
    ("/", "overview", "Overview"),
    ("/targets", "targets", "Targets"),
    ("/contents", "contents", "Contents"),
    ("/recovery", "recovery", "Recovery"),
    ("/processes", "processes", "Processes"),
    ("/configure", "configure", "Configure"),
)

THEME_COOKIE = "lifeboat_theme"

#: What a reader may choose; ``auto`` follows the system.
THEMES = ("auto", "light", "dark")


class Pages:
    """Makes pages.

    Parameters
    ----------
    source
        Says which home they are about.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
            auto_reload=False,
        )
        self._templates.filters.update(FILTERS)
        # A new release is not shown with the style of the one before.
        digest = hashlib.blake2b(digest_size=6)
        for file in sorted((_HERE / "static").iterdir()):
            digest.update(file.read_bytes())
        self._assets = digest.hexdigest()

    def page(
        self,
        request: Request,
        name: str,
        found: Mapping[str, Any],
        *,
        status: int = 200,
        **more: Any,
    ) -> HTMLResponse:
        """A page.

        Parameters
        ----------
        request
            Who asks.
        name
            The template, and the entry of the navigation.
        found
            What the page says.
        status
            The HTTP status.
        more
            What else the template needs.
        """
        theme = request.cookies.get(THEME_COOKIE, "")
        text = self._templates.get_template(f"{name}.html").render(
            facts=found,
            page=name,
            navigation=_NAVIGATION,
            path=request.url.path,
            query=request.url.query,
            csrf=request.state.csrf,
            theme=theme if theme in THEMES else "auto",
            assets=self._assets,
            now=time.time(),
            **more,
        )
        return HTMLResponse(text, status_code=status)

    def error(self, request: Request, error: RefusedError) -> HTMLResponse:
        """A page that says what went wrong."""
        return self.page(
            request,
            "error",
            {"home": "", "status": error.status},
            status=error.status,
            message=error.message,
            problems=error.problems,
        )
