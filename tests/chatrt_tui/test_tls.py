"""A server elsewhere, over TLS: it is verified, by whom one says."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from typing import TYPE_CHECKING

import pytest

from chatrt.cli.chat import trusting
from chatrt.errors import InvalidValue
from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from chatrt_tui.app import ChatApp
from tests.chatrt_tui.driving import answer, idle, say, screen_text, state, until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of this machine that only itself vouches for; its key lies beside it."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    request += ["-subj", "/CN=chatrt test", "-addext", "subjectAltName=IP:127.0.0.1"]
    request += ["-keyout", str(path.with_suffix(".key")), "-out", str(path)]
    subprocess.run(request, check=True, capture_output=True)
    return path


@pytest.fixture
def served(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return context


async def test_a_server_is_reached_over_tls_with_the_certificates_of_a_file(
    certificate: Path, served: ssl.SSLContext
) -> None:
    async with ScriptedServer([ScriptedAnswer(["safe"])], api_key="k", ssl=served) as server:
        assert server.url.startswith("wss://")
        app = ChatApp(server.url, "k", ssl=trusting(certificate), typing_ahead=False)
        async with app.run_test(size=(90, 30), notifications=True) as pilot:
            await until(lambda: "scripted" in state(app))  # told over HTTPS
            await say(pilot, "hi")
            await until(lambda: answer(app) == "safe" and idle(app))


async def test_a_server_that_nobody_vouches_for_is_not_talked_to(served: ssl.SSLContext) -> None:
    async with ScriptedServer([ScriptedAnswer(["x"])], api_key="k", ssl=served) as server:
        app = ChatApp(server.url, "k", typing_ahead=False)
        async with app.run_test(size=(90, 30), notifications=True):
            await until(lambda: "certificate" in screen_text(app))
            assert "Traceback" not in screen_text(app)
        assert server.num_connections == 0


def test_a_file_without_certificates_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"missing\.pem cannot be used: No such file"):
        trusting(tmp_path / "missing.pem")
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(InvalidValue, match=r"empty\.pem cannot be used: it holds no PEM"):
        trusting(tmp_path / "empty.pem")
