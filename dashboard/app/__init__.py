"""The application that Streamlit runs: its script and the ASGI application around it."""
