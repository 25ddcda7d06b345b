"""S-1: the serving code does not unpickle, evaluate code or start a shell, and no `assert` serves as a check.
The lint is tested with planted lines, each of which a real project once had."""

from __future__ import annotations

import ast

import pytest

from tests.arch.source_tree import source_files, tree
from tools.shape import nodes

FORBIDDEN_MODULES = (
    "_pickle", "cloudpickle", "dill", "jsonpickle", "joblib", "marshal", "pickle", "pickletools", "shelve",
)  # fmt: skip
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__",
    "torch.load", "torch.jit.load", "torch.package.PackageImporter", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pandas.read_pickle",
    "jinja2.Environment", "jinja2.Template", "jinja2.environment.Environment",
}  # fmt: skip
FORBIDDEN_METHODS = (  # collectives that pickle, sockets that unpickle
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list", "recv_pyobj", "send_pyobj", "recv_object", "send_object",
)  # fmt: skip


def findings(source: ast.Module, path: str) -> list[str]:
    """Each forbidden construct in a module, with its path and line."""
    names = _full_names(source)

    def dotted(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"

    found: list[tuple[int, str]] = []
    for node in nodes(source, ast.Assert, ast.Import, ast.ImportFrom, ast.Call):
        if isinstance(node, ast.Assert):
            found.append((node.lineno, "assert: python -O drops it; raise instead"))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [(node.lineno, f"imports {m}") for m in modules if m.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in FORBIDDEN_CALLS or name.split(".")[-1] in FORBIDDEN_METHODS:
                found.append((node.lineno, f"calls {name}"))
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in ("allow_pickle", "shell", "trust_remote_code") and not is_false:
                    found.append((node.lineno, f"{keyword.arg} in a call of {name}"))
    return [f"{path}:{line} {what}" for line, what in found]


def _full_names(source: ast.Module) -> dict[str, str]:
    """What each imported name stands for: `import numpy as np` -> np: numpy; `from torch import load` -> torch.load."""
    names: dict[str, str] = {}
    for node in nodes(source, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def test_serving_code_has_no_forbidden_construct() -> None:
    assert len(source_files()) > 30
    found = [line for path in source_files() for line in findings(tree(path), path)]
    assert not found, "\n".join(found)


PLANTED = """
import pickle
from pickle import loads as decode
import cloudpickle
import dill
import marshal
import shelve
import torch as t; t.load("model.pt")
from torch import load; load("model.pt")
import numpy as np; np.load("x.npy", allow_pickle=True)
np_file = read(allow_pickle=flag)
import yaml; yaml.load(text)
eval(text)
exec(text)
from torch import distributed as dist; dist.broadcast_object_list(objects, 0)
group.all_gather_object(out, value)
socket.recv_pyobj()
import jinja2; jinja2.Environment()
from jinja2 import Template; Template(text)
import subprocess; subprocess.run(command, shell=True)
import os; os.system(command)
assert request.valid
AutoModel.from_pretrained(name, trust_remote_code=True)
""".strip().splitlines()


@pytest.mark.parametrize("line", PLANTED)
def test_lint_reports_the_planted_line(line: str) -> None:
    assert len(findings(ast.parse(line), "planted.py")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "import re; re.compile('x')",
        "import json; json.load(file)",
        "from safetensors.torch import load; load(raw)",
        "import numpy as np; np.load('x.npy', allow_pickle=False)",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment; ImmutableSandboxedEnvironment()",
        "import subprocess; subprocess.run(['ls'])",
    ],
)
def test_lint_accepts_harmless_lines(line: str) -> None:
    assert findings(ast.parse(line), "planted.py") == []
