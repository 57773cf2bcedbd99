"""The server of the live view: start, request guard and sign-in."""
