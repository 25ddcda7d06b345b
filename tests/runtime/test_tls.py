"""TLS in a cluster: which certificate each process presents, what each role may do, which peers are rejected."""

from __future__ import annotations

import asyncio
import datetime
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from baton.core.errors import BatonError, NotFound, StartupError, Unavailable
from baton.core.handover import LinkHello, Ping
from baton.runtime.admin import drain_worker
from baton.runtime.config import WorkerConfig
from baton.runtime.streams import LinkLost, MessageStream, dial, dial_link, serve_links
from baton.runtime.tls import ROLES, ClusterTls, read_cluster_tls
from baton.runtime.worker_main import with_certificates
from baton.v1 import worker_pb2, worker_pb2_grpc
from coordinator.cluster import Cluster
from coordinator.control import serve_control
from launch.certificates import make_certificates
from tests.runtime.test_streams import HELLO, WELCOME
from tests.support.builders import make_join

HOSTS = ("localhost", "127.0.0.1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory, HOSTS, 1)
    return directory


def of(directory: Path, role: str) -> ClusterTls:
    tls = read_cluster_tls(str(directory), role)
    assert tls is not None
    return tls


@asynccontextmanager
async def links(tls: ClusterTls | None) -> AsyncIterator[tuple[str, list[LinkHello]]]:
    """The address of a decode worker's link service, and the hellos that reached it."""
    seen: list[LinkHello] = []

    async def handler(stream: MessageStream, hello: LinkHello) -> None:
        seen.append(hello)
        await stream.send(WELCOME)
        while (message := await stream.receive()) is not None:
            await stream.send(message)

    server, port = await serve_links("127.0.0.1", handler, tls=tls)
    try:
        yield f"127.0.0.1:{port}", seen
    finally:
        await server.stop(0)


async def test_a_prefill_worker_can_link_to_a_decode_worker(made: Path) -> None:
    async with links(of(made, "decode")) as (address, _):
        link = await dial_link(address, HELLO, 5.0, of(made, "prefill"))
        await link.stream.send(Ping(7))
        assert await link.stream.receive() == Ping(7)
        await link.close()


@pytest.mark.parametrize("role", [role for role in ROLES if role != "prefill"])
async def test_a_link_from_another_role_is_refused_by_name(made: Path, role: str) -> None:
    async with links(of(made, "decode")) as (address, seen):
        with pytest.raises(BatonError, match=f"role: its certificate is of role '{role}', not prefill"):
            await dial_link(address, HELLO, 5.0, of(made, role))
        assert not seen


async def test_a_peer_outside_the_cluster_fails_the_handshake(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_certificates(other, HOSTS, 1)
    mine, theirs = of(made, "prefill"), of(other, "prefill")
    strangers = {
        "plain": None,
        "another authority": theirs,
        "another authority that trusts ours": replace(theirs, authority=mine.authority),
        "no certificate": replace(mine, certificate=b"", key=b""),
    }
    async with links(of(made, "decode")) as (address, seen):
        for what, tls in strangers.items():
            with pytest.raises(LinkLost, match="--cluster-tls-dir the same at both ends"):
                await dial_link(address, HELLO, 5.0, tls)
            assert not seen, what


@pytest.mark.parametrize("days", [-2, 2], ids=["expired", "not yet valid"])
async def test_an_expired_or_not_yet_valid_certificate_is_refused(made: Path, tmp_path: Path, days: int) -> None:
    for name in ("ca.pem", "ca-key.pem"):
        shutil.copy(made / name, tmp_path / name)

    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    make_certificates(tmp_path, HOSTS, 1, now)
    with pytest.raises(StartupError, match=r"prefill\.pem: the certificate (expired on|is not valid before) 20"):
        of(tmp_path, "prefill")
    certificate, key = (tmp_path / "prefill.pem").read_bytes(), (tmp_path / "prefill-key.pem").read_bytes()
    async with links(of(made, "decode")) as (address, seen):
        with pytest.raises(LinkLost):
            await dial_link(address, HELLO, 5.0, replace(of(made, "prefill"), certificate=certificate, key=key))
        assert not seen


@pytest.mark.parametrize(
    ("copied", "complaint"),
    [
        (["decode.pem"], "the certificate does not match its private key"),
        (["decode.pem", "decode-key.pem"], r"not signed by this directory's authority \(ca.pem\)"),
        (["ca.pem"], r"not signed by this directory's authority \(ca.pem\)"),
        ([], r"the certificate is for prefill.baton, not decode.baton"),
    ],
)
def test_a_certificate_that_peers_would_refuse_is_refused_at_startup(
    made: Path, tmp_path: Path, copied: list[str], complaint: str
) -> None:
    """Otherwise a worker would only ever report "Socket closed"."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    shutil.copytree(made, mine)
    make_certificates(other, HOSTS, 1)
    for name in copied:
        shutil.copy(other / name, mine / name)
    if not copied:
        shutil.copy(mine / "prefill.pem", mine / "decode.pem")
        shutil.copy(mine / "prefill-key.pem", mine / "decode-key.pem")
    with pytest.raises(StartupError, match=f"--cluster-tls-dir .*decode.pem: .*{complaint}"):
        read_cluster_tls(str(mine), "decode")


def reissued(directory: Path, signer: str, *usages: x509.ObjectIdentifier) -> bytes:
    """Returns decode.pem reissued for other usages, signed by `signer`."""
    old = x509.load_pem_x509_certificate((directory / "decode.pem").read_bytes())
    authority = x509.load_pem_x509_certificate((directory / f"{signer}.pem").read_bytes())
    key = serialization.load_pem_private_key((directory / f"{signer}-key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder(authority.subject, old.subject, old.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(old.not_valid_before_utc).not_valid_after(old.not_valid_after_utc)
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    builder = builder.add_extension(names, False).add_extension(x509.ExtendedKeyUsage(usages), False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_a_certificate_for_another_use_or_signed_by_a_leaf_is_refused(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "d")
    server, client = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
    own = tmp_path / "d" / "decode.pem"
    own.write_bytes(reissued(made, "ca", server, client))
    assert of(tmp_path / "d", "decode").certificate == own.read_bytes()
    for usage, lacks in ((server, "clientAuth"), (client, "serverAuth")):
        own.write_bytes(reissued(made, "ca", usage))
        with pytest.raises(StartupError, match=f"decode.pem: its extended key usage lacks {lacks}"):
            read_cluster_tls(str(tmp_path / "d"), "decode")
    own.write_bytes(reissued(made, "prefill", server, client) + (made / "prefill.pem").read_bytes())
    with pytest.raises(StartupError, match="not signed by this directory's authority"):
        read_cluster_tls(str(tmp_path / "d"), "decode")


def test_a_leaf_certificate_or_an_encrypted_key_is_refused_as_authority(made: Path, tmp_path: Path) -> None:
    leaf, locked = tmp_path / "leaf", tmp_path / "locked"
    for directory in (leaf, locked):
        directory.mkdir()
    shutil.copy(made / "decode.pem", leaf / "ca.pem")
    shutil.copy(made / "decode-key.pem", leaf / "ca-key.pem")
    with pytest.raises(StartupError, match=r"ca.pem: not a CA certificate"):
        make_certificates(leaf, HOSTS, 1)
    shutil.copy(made / "ca.pem", locked / "ca.pem")
    key = serialization.load_pem_private_key((made / "ca-key.pem").read_bytes(), None)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (locked / "ca-key.pem").write_bytes(key.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"x")))
    (locked / "ca-key.pem").chmod(0o600)
    with pytest.raises(StartupError, match=r"ca.pem: its private key is unreadable or has a password"):
        make_certificates(locked, HOSTS, 1)


def test_an_expired_authority_is_refused_and_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    make_certificates(tmp_path / "old", HOSTS, 1, now - datetime.timedelta(4000))
    (tmp_path / "old" / "decode.pem").unlink()
    with pytest.raises(StartupError, match=r"baton certs: .*ca.pem: the certificate expired"):
        make_certificates(tmp_path / "old", HOSTS, 30)
    make_certificates(tmp_path / "long", HOSTS, 9999)
    ends = [
        x509.load_pem_x509_certificate((tmp_path / "long" / name).read_bytes()) for name in ("ca.pem", "decode.pem")
    ]
    assert ends[0].not_valid_after_utc == ends[1].not_valid_after_utc


def test_a_certificate_chain_and_a_bundle_of_authorities_are_accepted(made: Path, tmp_path: Path) -> None:
    """As a company's authority issues it: the role's certificate, then the one that signed it."""
    shutil.copytree(made, tmp_path / "d")
    chain = (made / "decode.pem").read_bytes() + (made / "ca.pem").read_bytes()
    (tmp_path / "d" / "decode.pem").write_bytes(chain)
    make_certificates(tmp_path / "other", HOSTS, 1)
    bundle = (tmp_path / "other" / "ca.pem").read_bytes() + (made / "ca.pem").read_bytes()
    (tmp_path / "d" / "ca.pem").write_bytes(bundle)
    assert of(tmp_path / "d", "decode").certificate == chain


def test_fifos_and_oversized_files_are_refused(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "d")
    for name in ("ca.pem", "decode-key.pem"):
        (tmp_path / "d" / name).unlink()
        os.mkfifo(tmp_path / "d" / name, 0o600)
        with pytest.raises(StartupError, match=f"{name}: not a regular file"):
            read_cluster_tls(str(tmp_path / "d"), "decode")
        (tmp_path / "d" / name).unlink()
        (tmp_path / "d" / name).write_bytes((made / name).read_bytes() + b"\n" * (1 << 17))
        (tmp_path / "d" / name).chmod(0o600)
        with pytest.raises(StartupError, match=f"{name}: not a PEM file"):
            read_cluster_tls(str(tmp_path / "d"), "decode")
        shutil.copy(made / name, tmp_path / "d" / name)


async def test_the_dialling_side_checks_the_role_of_its_peer(made: Path) -> None:
    """A process at a decode worker's address that has no decode certificate is refused."""
    async with links(of(made, "prefill")) as (address, seen):
        with pytest.raises(LinkLost, match="--cluster-tls-dir the same at both ends"):
            await dial_link(address, HELLO, 5.0, of(made, "prefill"))
        assert not seen
    async with links(None) as (address, seen):
        with pytest.raises(LinkLost, match="--cluster-tls-dir the same at both ends"):
            await dial_link(address, HELLO, 5.0, of(made, "prefill"))
        assert not seen


async def test_joins_and_drains_require_the_matching_certificate_role(made: Path) -> None:
    cluster = Cluster(3.0, 10, 1000)
    server, port = await serve_control(cluster, "127.0.0.1", 0, of(made, "coordinator"))

    async def join(name: str, role: str) -> object:
        tls, join_message = of(made, role), make_join(name, 1)
        method = worker_pb2_grpc.WorkerControlStub
        request = worker_pb2.SessionRequest
        peer = "coordinator"
        channel, stream, answer = await dial(
            f"127.0.0.1:{port}", lambda c: method(c).Session, request, join_message, 5.0, tls, peer
        )
        stream.end("enough")
        await channel.close()
        return answer

    try:
        assert await join("d0", "decode")
        for role in ("prefill", "operator", "coordinator"):
            with pytest.raises(BatonError, match="role: its certificate"):
                await join("d1", role)
        assert cluster.joins_refused == {"role": 3}
        address = f"127.0.0.1:{port}"

        for role in ("prefill", "decode"):
            with pytest.raises(BatonError, match="drain refused: role: its certificate"):
                await asyncio.to_thread(drain_worker, address, "d0", 1.0, "", tls=of(made, role))
            with pytest.raises(BatonError, match="flip refused: role: its certificate"):
                flip = partial(drain_worker, address, "d0", 1.0, "", tls=of(made, role), next_role="prefill")
                await asyncio.to_thread(flip)
        with pytest.raises(NotFound):
            await asyncio.to_thread(drain_worker, address, "nobody", 1.0, "", tls=of(made, "operator"))
        with pytest.raises(Unavailable, match="cluster-tls-dir"):
            await asyncio.to_thread(drain_worker, address, "d0", 1.0, "")
    finally:
        await server.stop(0)


def test_a_worker_is_for_both_roles_only_with_both_certificates(made: Path, tmp_path: Path) -> None:
    for name in ("ca.pem", "decode.pem", "decode-key.pem"):
        shutil.copy(made / name, tmp_path / name)
    for directory, given, then in (
        (made, "auto", "auto"),
        (made, "on", "on"),
        (tmp_path, "auto", "off"),
        (tmp_path, "off", "off"),
        ("", "auto", "auto"),
    ):
        config = WorkerConfig(cluster_tls_dir=str(directory), both_roles=given)
        assert with_certificates(config).both_roles == then
    with pytest.raises(StartupError, match=r"prefill\.pem"):
        with_certificates(WorkerConfig(cluster_tls_dir=str(tmp_path), both_roles="on"))


def test_a_missing_invalid_or_world_readable_file_is_refused_by_name(made: Path, tmp_path: Path) -> None:
    assert read_cluster_tls("", "prefill") is None
    for name in ("ca.pem", "prefill.pem", "prefill-key.pem"):
        shutil.copytree(made, tmp_path / name)
        (tmp_path / name / name).unlink()
        with pytest.raises(StartupError, match=f"--cluster-tls-dir .*{name}: No such file"):
            read_cluster_tls(str(tmp_path / name), "prefill")
        (tmp_path / name / name).write_text("nothing")
        with pytest.raises(StartupError, match=f"{name}: "):
            read_cluster_tls(str(tmp_path / name), "prefill")
    (made / "decode-key.pem").chmod(0o644)
    with pytest.raises(StartupError, match="chmod 600"):
        read_cluster_tls(str(made), "decode")
    (made / "decode-key.pem").chmod(0o600)


def test_existing_certificates_are_kept(tmp_path: Path) -> None:
    assert len(make_certificates(tmp_path, HOSTS, 1)) == 12
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("*-key.pem"))
    (tmp_path / "decode.pem").unlink()
    assert {path.name for path in make_certificates(tmp_path, HOSTS, 1)} == {"decode.pem", "decode-key.pem"}
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"decode.pem", "decode-key.pem"}
    (tmp_path / "ca-key.pem").unlink()
    with pytest.raises(StartupError, match=r"only one of ca\.pem and ca-key\.pem exists"):
        make_certificates(tmp_path, HOSTS, 1)


