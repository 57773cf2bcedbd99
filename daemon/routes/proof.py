"""/v1/proof: proves the daemon's identity to a client, before the client sends a token."""

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
    """An HMAC-SHA256 over the nonce and the address at which the connection arrived. Its key is the secret in the file
    `proof.key` of the state directory."""
    host, port = request.scope["server"]
    return {"proof": sign(request.app.state.proof_key, nonce, host, port)}
