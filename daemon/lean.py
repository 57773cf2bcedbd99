"""Routes that hundreds of ranks ask every second: FastAPI describes them as all others, and does not resolve them.

Finding out anew at each request what an endpoint depends on takes longer than all that the daemon does with a report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidegate.daemon.deps import own_agent


class LeanRoute(APIRoute):
    """Its endpoint takes `plane`, `agent` and `message`, and nothing else. The message is the body, or the query where
    it is annotated so. It answers a model, or None for 204."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **more: Any) -> None:
        super().__init__(path, endpoint, **more)
        hints = get_type_hints(endpoint, include_extras=True)
        if {*hints} - {"return"} != {"plane", "agent", "message"}:
            raise TypeError(f"{endpoint.__name__} takes other things than plane, agent and message")
        told = hints["message"]
        self._in_query = get_origin(told) is Annotated
        self._message: type[BaseModel] = get_args(told)[0] if self._in_query else told

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # 405
            return
        plane, state = scope["app"].state.plane, scope["state"]
        agent = own_agent(plane, state["caller"], scope["path_params"]["agent"])
        answer = await self.endpoint(plane=plane, agent=agent, message=await self._read(scope, receive))
        if answer is None:
            response = Response(status_code=204)
        else:
            response = Response(answer.__pydantic_serializer__.to_json(answer), media_type="application/json")
        await response(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> BaseModel:
        """The message; RequestValidationError as FastAPI raises it. The gate gives a body in one piece."""
        try:
            if self._in_query:
                return self._message.model_validate(dict(parse_qsl(scope["query_string"].decode("latin-1"))))
            return self._message.model_validate_json((await receive())["body"])
        except ValidationError as error:
            place = "query" if self._in_query else "body"
            found = error.errors(include_url=False, include_context=False)
            raise RequestValidationError([{**e, "loc": (place, *e["loc"])} for e in found]) from error
