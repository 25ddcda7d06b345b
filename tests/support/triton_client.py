"""Uses Triton's own client against a cluster: `python triton_client.py HTTP_ADDRESS GRPC_ADDRESS MODEL`.

Runs in an environment that has tritonclient, which needs an older protobuf than Baton. Prints `ok NAME` per check.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException


def text(module: Any, value: str) -> Any:
    tensor = module.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    return tensor


def scalar(module: Any, name: str, datatype: str, dtype: Any, value: Any) -> Any:
    tensor = module.InferInput(name, [1], datatype)
    tensor.set_data_from_numpy(np.array([value], dtype=dtype))
    return tensor


def options(module: Any, tokens: int) -> list[Any]:
    given = json.dumps({"temperature": 0, "max_tokens": tokens, "ignore_eos": True}).encode()
    return [scalar(module, "sampling_parameters", "BYTES", np.object_, given)]


def both(http: Any, grpc: Any, model: str) -> list[str]:
    """Returns the whole answer by each transport, and checks what describes the server."""
    answers = []
    for module, client in ((triton_http, http), (triton_grpc, grpc)):
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(model)
        as_json = {} if module is triton_http else {"as_json": True}
        assert client.get_server_metadata(**as_json)["name"] == "baton"
        metadata = client.get_model_metadata(model, **as_json)
        assert metadata["name"] == model and metadata["inputs"][0]["name"] == "text_input"
        config = client.get_model_config(model, **as_json)
        config = config.get("config", config)
        assert config["model_transaction_policy"]["decoupled"]
        assert client.get_model_repository_index(**as_json)
        before = int(successes(client.get_inference_statistics(model, **as_json)))
        result = client.infer(model, [text(module, "def f("), *options(module, 8)], request_id="7")
        assert result.get_response(**as_json)["id"] == "7" or not as_json
        answers.append(result.as_numpy("text_output")[0].decode())
        assert int(successes(client.get_inference_statistics(model, **as_json))) == before + 1
    return answers


def successes(statistics: Any) -> Any:
    return statistics["model_stats"][0]["inference_stats"]["success"].get("count", 0)


def streamed(grpc: Any, model: str) -> str:
    got: queue.Queue[Any] = queue.Queue()
    grpc.start_stream(callback=lambda result, error: got.put((result, error)))
    stream = scalar(triton_grpc, "stream", "BOOL", np.bool_, True)
    grpc.async_stream_infer(model, [text(triton_grpc, "def f("), stream, *options(triton_grpc, 8)], request_id="s")
    pieces, final = [], False
    while not final:
        result, error = got.get(timeout=60)
        assert error is None, error
        pieces.append(result.as_numpy("text_output")[0].decode())
        final = result.get_response().parameters["triton_final_response"].bool_param
    grpc.async_stream_infer(model, [stream])  # no text
    _, error = got.get(timeout=60)
    assert "text_input" in str(error), error
    grpc.stop_stream()
    assert len(pieces) > 1
    return "".join(pieces)


def refused(http: Any, grpc: Any, model: str) -> None:
    for module, client in ((triton_http, http), (triton_grpc, grpc)):
        wrong = scalar(module, "temperature", "FP32", np.float32, -1.0)
        for name, inputs, word in (
            (model, [text(module, "a"), wrong], "temperature"),
            ("other", [text(module, "a")], "other"),
        ):
            try:
                client.infer(name, inputs)
            except InferenceServerException as error:
                assert word in error.message(), error.message()
            else:
                raise AssertionError(f"{word} was not refused")


def main(http_address: str, grpc_address: str, model: str) -> None:
    http = triton_http.InferenceServerClient(http_address)
    grpc = triton_grpc.InferenceServerClient(grpc_address)
    first, second = both(http, grpc, model)
    assert first == second and first.startswith("def f(") and len(first) > 6
    print("ok infer")
    assert "def f(" + streamed(grpc, model) == first
    print("ok stream")
    refused(http, grpc, model)
    print("ok errors")


if __name__ == "__main__":
    main(*sys.argv[1:])
