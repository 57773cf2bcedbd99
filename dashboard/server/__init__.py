"""The server of the live view: start, request guard (Host, Origin, session) and sign-in."""
