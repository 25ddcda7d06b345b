"""The Open Inference Protocol without a transport: tensors, requests as completions, answers as tensors."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from baton.core.errors import InvalidRequest, NotFound
from coordinator.inference.model import InferRequest, generation, outputs_of, piece_of, text_generation
from coordinator.inference.served import ServedModel
from coordinator.inference.tensors import Tensor, checked, packed, unpacked
from coordinator.submission import Delta, Usage


def text(*values: str, name: str = "text_input") -> Tensor:
    return Tensor(name, "BYTES", (len(values),), values)


def one(name: str, datatype: str, value: Any) -> Tensor:
    return Tensor(name, datatype, (1,), (value,))


@pytest.mark.parametrize(
    ("datatype", "values", "raw"),
    [
        ("BYTES", ("a", "", "üb"), b"\1\0\0\0a\0\0\0\0\3\0\0\0\xc3\xbcb"),
        ("INT32", (1, -2, 3), struct.pack("<3i", 1, -2, 3)),
        ("UINT64", (1, 2, 1 << 63), struct.pack("<3Q", 1, 2, 1 << 63)),
        ("FP32", (0.5, 1.0, -2.0), struct.pack("<3f", 0.5, 1.0, -2.0)),
        ("BOOL", (True, False, True), b"\1\0\1"),
    ],
)
def test_binary_tensors_have_triton_s_layout(datatype: str, values: tuple[Any, ...], raw: bytes) -> None:
    tensor = Tensor("t", datatype, (3,), values)
    assert packed(tensor) == raw and unpacked("t", datatype, (3,), raw) == tensor


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "message"),
    [
        ("BYTES", (1,), b"\5\0\0\0ab", "do not hold the elements"),
        ("BYTES", (1,), b"\1\0\0\0ab", "do not hold the elements"),
        ("BYTES", (2,), b"\1\0\0\0a", "1 values for shape"),
        ("BYTES", (1,), b"\1\0\0\0\xff", "must be UTF-8"),
        ("BYTES", (1,), b"\xff\xff\xff\xff", "do not hold the elements"),
        ("INT32", (2,), b"\0\0\0\0", "4 bytes of data, 8 for this shape"),
        ("COMPLEX", (1,), b"", "datatype 'COMPLEX' is not one of"),
        ("INT32", (-1,), b"", "shape.: sizes of at least 0"),
        ("INT32", (1 << 12, 1 << 12), b"", "shape.: .* at most 65536 elements"),
    ],
)
def test_wrong_binary_tensors_are_refused_by_their_name(
    datatype: str, shape: tuple[int, ...], raw: bytes, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        unpacked("t", datatype, shape, raw)
    assert refused.value.param is not None and refused.value.param.startswith("inputs[t]")


@pytest.mark.parametrize(
    ("datatype", "values"), [("INT32", [True]), ("INT32", [1.5]), ("BOOL", [1]), ("BYTES", [3]), ("FP32", ["1"])]
)
def test_values_of_another_type_are_refused(datatype: str, values: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"is not (a|text)"):
        checked("t", datatype, (1,), values)


def test_sampling_comes_from_tensors_a_json_object_and_parameters() -> None:
    made = generation(
        InferRequest(
            "",
            (
                text("Hello"),
                one("sampling_parameters", "BYTES", '{"temperature": 0.5, "max_tokens": 9}'),
                one("random_seed", "UINT64", 7),
                text("a", "", "b", name="stop_words"),
                one("max_tokens", "INT32", 9),
            ),
            {"top_k": 3, "timeout": 1000, "binary_data_output": True},
        )
    )
    assert made.body == {
        "prompt": ["Hello"],
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 7,
        "stop": ["a", "b"],
        "top_k": 3,
    }
    assert made.outputs == ("text_output",) and made.with_prompt and made.stream is None


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        ((), {}, "'text_input' is required"),
        ((text(),), {}, "'text_input' must be BYTES with one element"),
        ((one("text_input", "INT32", 1),), {}, "'text_input' must be BYTES"),
        ((text("a"), one("sampling_parameters", "BYTES", "[1]")), {}, "must be a JSON object"),
        ((text("a"), one("sampling_parameters", "BYTES", "{")), {}, "must be a JSON object"),
        ((text("a"), one("sampling_parameters", "INT32", 3)), {}, "must be a JSON object"),
        ((text("a"), one("top_k", "INT32", 1)), {"top_k": 2}, "'top_k' is given twice"),
        ((text("a"), Tensor("top_k", "INT32", (2,), (1, 2))), {}, "must have one element, not 2"),
        ((text("a"), one("stream", "INT32", 1)), {}, "'stream' must be true or false"),
        ((text("a"),), {"echo": True}, "'echo' has no effect"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    inputs: tuple[Tensor, ...], parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        generation(InferRequest("", inputs, parameters))
    assert refused.value.param


def test_an_input_that_is_given_twice_is_refused() -> None:
    for inputs in ((text("a"), text("b")), (text("a"), one("max_tokens", "INT32", 5), one("max_tokens", "INT32", 5))):
        with pytest.raises(InvalidRequest, match="is given twice") as refused:
            generation(InferRequest("", inputs, {}, ()))
        assert refused.value.param == f"inputs[{inputs[-1].name}]"


def test_an_unknown_output_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="there is no output 'logits'") as refused:
        generation(InferRequest("", (text("a"),), outputs=("logits",)))
    assert refused.value.param == "outputs"


def test_answers_are_tensors_of_one_element_per_choice() -> None:
    flags = [one(f"return_{name}", "BOOL", True) for name in ("finish_reason", "num_input_tokens", "num_output_tokens")]
    made = generation(InferRequest("", (text("A", "B"), *flags)))
    answers = [Delta(" x", (1,), "stop", None, Usage(3, 1)), Delta(" y", (1,), "length", None, Usage(4, 2))]
    assert outputs_of(made, answers, 1) == [
        Tensor("text_output", "BYTES", (2,), ("A x", "B y")),
        Tensor("finish_reason", "BYTES", (2,), ("stop", "length")),
        Tensor("num_input_tokens", "UINT32", (2,), (3, 4)),
        Tensor("num_output_tokens", "UINT32", (2,), (1, 2)),
    ]
    alone = generation(InferRequest("", (text("A", "B"), one("exclude_input_in_output", "BOOL", True))))
    assert outputs_of(alone, answers, 1) == [Tensor("text_output", "BYTES", (2,), (" x", " y"))]
    assert piece_of(alone, Delta("z", (1, 2))) == [Tensor("text_output", "BYTES", (1,), ("z",))]


def test_the_generate_extension_takes_fields_beside_the_text_and_in_parameters() -> None:
    name, made = text_generation(
        {"id": "7", "text_input": "Hi", "max_tokens": 4, "parameters": {"temperature": 0, "stream": True}}
    )
    assert name == "7" and made.stream and not made.with_prompt
    assert made.body == {"prompt": ["Hi"], "max_tokens": 4, "temperature": 0}
    for body, message in (
        ({}, "'text_input' is required"),
        ({"text_input": 3}, "'text_input' must be a string"),
        ({"text_input": "a", "parameters": 3}, "'parameters' must be an object"),
        ({"text_input": "a", "id": 3}, "'id' must be a string"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            text_generation(body)


def test_only_the_served_model_in_its_version_exists() -> None:
    served = ServedModel("tiny")
    served.check("tiny")
    served.check("tiny", "1")
    for name, version in (("other", ""), ("tiny", "2")):
        with pytest.raises(NotFound):
            served.check(name, version)
