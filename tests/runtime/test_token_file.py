"""The cluster token: in which files it may be kept, and which addresses need one."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.errors import JoinRefused, StartupError
from baton.runtime.cluster_token import check_listening, check_token, on_loopback
from baton.runtime.token_file import read_token

TOKEN = "0123456789abcdef"


def token_file(where: Path, text: str, mode: int = 0o600) -> str:
    path = where / "token"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_token_file_that_others_cannot_read_is_read(tmp_path: Path, mode: int) -> None:
    assert read_token(token_file(tmp_path, f"  {TOKEN}\n", mode)) == TOKEN
    (link := tmp_path / "link").symlink_to(tmp_path / "token")  # as secrets are mounted
    assert read_token(str(link)) == TOKEN
    assert read_token("") == ""


@pytest.mark.parametrize(
    ("text", "mode", "what"),
    [
        (TOKEN, 0o644, "mode 644"),
        (TOKEN, 0o602, "mode 602"),
        ("short", 0o600, "at least 16"),
        ("", 0o600, "at least 16"),
        (f"{TOKEN}\n{TOKEN}", 0o600, "one line"),
        ("ö" * 20, 0o600, "ASCII"),
        ("x" * 5000, 0o600, "one line"),
    ],
)
def test_an_invalid_token_file_is_refused_without_showing_its_text(
    tmp_path: Path, text: str, mode: int, what: str
) -> None:
    with pytest.raises(StartupError, match=what) as caught:
        read_token(path := token_file(tmp_path, text, mode))
    assert f"--cluster-token-file {path}: " in caught.value.message
    assert not text or text[:6] not in caught.value.message.replace(path, "")


def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        read_token(str(tmp_path / "none"))
    with pytest.raises(StartupError, match="not a regular file"):
        read_token(str(tmp_path))


def test_tokens_are_compared_completely() -> None:
    check_token(TOKEN, TOKEN, "worker w")
    check_token("", "whatever", "worker w")
    for token in ("", TOKEN[:-1], TOKEN + "x", "\ud800"):
        with pytest.raises(JoinRefused, match="worker w refused: token: ") as caught:
            check_token(TOKEN, token, "worker w")
        assert caught.value.param == "token" and TOKEN not in caught.value.message


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.3.0.9", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1"]
)
def test_loopback_needs_no_token(host: str) -> None:
    assert on_loopback(host)
    check_listening("--host", host, "")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "[fe80::1]", "::ffff:10.0.0.1", "node7", ""])
def test_listening_beyond_loopback_needs_a_token(host: str) -> None:
    check_listening("--host", host, TOKEN)
    with pytest.raises(StartupError, match="--cluster-token-file") as caught:
        check_listening("--control-host", host, "")
    assert f"--control-host {host} is not a loopback address" in caught.value.message
