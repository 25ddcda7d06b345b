"""One config model: file < environment < flags, strict about names, types and ranges whatever the source."""

from __future__ import annotations

import difflib
from dataclasses import Field, fields
from typing import Any, get_type_hints

import pytest

from baton.core.errors import StartupError
from baton.runtime.config import (
    BatchesConfig,
    CoordinatorConfig,
    EngineConfig,
    WorkerConfig,
    differences,
    for_device,
    resolve,
)
from launch.up_config import UpConfig

FIELDS = [(cls, f) for cls in (WorkerConfig, BatchesConfig, CoordinatorConfig) for f in fields(cls)]
NUMBERS = [(cls, f) for cls, f in FIELDS if isinstance(f.default, (int, float)) and not isinstance(f.default, bool)]

NOT_DIALLED = ["nonsense", "", ":", ":8101", "head:", "head", "8101", "head:１", "kopf-ü:8101", "head:8101\n"]
NOT_DIALLED += [f"10.0.0.1:{port}" for port in ("0", "65536", "83969", "99999", "123456", "00001")]
NOT_DIALLED += [f"10.0.0.1:{port}" for port in ("-1", "+1", "0x1", "1.0", " 1", "1 ", "1_0", "http")]
NOT_DIALLED += [f"{host}:8101" for host in ("::1", "fe80::1%eth0", "[]", "[10.0.0.1]", "[::g]", "[::1", "::1]")]
NOT_DIALLED += [f"{host}:8101" for host in ("a b", " head", "-head", "http://head", "dns:///head", "h" * 500)]


def config(cls: type[Any] = WorkerConfig, file: Any = (), env: Any = (), flags: Any = ()) -> Any:
    return resolve(cls, file=dict(file), env=dict(env), flags=dict(flags))


def test_brackets_of_an_address_to_listen_on_are_dropped() -> None:
    assert config(flags={"host": "[::1]"}).host == "::1" == config(file={"host": "::1"}).host
    given = {"BATON_HOST": "[::]", "BATON_CONTROL_HOST": "[fd00::1]"}
    found = config(CoordinatorConfig, env=given)
    assert (found.host, found.control_host) == ("::", "fd00::1")
    assert config(UpConfig, flags={"host": "[::1]"}).host == "::1"


def name_of(value: object) -> str:
    return f"{value.__name__}" if isinstance(value, type) else value.name if isinstance(value, Field) else str(value)


def other_value(f: Field[Any]) -> Any:
    """A legal value that is not the default."""
    if isinstance(f.default, bool):
        return not f.default
    if f.metadata["choices"]:
        return next(choice for choice in f.metadata["choices"] if choice != f.default)
    check = f.metadata["check"] or (lambda text: None)
    texts = (text for text in ("elsewhere", "elsewhere:1", "others") if check(text) is None)
    return next(texts) if isinstance(f.default, str) else f.default + 1


@pytest.mark.parametrize(("cls", "f"), FIELDS, ids=name_of)
def test_every_field_can_be_set_from_every_source(cls: type[Any], f: Field[Any]) -> None:
    value = other_value(f)
    for source in (
        {"file": {f.name: value}},
        {"env": {"BATON_" + f.name.upper(): str(value)}},
        {"flags": {f.name: value}},
    ):
        made = config(cls, **source)
        assert getattr(made, f.name) == value
        assert type(getattr(made, f.name)) is type(f.default)
        assert differences(made) == {f.name: value}


@pytest.mark.parametrize(("cls", "f"), FIELDS, ids=name_of)
def test_every_default_is_valid_typed_and_documented(cls: type[Any], f: Field[Any]) -> None:
    assert config(cls, flags={f.name: f.default}) == cls()
    assert type(f.default) is get_type_hints(cls)[f.name]
    assert f.metadata["help"]


@pytest.mark.parametrize(("cls", "f"), FIELDS, ids=name_of)
@pytest.mark.parametrize("source", ["file", "flags"])
def test_wrong_type_is_refused_by_name(cls: type[Any], f: Field[Any], source: str) -> None:
    wrong = [None, [1], {}] + ([5, True] if isinstance(f.default, str) else ["5"])
    wrong += [1, 0.0] if isinstance(f.default, bool) else [True, False]
    wrong += [1.0] if type(f.default) is int else []
    for value in wrong:
        with pytest.raises(StartupError, match=f.name if source == "file" else f.name.replace("_", "-")):
            config(cls, **{source: {f.name: value}})


@pytest.mark.parametrize(("cls", "f"), NUMBERS, ids=name_of)
def test_number_out_of_range_is_refused(cls: type[Any], f: Field[Any]) -> None:
    low, high = f.metadata["low"], f.metadata["high"]
    assert low is not None
    assert getattr(config(cls, flags={f.name: type(f.default)(low)}), f.name) == low
    with pytest.raises(StartupError, match=f"at least {low}"):
        config(cls, flags={f.name: low - 1})
    if high is not None:
        assert getattr(config(cls, flags={f.name: high}), f.name) == high
        with pytest.raises(StartupError, match=f"at most {high}"):
            config(cls, flags={f.name: high + 1})


@pytest.mark.parametrize(("cls", "f"), [(c, f) for c, f in NUMBERS if isinstance(f.default, float)], ids=name_of)
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_number_that_is_not_finite_is_refused(cls: type[Any], f: Field[Any], text: str) -> None:
    for source in ({"env": {"BATON_" + f.name.upper(): text}}, {"file": {f.name: float(text)}}):
        with pytest.raises(StartupError, match="finite"):
            config(cls, **source)


def test_integer_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(StartupError, match="finite"):
        config(file={"kv_memory_gib": 10**400})


