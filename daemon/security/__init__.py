"""Security: tokens, scopes, the middleware that every request passes, limits of failures and connections."""
