"""The page that changes the configuration, and its JSON twin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import BaseModel, Field

from lifeboat_cache.config.describe import entries
from lifeboat_cache.dashboard.changes import form_of
from lifeboat_cache.dashboard.editor import LISTS, Editor, FormKey, Proposal, Stored, form_keys
from lifeboat_cache.dashboard.errors import RefusedError
from lifeboat_cache.dashboard.rendering import Pages
from lifeboat_cache.dashboard.source import Source, View

__all__ = ["configure_routes"]

_Values = dict[str, str]


class CheckRequest(BaseModel):
    """What a form holds.

    Attributes
    ----------
    values
        Texts by name of the field, as ``GET /api/configure`` shows them; an empty one takes the
        key out of the file, one that is missing leaves it.
    token
        Of ``GET /api/configure``: what the values were made from. If the file was changed since,
        only values that differ from that count.
    """

    values: _Values = Field(max_length=2000)
    token: str = Field(default="", max_length=64)


class SaveRequest(CheckRequest):
    """What is to be saved; the token is needed."""

    token: str = Field(max_length=64)


def configure_routes(source: Source, editor: Editor, pages: Pages) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    def page(
        request: Request,
        *,
        form: Mapping[str, str] | None = None,
        proposal: Proposal | None = None,
        message: str = "",
        status: int = 200,
        reviewed: bool = False,
    ) -> Response:
        view = source.view()
        found: dict[str, Any] = {"home": view.document["home"], "restart": _restarts(view)}
        try:
            stored = editor.read()
        except RefusedError as error:
            found.update(file="", problem=error.message, sections=[], lists=[])
            return pages.page(request, "configure", found, message=message, proposal=None,
                              token="", reviewed=False, saved=None)  # fmt: skip
        problems = {} if proposal is None else proposal.problems
        found.update(
            file=str(stored.path),
            exists=stored.exists,
            problem=stored.problem,
            **_fields(stored, form or {}, problems),
        )
        return pages.page(
            request,
            "configure",
            found,
            status=status,
            message=message,
            proposal=proposal,
            token=stored.token,
            reviewed=reviewed,
            saved=request.query_params.get("saved"),
        )

    @routes.get("/configure", include_in_schema=False)
    def show(request: Request) -> Response:
        return page(request)

    @routes.post("/configure", include_in_schema=False)
    def change(request: Request) -> Response:
        form = form_of(request)
        stored = editor.read()
        if stored.problem:
            raise RefusedError(403, stored.problem)
        token = form.get("token", "")
        old = token != stored.token
        form = editor.own_changes(stored, form, token)
        proposal = editor.propose(stored, form)
        if form.get("action") != "save" or proposal.problems or old:
            said = "" if proposal.changes or proposal.problems else "Nothing was changed."
            if old:
                said = (
                    "The configuration file was changed in the meantime, so nothing was saved. "
                    "What you changed is kept, beside what the file says now: look at it again."
                )
            status = 409 if old else 422 if proposal.problems else 200
            return page(
                request, form=form, proposal=proposal, message=said, status=status, reviewed=True
            )
        try:
            saved = editor.save(form, token)
        except RefusedError as error:
            # What was typed stays, beside what the file says now.
            proposal = editor.propose(editor.read(), form)
            return page(
                request,
                form=form,
                proposal=proposal,
                message=error.message,
                status=error.status,
                reviewed=error.status == 409,
            )
        kind = "restart" if any(one.restart for one in saved.changes) else "live"
        return RedirectResponse(f"/configure?saved={kind}", status_code=303)

    @routes.get("/api/configure", tags=["changes"])
    def read(request: Request) -> dict[str, Any]:
        """The configuration file's values as written, and what its keys take."""
        stored = editor.read()
        return {
            "file": str(stored.path),
            "exists": stored.exists,
            "problem": stored.problem,
            "token": stored.token,
            "csrf": request.state.csrf,
            **_fields(stored, {}, {}),
        }

    @routes.post("/api/configure/check", tags=["changes"])
    def check(wanted: CheckRequest) -> dict[str, Any]:
        """What values would change, and what the schema says of them."""
        stored = editor.read()
        typed = editor.own_changes(stored, wanted.values, wanted.token)
        return _answer(editor.propose(stored, typed))

    @routes.post("/api/configure/save", tags=["changes"])
    def save(wanted: SaveRequest) -> dict[str, Any]:
        """Change the configuration file."""
        return _answer(editor.save(wanted.values, wanted.token))

    return routes


def _answer(proposal: Proposal) -> dict[str, Any]:
    return {
        "changes": [asdict(change) for change in proposal.changes],
        "problems": dict(proposal.problems),
        "diff": list(proposal.diff),
    }


def _restarts(view: View) -> list[dict[str, Any]]:
    return [
        {"pid": item["pid"], "keys": [str(key) for key in item["config"].get("restart") or ()]}
        for item in view.document["processes"]
        if item["config"].get("restart")
    ]


def _fields(stored: Stored, form: Mapping[str, str], problems: Mapping[str, str]) -> dict[str, Any]:
    """Everything that a form shows."""
    sections, lists = [], []
    titles = {path: section.__doc__ or "" for path, section, _ in entries()}
    for path, keys in form_keys().items():
        plain = tuple(part.removesuffix("[]") for part in path)
        title = titles[path].split("\n\n")[0].replace("`", "")
        about = {"name": ".".join(plain), "title": " ".join(title.split())}
        if plain not in LISTS:
            fields = [_field(stored, key.path, key, form, problems) for key in keys]
            sections.append({**about, "fields": fields})
            continue
        items = []
        for index in range(len(_items(stored, plain))):
            remove = f"{'.'.join(plain)}.{index}.!remove"
            items.append(
                {
                    "remove": remove,
                    "removed": bool(form.get(remove)),
                    "fields": [
                        _field(stored, (*plain, index, key.name), key, form, problems)
                        for key in keys
                    ],
                }
            )
        new = [_field(stored, (*plain, "new", key.name), key, form, problems) for key in keys]
        opened = any(one["value"] or one["problem"] for one in new)
        lists.append({**about, "items": items, "new": new, "new_open": opened})
    return {"sections": sections, "lists": lists, "general_problem": problems.get("", "")}


def _items(stored: Stored, path: tuple[str, ...]) -> list[Any]:
    value: Any = stored.values
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, list) else []


def _field(
    stored: Stored,
    path: tuple[str | int, ...],
    key: FormKey,
    form: Mapping[str, str],
    problems: Mapping[str, str],
) -> dict[str, Any]:
    name = ".".join(str(part) for part in path)
    value = form[name] if name in form else stored.text_of(path, key)
    options = key.options
    if options and value and value not in options:  # another name for one of them
        options = (value, *options)
    return {
        "name": name,
        "label": key.name,
        "value": value,
        "problem": problems.get(name, ""),
        "options": list(options),
        "default": key.default,
        "example": key.example,
        "unit": key.unit,
        "allowed": key.allowed,
        "description": key.description.replace("`", ""),
        "restart": key.restart,
        "required": key.required,
    }