@pytest.mark.parametrize(("cls", "f"), [(c, f) for c, f in FIELDS if not isinstance(f.default, str)], ids=name_of)
def test_environment_text_that_does_not_parse_is_refused(cls: type[Any], f: Field[Any]) -> None:
    variable = "BATON_" + f.name.upper()
    with pytest.raises(StartupError, match=variable):
        config(cls, env={variable: "lots"})


@pytest.mark.parametrize("text", ["1", "true", "YES", "on", "0", "False", "no", "off", ""])
def test_environment_booleans_accept_the_common_spellings(text: str) -> None:
    assert config(env={"BATON_EXACT": text}).exact is (text.lower() in ("1", "true", "yes", "on"))


def test_environment_overrides_file_and_flags_override_both() -> None:
    file, env, flags = {"threads": 1, "block_size": 1, "host": "f"}, {"BATON_THREADS": "2", "BATON_BLOCK_SIZE": "2"}, {}
    flags["threads"] = 3
    made = config(file=file, env=env, flags=flags)
    assert (made.threads, made.block_size, made.host) == (3, 2, "f")


def test_other_environment_variables_are_ignored() -> None:
    assert config(env={"HOME": "/", "THREADS": "9", "BATON_PORT": "8100"}) == WorkerConfig()


@pytest.mark.parametrize("source", ["file", "flags"])
@pytest.mark.parametrize(("cls", "f"), FIELDS, ids=name_of)
def test_unknown_key_is_refused_with_the_nearest_name(cls: type[Any], f: Field[Any], source: str) -> None:
    typo = f.name[:-1] + "zz"
    nearest = difflib.get_close_matches(typo, [g.name for g in fields(cls)], n=1)
    with pytest.raises(StartupError, match=repr(typo)) as caught:
        config(cls, **{source: {typo: f.default}})
    assert all(f"did you mean {name!r}" in caught.value.message for name in nearest)
    assert "did you mean" not in caught.value.message or nearest


def test_unknown_key_without_a_similar_name_gets_no_suggestion() -> None:
    with pytest.raises(StartupError, match=r"unknown key 'qqqq' in the config file$"):
        config(file={"qqqq": 1})


def test_value_outside_the_choices_is_refused_with_the_choices() -> None:
    with pytest.raises(StartupError, match="--dtype must be one of auto, bfloat16, float32, not 'int8'"):
        config(flags={"dtype": "int8"})


@pytest.mark.parametrize("value", NOT_DIALLED)
def test_invalid_address_is_refused_from_every_source(value: str) -> None:
    for source, name in (
        ({"flags": {"coordinator": value}}, "--coordinator"),
        ({"env": {"BATON_COORDINATOR": value}}, "BATON_COORDINATOR"),
        ({"file": {"coordinator": value}}, "config file key 'coordinator'"),
    ):
        with pytest.raises(StartupError) as caught:
            config(**source)
        refusal = caught.value.message
        assert refusal.startswith(f"{name} must be HOST:PORT with a port from 1 to 65535, not ")
        assert refusal.isascii() and "\n" not in refusal and len(refusal) < 150
        assert value not in ("nonsense", "", "10.0.0.1:83969") or refusal.endswith(f"not {value!r}")


@pytest.mark.parametrize(
    "value",
    [
        "127.0.0.1:1",
        "10.0.0.1:65535",
        "localhost:8101",
        "head_0.example.org:8101",
        "[::1]:8101",
        "[fe80::1%eth0]:8101",
    ],
)
def test_valid_address_is_accepted(value: str) -> None:
    assert config(flags={"coordinator": value}).coordinator == value


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "\x00", "a\u2028b", "a\u202eb", "a\udcff", "x" * 257])
def test_unprintable_or_too_long_model_name_is_refused(name: str) -> None:
    for source, field in (
        ({"flags": {"served_model_name": name}}, "--served-model-name"),
        ({"env": {"BATON_SERVED_MODEL_NAME": name}}, "BATON_SERVED_MODEL_NAME"),
        ({"file": {"served_model_name": name}}, "config file key 'served_model_name'"),
    ):
        for cls in (CoordinatorConfig, UpConfig):
            with pytest.raises(StartupError) as caught:
                config(cls, **source)
            refusal = caught.value.message
            assert refusal.startswith(f"{field} must be 1 to 256 printable characters, not ")
            assert refusal.isascii() and refusal.isprintable() and len(refusal) < 150


@pytest.mark.parametrize("name", ["", "org/name", "Modell ü 7B", "模型"])
def test_printable_model_name_is_accepted(name: str) -> None:
    assert config(CoordinatorConfig, flags={"served_model_name": name}).served_model_name == name


def test_deep_or_long_value_is_refused_with_a_short_message() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for value, shown in ((deep, "this dict"), (["x" * 5000], "['xxx"), ([1 << 100_000], "this list")):
        with pytest.raises(StartupError) as caught:
            config(file={"model": value})
        refusal = caught.value.message
        assert refusal.startswith(f"config file key 'model' must be str, not {shown}") and len(refusal) < 300
    with pytest.raises(StartupError, match="'threads' must be at most 1024, not this int"):
        config(file={"threads": 1 << 100_000})


def test_workers_share_the_engine_options() -> None:
    assert {f.name for f in fields(EngineConfig)} < {f.name for f in fields(WorkerConfig)}


@pytest.mark.parametrize(
    ("role", "device", "given", "tokens"),
    [("prefill", "cuda", 0, 4096), ("prefill", "cpu", 0, 512), ("decode", "cuda", 0, 512), ("prefill", "cuda", 64, 64)],
)
def test_steps_of_a_prefill_worker_are_longer_on_a_gpu(role: str, device: str, given: int, tokens: int) -> None:
    assert for_device(WorkerConfig(step_tokens=given), role, device).step_tokens == tokens
