"""`baton emit kubernetes`: reads the topology, and writes the objects as YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import yaml

from baton.core.errors import StartupError
from baton.runtime.model_source import served_name
from baton.runtime.options import read_config_file
from baton.runtime.paths import read_text
from launch.kubernetes.config import KubernetesConfig
from launch.kubernetes.files import (
    checksum_files,
    compute_checksums,
    model_paths,
    mount_directory,
    parse_checksums,
)
from launch.kubernetes.objects import ClusterObjects, Models
from launch.kubernetes.pods import PodPlan, pod_plan
from launch.topology import parse_topology

OBJECTS, KUSTOMIZATION = "objects.yaml", "kustomization.yaml"
_HEADER = "# From `baton emit kubernetes`. Change the topology and emit again, or patch in another kustomization.\n"
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*|--[a-z][a-z0-9-]*")


def emit_kubernetes(config: KubernetesConfig) -> int:
    """Writes the objects of a topology into a directory, and prints what the Secret has to contain.

    Raises:
        StartupError: the topology is refused, or cannot run in pods; nothing is written then.
    """
    if not config.topology:
        raise StartupError("a topology file is missing: baton emit kubernetes TOPOLOGY")
    topology = parse_topology(read_config_file(config.topology))
    if topology.model == "auto":
        raise StartupError("topology: 'model' is missing: a path in the pods, or builtin")
    if not topology.coordinator.options.get("cluster_token_file"):
        raise StartupError("[options]: 'cluster_token_file' is missing: pods reach each other off loopback")
    pods = pod_plan(topology, topology.model, topology.served_model_name or served_name(topology.model))
    objects = ClusterObjects(pods, config, _models(pods, config)).objects()
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": config.namespace,
        "resources": [OBJECTS],
    }
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, documents in ((OBJECTS, objects), (KUSTOMIZATION, [kustomization])):
            (out / name).write_text(to_yaml(documents), encoding="utf-8")
            click.echo(out / name)
    except OSError as error:
        raise StartupError(f"--out {out} cannot be written: {error.strerror or error}") from None
    keys = ", ".join(sorted(secret_keys(objects)))
    click.echo(f"needs the Secret {config.secret} in the namespace {config.namespace} with the keys {keys}")
    return 0


def secret_keys(objects: Iterable[Any]) -> set[str]:
    """Returns the keys of the Secret that the pods mount."""
    keys: set[str] = set()
    for node in objects:
        if isinstance(node, dict):
            if "secretName" in node:
                keys |= {item["key"] for item in node["items"]}
            keys |= secret_keys(node.values())
        elif isinstance(node, list):
            keys |= secret_keys(node)
    return keys


def to_yaml(documents: Iterable[dict[str, Any]]) -> str:
    """Returns the documents as YAML that parsers of every version of YAML read alike."""
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000, explicit_start=True)
    return _HEADER + text


def _models(pods: PodPlan, config: KubernetesConfig) -> Models:
    paths = model_paths(pods.plan)
    if not paths:
        return Models()
    if not config.models_claim:
        raise StartupError(f"--models-claim is missing: {', '.join(paths)} must be in a PersistentVolumeClaim")
    directory = mount_directory(paths)
    if config.checksums:
        try:
            sums = parse_checksums(read_text(config.checksums))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", "") or error
            raise StartupError(f"--checksums {config.checksums}: {reason}") from None
    else:
        sums = compute_checksums(paths, directory)
    return Models(directory, checksum_files(sums, paths, directory))


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes every string that some version of YAML might read as anything else: 1e3 is a string in 1.1 and a number in
    1.2. Repeats what occurs twice, in place of anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None if _PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)
