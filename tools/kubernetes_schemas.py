"""Writes tests/data/kubernetes: the published schemas of the objects that `baton emit kubernetes` writes.

    python tools/kubernetes_schemas.py WHEEL CRD...

WHEEL is kubernetes-validate's, with the schemas of Kubernetes' own kinds; the CRDs are YAML files of their projects.
Descriptions are left out, parts that no kind uses too, and a part that occurs several times is kept once. Objects of a
CRD may have no other fields than the schema's, as in the strict schemas of Kubernetes' own kinds: an API server would
drop those silently.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import yaml

OUT = Path(__file__).parents[1] / "tests/data/kubernetes"
VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))
KINDS = {
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "Service": "io.k8s.api.core.v1.Service",
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
}
_LEAST_SHARED = 200
"""Characters of a part from which it is kept once."""


def trimmed(node: Any, *, names: bool = False) -> Any:
    """Returns a schema without descriptions; `names`: the keys of `node` are names of properties."""
    if isinstance(node, dict):
        return {
            key: trimmed(value, names=key in ("properties", "$defs") and not names)
            for key, value in node.items()
            if names or (key not in ("description", "$schema") and not key.startswith("x-kubernetes-group"))
        }
    return [trimmed(item) for item in node] if isinstance(node, list) else node


def strict(node: Any, *, names: bool = False) -> Any:
    """Returns a CRD's schema as JSON Schema: without other fields, and with either type for `int-or-string`."""
    if not isinstance(node, dict):
        return [strict(item) for item in node] if isinstance(node, list) else node
    made = {key: strict(value, names=key == "properties" and not names) for key, value in node.items()}
    if not names and made.get("type") == "object" and "properties" in made and "additionalProperties" not in made:
        made["additionalProperties"] = bool(made.get("x-kubernetes-preserve-unknown-fields", False))
    return made


class Shared:
    """Parts of schemas by the digest of their content."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}

    def add(self, node: Any, *, names: bool = False) -> Any:
        """Returns a reference to a schema, or the schema itself if it is short."""
        if not isinstance(node, dict):
            return [self.add(item) for item in node] if isinstance(node, list) else node
        made = {
            key: value if key.startswith("x-") else self.add(value, names=key == "properties" and not names)
            for key, value in node.items()
        }
        text = json.dumps(made, sort_keys=True)
        if names or len(text) < _LEAST_SHARED:
            return made
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        self.parts[digest] = made
        return {"$ref": f"#/$defs/{digest}"}


def inlined(name: str, definitions: dict[str, Any]) -> Any:
    """Returns a definition in which references are replaced by what they refer to."""

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return resolve(definitions[node["$ref"].rpartition("/")[2]])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(item) for item in node] if isinstance(node, list) else node

    return resolve(definitions[name])


def main(wheel: str, crds: list[str]) -> None:
    shared = Shared()
    kinds: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for version in VERSIONS:
            (path,) = [n for n in archive.namelist() if re.search(rf"/v{version}\.\d+-local-strict/_definitions", n)]
            definitions = json.loads(archive.read(path))["$defs"]
            schemas = {kind: shared.add(trimmed(inlined(name, definitions))) for kind, name in KINDS.items()}
            kinds[version] = schemas
    for path in crds:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        group, kind = document["spec"]["group"], document["spec"]["names"]["kind"]
        for version in document["spec"]["versions"]:
            schema = strict(trimmed(version["schema"]["openAPIV3Schema"]))
            schema["properties"]["metadata"] = {"type": "object"}
            del schema["properties"]["status"]
            kinds.setdefault("crds", {})[f"{group}/{version['name']} {kind}"] = shared.add(schema)
    text = json.dumps({"kinds": kinds, "$defs": shared.parts}, sort_keys=True, separators=(",", ":"))
    (OUT / "schemas.json").write_text(text.replace('},"', '},\n"') + "\n", encoding="utf-8")
    print(f"{len(text) >> 10} KiB, {len(shared.parts)} parts")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