@pytest.mark.parametrize("host", ["", " ", "a b", "http://h", "h:8100", "-x", "a..b", "x" * 254, "h\n", "*"])
def test_hosts_are_names_or_addresses(tmp_path: Path, host: str) -> None:
    with pytest.raises(StartupError, match=r"--host .* is neither a name nor an address"):
        make_certificates(tmp_path, ("localhost", host), 1)
    assert not list(tmp_path.iterdir())


def test_existing_files_that_do_not_match_are_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path / "a", ("*.example.org", "fd00::1"), 1)
    assert make_certificates(tmp_path / "a", (), 1) == []
    assert make_certificates(tmp_path / "a", ("fd00:0::1", "*.example.org"), 1) == []
    with pytest.raises(StartupError, match=r"server.pem is for \*.example.org, fd00::1; remove it"):
        make_certificates(tmp_path / "a", ("localhost",), 1)
    (tmp_path / "a" / "decode.pem").write_bytes(b"")
    with pytest.raises(StartupError, match=r"decode.pem: not a PEM file"):
        make_certificates(tmp_path / "a", (), 1)
    make_certificates(tmp_path / "b", HOSTS, 1)
    shutil.copy(tmp_path / "b" / "ca-key.pem", tmp_path / "a" / "ca-key.pem")
    with pytest.raises(StartupError, match=r"ca.pem: the certificate does not match its private key"):
        make_certificates(tmp_path / "a", (), 1)
    (tmp_path / "b" / "server.pem").write_bytes((tmp_path / "b" / "decode.pem").read_bytes())
    with pytest.raises(StartupError, match=r"server.pem: the certificate does not match its private key"):
        make_certificates(tmp_path / "b", (), 1)
