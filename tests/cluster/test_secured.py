"""A cluster with all security features on: API keys, TLS at the front ends, TLS between its processes."""

from __future__ import annotations

import contextlib
import json
import ssl
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from baton.core.errors import BatonError
from baton.runtime.streams import LinkLost, dial_link
from baton.runtime.tls import read_cluster_tls
from launch.certificates import make_certificates
from tests.runtime.test_streams import HELLO
from tests.support.cluster import Cluster, cluster
from tests.support.forks import run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
KEY, A, B, GIVEN = (f"sk-0123456789abcde{digit}" for digit in "fabc")
SHORT = "tiny-key"


def check_tenants_share_no_prefixes(url: str, http: httpx.Client) -> None:
    """Neither the other tenant's prompt nor a salt named after that tenant hits; each tenant hits its own prefix."""
    prompt = "".join(f"def f{number}(x):\n    return {number}\n" for number in range(20))

    def cached(key: str, **extra: str) -> int:
        client = openai.OpenAI(api_key=key, base_url=url + "/v1", max_retries=0, http_client=http)
        answer = client.completions.create(model="builtin", prompt=prompt, max_tokens=1, extra_body=extra)
        details = answer.usage and answer.usage.prompt_tokens_details
        assert details is not None and details.cached_tokens is not None
        return details.cached_tokens

    assert cached(A) == 0 and cached(A) > 100
    assert cached(B) == 0 and cached(B, cache_salt="a") == 0
    assert cached(B) > 100


def check_batches_run_for_their_tenant(url: str, http: httpx.Client) -> None:
    """The batches process has the cluster token, and the coordinator's certificate, but no API key."""
    clients = {key: openai.OpenAI(api_key=key, base_url=url + "/v1", max_retries=9, http_client=http) for key in (A, B)}
    line = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f(", "max_tokens": 3}}
    file = clients[A].files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = clients[A].batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    deadline = time.monotonic() + 60
    while batch.status != "completed" and time.monotonic() < deadline:
        time.sleep(0.05)
        batch = clients[A].batches.retrieve(batch.id)
    assert batch.output_file_id, batch
    assert json.loads(clients[A].files.content(batch.output_file_id).text)["response"]["status_code"] == 200
    for call in (clients[B].files.retrieve, clients[B].files.content):
        with pytest.raises(openai.NotFoundError):
            call(batch.output_file_id)


def check_given_keys_are_nowhere(running: Cluster) -> None:
    """The keys of --api-key are in the command line and environment of the process that was given them alone."""
    children = [pid for pid in running.processes() if pid != running.process.pid]
    assert len(children) > 4
    for pid in children:
        for name in ("cmdline", "environ"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
                text = Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
                assert GIVEN not in text and SHORT not in text, (pid, name)
    for path in running.run_dir.iterdir():
        text = path.read_text(errors="replace")
        assert GIVEN not in text and SHORT not in text, path
    assert (running.run_dir / "api.keys").stat().st_mode & 0o077 == 0


async def test_clients_operators_and_workers_authenticate_at_their_own_endpoints(tmp_path: Path) -> None:
    certificates, keys = tmp_path / "tls", tmp_path / "keys"
    make_certificates(certificates, ("127.0.0.1",), 1)
    keys.write_text(f"{KEY} name=tests requests_per_minute=2\n{A} tenant=a\n{B} tenant=b\n")
    keys.chmod(0o600)
    with cluster(
        "builtin",
        draft="none",
        env={"BATON_API_KEY": f"{GIVEN} {SHORT}"},
        api_key_file=keys,
        allowed_origins="*",  # for clients, which have keys; not for the operators' port
        admin_port=0,
        tls_cert_file=certificates / "server.pem",
        tls_key_file=certificates / "server-key.pem",
        cluster_tls_dir=certificates,
        data_dir=tmp_path / "data",
    ) as running:
        assert running.url.startswith("https://") and running.admin.startswith("http://")
        trusts = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        with httpx.Client(verify=trusts) as http:
            client = openai.OpenAI(api_key=KEY, base_url=running.url + "/v1", max_retries=0, http_client=http)
            answer = client.completions.create(model="builtin", prompt="def f(", max_tokens=8)
            assert answer.usage is not None and answer.usage.completion_tokens == 8
            client.completions.create(model="builtin", prompt="def f(", max_tokens=2)
            with pytest.raises(openai.RateLimitError, match="2 requests per minute"):
                client.completions.create(model="builtin", prompt="def f(", max_tokens=2)
            check_tenants_share_no_prefixes(running.url, http)
            assert http.get(running.url + "/workers").status_code == 401
            models = running.url + "/v1/models"
            for key, status in ((GIVEN, 200), (SHORT, 200), (GIVEN[:-1], 401)):
                assert http.get(models, headers={"authorization": f"Bearer {key}"}).status_code == status
            check_batches_run_for_their_tenant(running.url, http)
            check_given_keys_are_nowhere(running)
            bearer = {"authorization": f"Bearer {KEY}"}
            assert http.get(running.url + "/workers", headers=bearer).status_code == 404
        rows = httpx.get(running.admin + "/requests").json()["requests"]
        assert [row["generated_tokens"] for row in rows[-2:]] == [2, 8]
        assert httpx.get(running.admin + "/v1/models").status_code == 404
        rebound = httpx.get(running.admin + "/requests", headers={"host": "evil.example"})
        assert rebound.status_code == 403
        foreign = httpx.get(running.admin + "/requests", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in foreign.headers
        assert running.workers()["decode-0"]["kv_bytes_received"] > 0

        address = running.workers()["decode-0"]["address"]
        with pytest.raises(LinkLost, match="--cluster-tls-dir"):
            await dial_link(address, HELLO, 5.0)
        operator = read_cluster_tls(str(certificates), "operator")
        with pytest.raises(BatonError, match="role: its certificate is of role 'operator'"):
            await dial_link(address, HELLO, 5.0, operator)

        command = [sys.executable, "-m", "launch.cli", "drain", "decode-0", running.admin, "--timeout-s", "1"]
        token = ["--cluster-token-file", str(running.run_dir / "cluster.token")]
        plain = run([*command, *token], timeout=60)
        assert plain.returncode != 0 and "--cluster-tls-dir" in plain.stderr, plain.stderr
        named = [*command, *token, "--cluster-tls-dir", str(certificates)]
        assert run(named, timeout=60).returncode == 0
