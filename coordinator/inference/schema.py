"""The JSON of the protocol's HTTP form: requests with tensors, and their binary data behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson

from baton.core.errors import InvalidRequest
from baton.runtime.json_body import parse_object
from coordinator.inference.model import InferRequest
from coordinator.inference.served import VERSION
from coordinator.inference.tensors import Tensor, checked, packed, unpacked
from coordinator.openai.validation import RequestObject, at_most, parse

MAX_TENSORS = 64
_Parameters = Annotated[dict[str, Any], at_most(64)]


class InferInput(RequestObject):
    place = "inputs"

    name: str
    shape: Annotated[list[int], at_most(8)]
    datatype: str
    parameters: _Parameters | None = None
    data: list[Any] | None = None


class InferOutput(RequestObject):
    place = "outputs"

    name: str
    parameters: _Parameters | None = None


class InferBody(RequestObject):
    id: str | None = None
    parameters: _Parameters | None = None
    inputs: Annotated[list[InferInput], at_most(MAX_TENSORS)]
    outputs: Annotated[list[InferOutput], at_most(MAX_TENSORS)] | None = None


@dataclass(frozen=True, slots=True)
class HttpInfer:
    """A request, the outputs that are to be binary (None: all), and the names of ignored fields."""

    request: InferRequest
    binary: frozenset[str] | None
    ignored: frozenset[str]


def parse_infer(header_bytes: int | None, strict: bool, content: bytes) -> HttpInfer:
    """Parses a request whose first `header_bytes` are JSON, or all of it. Raises InvalidRequest naming the field."""
    header = content if header_bytes is None else content[:header_bytes]
    if header_bytes is not None and header_bytes > len(content):
        message = f"Inference-Header-Content-Length is {header_bytes}, but the body has {len(content)} bytes"
        raise InvalidRequest(message, param="Inference-Header-Content-Length")
    body = parse(InferBody, header, strict=strict)
    binary = memoryview(content)[len(header) :]
    inputs: list[Tensor] = []
    for given in body.inputs:
        where, parameters = f"inputs[{given.name[:100]}]", given.parameters or {}
        _refuse_shared_memory(where, parameters)
        size = parameters.get("binary_data_size")
        if (size is None) == (given.data is None):
            raise InvalidRequest(
                f"'{where}': either 'data' or the parameter 'binary_data_size' is required", param=where
            )
        if size is None:
            inputs.append(checked(given.name, given.datatype, given.shape, _flat(given.data or [])))
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(binary):
            param = f"{where}.parameters.binary_data_size"
            rule = f"must be a number of bytes, at most the {len(binary)} of binary data left in the body"
            raise InvalidRequest(f"'{param}': {rule}", param=param)
        inputs.append(unpacked(given.name, given.datatype, given.shape, bytes(binary[:size])))
        binary = binary[size:]
    if binary:
        raise InvalidRequest(f"{len(binary)} bytes of binary data belong to no input", param="inputs")
    outputs = body.outputs or []
    for output in outputs:
        _refuse_shared_memory(f"outputs[{output.name[:100]}]", output.parameters or {})
    every = (body.parameters or {}).get("binary_data_output") is True
    chosen = {o.name: (o.parameters or {}).get("binary_data", every) is True for o in outputs}
    names = None if every and not outputs else frozenset(name for name, is_binary in chosen.items() if is_binary)
    request = InferRequest(body.id or "", tuple(inputs), body.parameters or {}, tuple(chosen))
    return HttpInfer(request, names, body.ignored)


def infer_response(
    name: str, request_id: str, outputs: Sequence[Tensor], binary: frozenset[str] | None
) -> tuple[bytes, Mapping[str, str]]:
    """Returns the body of an answer and its headers; binary data follow the JSON."""
    listed, data = [], []
    for tensor in outputs:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if binary is None or tensor.name in binary:
            data.append(packed(tensor))
            entry["parameters"] = {"binary_data_size": len(data[-1])}
        else:
            entry["data"] = list(tensor.values)
        listed.append(entry)
    head = {"model_name": name, "model_version": VERSION, **({"id": request_id} if request_id else {})}
    header = orjson.dumps(head | {"outputs": listed})
    if not data:
        return header, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(len(header))}
    return header + b"".join(data), headers


def generate_response(name: str, request_id: str, outputs: Sequence[Tensor]) -> bytes:
    """Returns an answer of the generate extension: a tensor of one element is that element."""
    values = {tensor.name: tensor.values[0] if len(tensor.values) == 1 else tensor.values for tensor in outputs}
    head = {"model_name": name, "model_version": VERSION, **({"id": request_id} if request_id else {})}
    return orjson.dumps(head | values)


def parse_generate(content: bytes) -> dict[str, Any]:
    """Parses a body of the generate extension. Raises InvalidRequest."""
    return parse_object(content)


def _flat(data: list[Any]) -> list[Any]:
    """Returns the elements of nested arrays in row-major order."""
    while data and all(isinstance(each, list) for each in data):
        data = [element for each in data for element in each]
    return data


def _refuse_shared_memory(where: str, parameters: Mapping[str, Any]) -> None:
    for name in ("shared_memory_region", "classification"):
        if parameters.get(name):
            raise InvalidRequest(f"'{name}' is not supported", param=f"{where}.parameters.{name}")
