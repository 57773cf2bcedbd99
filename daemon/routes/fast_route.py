"""Fast routes, for requests that hundreds of ranks send every second: they skip FastAPI's router and dependencies.

`SecurityMiddleware` has already found the route of a request. FastAPI would look for the route again and resolve the
endpoint's dependencies, which takes longer than handling a report. Fast routes are in the OpenAPI document like others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from tidegate.daemon.routes.dependencies import own_agent, request_token
from tidegate.daemon.security.middleware import MATCH
from tidegate.daemon.security.scopes import RouteMatch


class FastRoute(APIRoute):
    """A route whose endpoint takes `plane`, `agent`, `token` and pydantic models only, and returns a pydantic model.

    A model whose type is `Annotated` is read from the query, the other model (at most one) from the body.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **more: Any) -> None:
        super().__init__(path, endpoint, **more)
        hints = get_type_hints(endpoint, include_extras=True)
        models = {name: hint for name, hint in hints.items() if name not in ("plane", "agent", "token", "return")}
        self._takes_token = "token" in hints
        self._query: dict[str, type[BaseModel]] = {
            name: get_args(hint)[0] for name, hint in models.items() if get_origin(hint) is Annotated
        }
        self._body: dict[str, type[BaseModel]] = {n: hint for n, hint in models.items() if n not in self._query}
        others = [name for name, model in (self._query | self._body).items() if not issubclass(model, BaseModel)]
        if others or len(self._body) > 1 or not {"plane", "agent"} <= {*hints}:
            raise TypeError(
                f"{endpoint.__name__} has wrong parameters. A fast route must take `plane` and `agent`, and may take "
                "`token` and pydantic models: models in Annotated for the query, and at most one other for the body"
            )

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # 405
            return
        plane, state = scope["app"].state.plane, scope["state"]
        agent = own_agent(plane, state["caller"], scope["path_params"]["agent"])
        more: dict[str, Any] = await self._read(scope, receive)
        if self._takes_token:
            more["token"] = request_token(scope["app"].state.tokens, Headers(scope=scope).get("authorization", ""))
        answer = await self.endpoint(plane=plane, agent=agent, **more)
        response = Response(answer.__pydantic_serializer__.to_json(answer), media_type="application/json")
        await response(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> dict[str, BaseModel]:
        """The pydantic models from the query and the body, by parameter name of the endpoint.

        Raises RequestValidationError, as FastAPI does, if they are invalid. One call of `receive` gives the whole body,
        because `SecurityMiddleware` has read it before.
        """
        models, place = dict[str, BaseModel](), "query"
        try:
            for name, model in self._query.items():
                models[name] = model.model_validate(dict(parse_qsl(scope["query_string"].decode("latin-1"))))
            place = "body"
            for name, model in self._body.items():
                models[name] = model.model_validate_json((await receive())["body"])
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_context=False)
            raise RequestValidationError([{**e, "loc": (place, *e["loc"])} for e in wrong]) from error
        return models


class FastRouteMiddleware:
    """ASGI middleware that calls the endpoints of fast routes directly. It takes the route from the request's state,
    where `SecurityMiddleware`, which runs before it, has stored it.

    handlers: the application's exception handlers, by class of exception or status.
    """

    def __init__(self, app: ASGIApp, *, handlers: Mapping[Any, ExceptionHandler]) -> None:
        self._app = app
        self._call_route = ExceptionMiddleware(_call_route, {k: h for k, h in handlers.items() if k is not Exception})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            match: RouteMatch = scope["state"][MATCH]
            if isinstance(match.route, FastRoute):
                scope.update(match.child_scope)
                await self._call_route(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _call_route(scope: Scope, receive: Receive, send: Send) -> None:
    await scope["route"].handle(scope, receive, send)
