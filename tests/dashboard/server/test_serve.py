"""Starting the live view: the command, its environment, and a port that is taken."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from streamlit.web.server.starlette import starlette_server

from tidegate import dashboard
from tidegate.dashboard.server import serve


def test_the_command_is_private_headless_and_where_it_was_asked_to_be() -> None:
    words = dashboard.command(8501, "http://127.0.0.1:8790", "0.0.0.0")
    assert words[:4] == [sys.executable, "-m", "tidegate.dashboard.server.serve", "run"]
    assert Path(words[4]).name == "asgi.py"
    assert Path(words[4]).is_file()
    assert {"--server.port=8501", "--server.address=0.0.0.0", "--server.headless=true"} <= set(words)
    assert "--server.maxUploadSize=1" in words
    assert {"--browser.gatherUsageStats=false", "--client.showErrorDetails=none"} <= set(words)


def test_the_daemon_travels_in_the_environment_and_no_token_in_the_command() -> None:
    assert dashboard.environment("http://there:1")["TIDEGATE_DAEMON"] == "http://there:1"
    assert not any("token" in word for word in dashboard.command(1, "http://there:1"))


def test_a_taken_port_is_one_sentence_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert dashboard.launch(port, "http://127.0.0.1:8790") == 1
    said = capsys.readouterr().err
    assert said.startswith(f"The live view cannot listen on 127.0.0.1:{port}")
    assert "--port" in said


def test_asking_for_the_command_needs_no_streamlit() -> None:
    script = "import sys, tidegate.dashboard; sys.exit('streamlit' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_the_messages_of_a_refresh_wait_for_no_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "listen", socket.socket.listen)  # as it was, afterwards
    serve.send_at_once()
    with (
        starlette_server._bind_socket("127.0.0.1", 0, 16) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        listener.setblocking(True)
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
