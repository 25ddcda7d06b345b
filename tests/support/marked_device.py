"""A device simulated on the CPU that counts how often the host waits for it, which a GPU does not show.

Tensors computed on the device are marked, and so are all results computed from them. Reading one (`tolist`, `item`, a
condition) counts as a wait, and so does an operation whose output size depends on the data (`nonzero`, a boolean
index); only the functions listed here are counted. As on a GPU, computing with a marked tensor and one in host memory
is an error, and so is an upload other than by `to_device`. A copy to the host has its values only once the host has
waited for a mark recorded after it; until then it contains nonsense.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from baton.engine.batch import Batch
from baton.engine.draft_tokens_device import DeviceDraftTokens
from baton.engine.launches import Launches
from baton.engine.runner import Runner
from baton.engine.sampler import Decide
from tests.support.device_choice import decide as plain_decide

CPU = torch.device("cpu")
NONSENSE = -(1 << 30)
_READS = {"tolist", "item", "cpu", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__contains__"}
_READS |= {"__bool__", "__int__", "__float__", "__index__"}
_COUNTS = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "repeat_interleave"}
_UPLOADS = {"tensor", "as_tensor", "asarray", "from_numpy"}
_COPYING = ("attention_calls", "batch", "draft_tokens_device", "launches", "processors")


class OnDevice(Tensor):
    """A tensor on the device."""


class MarkedDevice(TorchFunctionMode):
    """Active while entered. `waits` counts; `most_copied` is the most elements in one copy to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.waits = self.most_copied = 0
        self._given = self._passed = 0
        self._late: list[tuple[int, Tensor, Tensor]] = []
        for name in _COPYING:
            monkeypatch.setattr(f"baton.engine.{name}.to_device", lambda tensor, device: _marked(tensor))
        monkeypatch.setattr("baton.engine.launches.to_host", self.to_host)

    def adopt(self, target: Runner, draft: Runner | None, decide: Decide = plain_decide) -> None:
        """Makes both runners compute on this device, as on a GPU."""
        for runner in (target, draft):
            if runner is not None:
                runner._compute = self._computing(runner._compute)
                runner.launches_ahead = True
                runner.launches = Launches(CPU, runner.group, decide, None, self.new_mark)
        if draft is not None:
            draft._propose = DeviceDraftTokens(draft._compute, draft._limits, CPU, decide, draft._tables, self.new_mark)

    def to_host(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, OnDevice):
            return tensor
        self.most_copied = max(self.most_copied, tensor.numel())
        host = torch.full(tensor.shape, NONSENSE, dtype=tensor.dtype)
        self._given += 1
        self._late.append((self._given, host, _plain(tensor).clone()))
        return host

    def new_mark(self) -> _Mark:
        return _Mark(self)

    def record(self) -> int:
        self._given += 1
        return self._given

    def wait_for(self, number: int) -> None:
        self.waits += 1
        self._passed = max(self._passed, number)
        for given, host, tensor in self._late:
            if given < self._passed:
                host.copy_(tensor)
        self._late = [late for late in self._late if late[0] > self._passed]

    def has_passed(self, number: int) -> bool:
        return number <= self._passed

    def _computing(self, compute: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """Treats a model's forward pass as work of the device, whatever operations it uses."""

        def on_device(batch: Batch) -> Tensor:
            if batch.device_tokens is not None:
                batch = replace(batch, device_tokens=_plain(batch.device_tokens))
            with torch._C.DisableTorchFunction():
                return _plain(compute(batch)).as_subclass(OnDevice)

        return on_device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, list(kwargs.values())))
        marked = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
        name = func.__name__
        moves = _names_a_device(name, args, kwargs)
        if not marked:
            assert not moves and (name not in _UPLOADS or kwargs.get("device") is None), f"{name} waits: see to_device"
            if kwargs.get("device") is None:
                return func(*args, **kwargs)
        reads = name in _READS or moves
        here, given = _map(args, _plain), {key: _map(value, _plain) for key, value in kwargs.items()}
        if marked and (reads or _counts(name, args, kwargs)):
            self.waits += 1
        if reads:
            return func(*here, **given)
        if marked:
            hosts = [t for t in tensors if not isinstance(t, OnDevice) and t.dim() > 0]
            assert not hosts, f"{name}: a tensor in host memory meets one on the device"
        return _map(func(*here, **given), _marked)


class _Mark:
    def __init__(self, device: MarkedDevice) -> None:
        self._device, self._number, self._at = device, 0, 0.0

    def record(self) -> None:
        self._number, self._at = self._device.record(), time.perf_counter()

    def synchronize(self) -> None:
        assert self._number, "nothing was recorded"
        self._device.wait_for(self._number)

    def elapsed_time(self, end: _Mark) -> float:
        assert self._device.has_passed(self._number) and self._device.has_passed(end._number)
        return (end._at - self._at) * 1e3


def _names_a_device(name: str, args: Any, kwargs: Any) -> bool:
    if name == "type":
        return any(not isinstance(given, torch.dtype) for given in (*args[1:], *kwargs.values()))
    named = (*args[1:2], kwargs.get("device")) if name == "to" else ()
    return any(isinstance(given, (torch.device, str, int)) for given in named)


def _counts(name: str, args: Any, kwargs: Any) -> bool:
    """Returns whether the size of the output depends on data on the device."""
    if name in ("__getitem__", "__setitem__"):
        return _waits_in_index(args[1])
    return name in _COUNTS or (name == "where" and len(args) + len(kwargs) == 1)


def _waits_in_index(index: Any) -> bool:
    """A list must be uploaded first, and a mask selects an unknown number of elements."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(p, list) or (isinstance(p, Tensor) and p.dtype == torch.bool) for p in parts)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in _tensors(part)] if isinstance(value, (tuple, list)) else []


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "n_sequence_fields"):  # torch.return_types
        return type(value)([_map(part, change) for part in value])
    if isinstance(value, (tuple, list)):
        return type(value)(_map(part, change) for part in value)
    return change(value)


def _marked(value: Any) -> Any:
    return _as(value, OnDevice) if type(value) is Tensor else value


def _plain(value: Any) -> Any:
    return _as(value, Tensor) if isinstance(value, OnDevice) else value


def _as(tensor: Tensor, kind: type[Tensor]) -> Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(kind)
