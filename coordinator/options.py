"""What the coordinator's options may be, beyond type and range: checked by the process, and by `baton up` before it.

None of these checks depends on the host: files, ports and packages are the process's own matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from baton.core.errors import InvalidRequest, StartupError
from baton.runtime.config import CoordinatorConfig
from coordinator.api_keys import digest_of
from coordinator.policy.traffic import Traffic, parse_shares

CERT_FLAG, KEY_FLAG = "--tls-cert-file", "--tls-key-file"
ENDPOINT_FLAG = "--otlp-endpoint"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # browsers omit them


def check_options(config: CoordinatorConfig) -> None:
    """Raises StartupError for a value that no coordinator accepts, or for an option without one that it needs."""
    for key in config.api_key.split():
        digest_of(key)
    check_pair(config.tls_cert_file, config.tls_key_file)
    parse_origins(config.allowed_origins)
    parse_adapters(config.lora)
    traffic_of(config.traffic)
    if config.otlp_endpoint:
        check_endpoint(config.otlp_endpoint)
    if config.store and not config.data_dir:
        raise StartupError("--store needs --data-dir")


def check_pair(cert_file: str, key_file: str) -> None:
    """Raises StartupError if only one of certificate and key is given."""
    if bool(cert_file) != bool(key_file):
        given, other = (CERT_FLAG, KEY_FLAG) if cert_file else (KEY_FLAG, CERT_FLAG)
        raise StartupError(f"{given} requires {other}")


def check_endpoint(endpoint: str) -> None:
    """Raises StartupError if the text is not a URL of a collector's HTTP receiver."""
    if not re.fullmatch(r"https?://[^/\s]+\S*", endpoint):
        raise StartupError(f"{ENDPOINT_FLAG} {endpoint[:100]!r} is not a URL such as http://127.0.0.1:4318")


def traffic_of(text: str) -> Traffic:
    """Returns the shares of new requests that `--traffic` sets, words NAME=PERCENT. Raises StartupError."""
    traffic = Traffic()
    try:
        traffic.set(parse_shares(text.split()))
    except InvalidRequest as error:
        raise StartupError(f"--traffic: {error.message}") from None
    return traffic


def parse_adapters(text: str) -> Mapping[str, str]:
    """Returns the directories of `--lora`, words NAME=DIR, by name. Raises StartupError."""
    directories: dict[str, str] = {}
    for word in text.split():
        name, _, path = word.partition("=")
        if not path:
            raise StartupError(f"--lora {word[:200]!r} is not NAME=DIR")
        if name in directories:
            raise StartupError(f"--lora {name[:100]} is given twice")
        directories[name] = path
    return directories


def parse_origins(text: str) -> tuple[str, ...]:
    """Returns the origins of `--allowed-origins` as browsers write them. Raises StartupError for an invalid one."""
    origins = []
    for given in filter(None, (origin.strip() for origin in text.split(","))):
        origin = given.lower()
        try:
            parts = urlsplit(origin)
            valid = origin in ("*", "null") or (parts.port != 0 and _ORIGIN.fullmatch(origin))
        except ValueError:  # an invalid address between brackets, or an invalid port
            valid = False
        if not valid:
            raise StartupError(f"--allowed-origins: {given[:100]!r} is not an origin such as https://chat.example")
        origins.append(origin.removesuffix(_DEFAULT_PORTS.get(parts.scheme, " ")))
    return tuple(origins)
