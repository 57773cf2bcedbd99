"""/v1/proof: shows who asks that this is the daemon of a state directory, before a token is sent to it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from tidegate.client.daemon_proof import NONCE_PATTERN, PATH, sign
from tidegate.daemon.security.scopes import PROBE

router = APIRouter(tags=["health"], dependencies=[PROBE])


@router.get(PATH)
async def proof(
    request: Request, nonce: Annotated[str, Query(pattern=NONCE_PATTERN, description="random, hexadecimal")]
) -> dict[str, str]:
    """An HMAC-SHA256 over the nonce and the address at which the connection arrived, with the secret in `proof.key`."""
    host, port = request.scope["server"]
    return {"proof": sign(request.app.state.proof_key, nonce, host, port)}
