"""Triton's interpreter, with what a bitwise comparison of kernels needs: products in one order, and speed.

Triton's own executes the programs of a launch one after another: seconds for a few hundred tokens of a model of two
layers. In `lockstep` every operation of a kernel is one operation of numpy over all programs of the launch. A value
then has an axis of programs before those of its block, of length 1 if it is the same for all.

Triton's own also patches its language anew for each launch and for each function that a kernel calls, which takes most
of the time of small kernels. `patch_once` patches it for all launches of the process.

Programs whose branches, or numbers of rounds of a loop, differ cannot go on together. What the launch has stored so far
is undone, they are divided by the value in question, and each group starts again from the beginning. Groups run one
after another, so results are those of Triton's interpreter for one of the orders in which a GPU may run the programs:
test_interpreter.py compares the bits. Operations that no kernel of exact mode has, and whose axes would be off by one,
are refused.

The operations of a kernel, for given constants and types, follow from its branches and rounds alone. The first group
that takes a path records them; later ones repeat them without Triton's language, which takes ten times as long as numpy
for small blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle, _get_np_dtype

Array = NDArray[Any]
PROGRAMS = 64
"""The most programs that are interpreted at once: all values of a group are kept until it has ended."""
_memory = interpreter._interpreter  # loads and stores by address, in C++


def ordered_product(a: Any, b: Any) -> Array:
    """Handles of [..., M, K] and [..., K, N] -> [..., M, N] in float32: all products of an element are added up front
    to back. The interpreter holds bfloat16 as integers."""
    left, right = (_widened(t.data) if t.dtype.scalar == tl.bfloat16 else t.data for t in (a, b))
    left, right = (np.ascontiguousarray(np.moveaxis(t, axis, 0)) for t, axis in ((left, -1), (right, -2)))
    sums: Array = left[0][..., :, None] * right[0][..., None, :]
    for row, column in zip(left[1:], right[1:], strict=True):
        sums += row[..., :, None] * column[..., None, :]
    return sums


def _widened(bfloat16: Array) -> Array:
    return (bfloat16.astype(np.uint32) << 16).view(np.float32)


def _create_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    return TensorHandle(ordered_product(a, b) + d.data, d.dtype.scalar)


@contextmanager
def ordered_products() -> Iterator[None]:
    """Makes Triton's own interpreter multiply matrices in one order. numpy's depends on the place of a row in the
    matrix, and it multiplies bfloat16 as integers."""
    with mock.patch.object(InterpreterBuilder, "create_dot", _create_dot):
        yield


@cache
def patch_once() -> None:
    """From now on the language is the interpreter's, in launches and between them. `lockstep` may patch it further."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    interpreter._get_np_dtype = _dtype


@contextmanager
def lockstep() -> Iterator[None]:
    """Interprets all programs of a launch at once, with products in the order of `ordered_products`."""
    recorder = _Recorder()

    def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        names = executor.arg_names
        given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        recorder.launch(executor.fn, given, set(executor.constexprs), (*executor.grid, 1, 1)[:3])

    patch_once()
    builder = mock.patch.object(interpreter.interpreter_semantic, "builder", recorder)
    executor = mock.patch.object(GridExecutor, "__call__", launch)
    with builder, executor, np.errstate(all="ignore"):  # padding computes with uninitialised memory
        scope = interpreter._LangPatchScope()
        scope.set_attr(tl.tensor, "__bool__", lambda t: t.type.is_block() or bool(recorder.same(t)))
        scope.set_attr(tl.tensor, "__index__", lambda t: int(recorder.same(t)))
        scope.set_attr(tl.core, "reduce", recorder.reduce)
        try:
            yield
        finally:
            scope.restore()


class _Diverged(BaseException):
    """Programs need different values to go on. No Exception: the interpreter wraps those."""

    def __init__(self, values: Array) -> None:
        self.values = values


@dataclass
class _Path:
    """Operations up to a value that decides how a kernel goes on, and how it does so for each value seen. Values are
    numbered in the order in which they are made, beginning with the arguments: an operation is its method, its
    arguments, and the places of those that are numbers of values."""

    operations: list[tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]] = field(default_factory=list)
    decides: int | None = None
    after: dict[Any, _Path] = field(default_factory=dict)


class _Recorder:
    """The builder of Triton's language. Handles have their number as `number`; without one they are constants."""

    def __init__(self) -> None:
        self._builder = _Lockstep()
        self._paths: dict[Any, _Path] = {}
        self._path, self._count = _Path(), 0

    def launch(
        self, kernel: Callable[..., None], given: dict[str, Any], constants: set[str], grid: tuple[int, ...]
    ) -> None:
        self._builder.set_grid_dim(*grid)
        arguments, key = dict[str, Any](), list[Any]([kernel])
        for name, value in given.items():
            constant = name in constants or value is None or isinstance(value, float)
            arguments[name] = value if constant else _handle(value)
            key.append((value, type(value)) if constant else arguments[name].kind)
        path_key = tuple(key)
        programs = np.indices(grid, dtype=np.int32).reshape(3, -1)
        count = programs.shape[1]
        groups = [programs[:, at : at + PROGRAMS] for at in reversed(range(0, count, PROGRAMS))]
        while groups:
            group = groups.pop()
            self._builder.begin(group)
            try:
                if path_key not in self._paths or not self._repeat(self._paths[path_key], arguments.values()):
                    self._builder.undo()
                    self._record(self._paths.setdefault(path_key, _Path()), kernel, arguments)
            except _Diverged as diverged:
                self._builder.undo()
                values, first = np.unique(diverged.values, return_index=True)
                groups += [group[:, diverged.values == v] for v in values[np.argsort(-first)]]
            except BaseException:
                del self._paths[path_key]  # the path ends where the kernel failed: repeating it would omit the rest
                raise

    def _repeat(self, path: _Path, arguments: Iterable[Any]) -> bool:
        """Returns whether the group has taken a recorded path to its end."""
        values = [argument for argument in arguments if isinstance(argument, TensorHandle)]
        while True:
            for method, fixed, places in path.operations:
                given = list(fixed)
                for place in places:
                    given[place] = values[given[place]]
                if (made := method(*given)) is not None:
                    values.append(made)
            if path.decides is None:
                return True
            value = _same(values[path.decides].data)
            if value not in path.after:
                return False
            path = path.after[value]

    def _record(self, path: _Path, kernel: Callable[..., None], arguments: dict[str, Any]) -> None:
        self._path, self._count = path, 0
        path.operations.clear()
        for name, value in arguments.items():
            if isinstance(value, TensorHandle):
                self._number(value)
                arguments = arguments | {name: tl.tensor(value, value.dtype)}
        kernel.__globals__["range"] = self.rounds
        try:
            kernel(**arguments)
        finally:
            del kernel.__globals__["range"]

    def _number(self, handle: Any) -> None:
        handle.number, self._count = self._count, self._count + 1

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        if not callable(member) or name.endswith("_ty"):
            return member
        varies = name in ("create_get_program_id", "create_get_num_programs")
        return lambda *arguments: self._operate(member, arguments, varies)

    def _operate(self, method: Callable[..., Any], arguments: tuple[Any, ...], varies: bool = False) -> Any:
        made = method(*arguments)
        numbers = [getattr(a, "number", None) if isinstance(a, TensorHandle) else None for a in arguments]
        places = tuple(place for place, number in enumerate(numbers) if number is not None)
        if places or varies:
            stored = tuple(a if number is None else number for a, number in zip(arguments, numbers, strict=True))
            self._path.operations.append((method, stored, places))
            if made is not None:
                self._number(made)
        return made

    def same(self, tensor: Any) -> Any:
        """The value that a scalar has in all programs of the group: how the kernel goes on depends on it."""
        number = getattr(tensor.handle, "number", None)
        if number is None:
            return _same(tensor.handle.data)
        self._path.decides = number
        value = _same(tensor.handle.data)
        self._path = self._path.after.setdefault(value, _Path())
        self._path.operations.clear()
        return value

    def rounds(self, *bounds: Any) -> Iterable[Any]:
        """`range` in a kernel: programs stay together if they have as many rounds, wherever these begin."""
        if not any(isinstance(bound, tl.tensor) for bound in bounds):
            return range(*bounds)
        start, stop, step = (*((0, *bounds) if len(bounds) == 1 else bounds), 1)[:3]
        count = int((stop - start + (step - 1)) // step)
        return [start + number * step for number in range(count)]

    def reduce(self, input: Any, axis: int, combine: Any, keep_dims: bool = False, **_: Any) -> Any:
        ways = {tl.standard._sum_combine: np.sum, tl.standard._elementwise_max: np.nanmax}
        if isinstance(input, tuple) or axis is None or combine not in ways:
            raise NotImplementedError("a reduction that lockstep does not interpret")
        handle = self._operate(self._builder.reduce, (input.handle, ways[combine], axis, keep_dims))
        shape = list(handle.data.shape[1:])
        return tl.core.tensor(handle, tl.block_type(input.dtype, shape) if shape else input.dtype)


def _handle(value: Any) -> Any:
    """An argument of a launch, a tensor or an integer, with the name of its type as `kind`."""
    if hasattr(value, "data_ptr"):
        data, kind = np.array([value.data_ptr()], np.uint64), interpreter.triton.runtime.jit.mangle_type(value)
    else:
        data, kind = np.array([value], np.int32), "i32"  # larger ones do not fit, and are refused
    handle = TensorHandle(data, _type(kind))
    handle.kind = kind
    return handle


@cache
def _type(kind: str) -> Any:
    return tl.str_to_ty(kind, None)


@cache
def _scalar_dtype(kind: Any) -> Any:
    return _get_np_dtype(kind)


def _dtype(kind: Any) -> Any:
    """The interpreter's `_get_np_dtype`, which makes a table of all types each time."""
    return _get_np_dtype(kind) if isinstance(kind, tl.pointer_type | tl.block_type) else _scalar_dtype(kind)


def _spread(*arrays: Array) -> list[Array]:
    """Arrays of as many programs; the last ones may be scalars."""
    shape = (max(map(len, arrays)), *arrays[0].shape[1:])
    return [array if array.shape == shape else np.broadcast_to(array, shape) for array in arrays]


def _same(scalar: Array) -> Any:
    if (scalar != scalar[0]).any():
        raise _Diverged(scalar)
    return scalar[0].item()


class _Lockstep(InterpreterBuilder):
    """Each `data` is [programs or 1, *shape of the block]; a scalar's is [programs or 1]."""

    _programs: Array  # [3, programs]: those of the group that runs
    _stored: list[tuple[Array, Array, Array]]  # addresses, former content, mask of each store of the group

    def begin(self, programs: Array) -> None:
        self._programs, self._stored = programs, []

    def undo(self) -> None:
        while self._stored:
            _memory.store(*self._stored.pop())

    def create_get_program_id(self, axis: int) -> Any:
        numbers = self._programs[axis]
        return TensorHandle(numbers if (numbers != numbers[0]).any() else numbers[:1], tl.int32)

    def create_make_range(self, _: Any, start: int, stop: int) -> Any:
        return TensorHandle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_expand_dims(self, arg: Any, axis: int) -> Any:
        return TensorHandle(np.expand_dims(arg.data, axis + 1), arg.dtype.scalar)

    def create_broadcast(self, arg: Any, shape: Any) -> Any:
        return TensorHandle(np.broadcast_to(arg.data, (len(arg.data), *shape)), arg.dtype.scalar)

    def create_splat(self, type_: Any, arg: Any) -> Any:
        shape = tuple(type_.shape)
        data = arg.data.reshape(-1, *(1 for _ in shape))
        return TensorHandle(np.broadcast_to(data, (len(data), *shape)), arg.dtype.scalar)

    def create_reshape(self, arg: Any, shape: Any, _: bool) -> Any:
        return TensorHandle(arg.data.reshape(len(arg.data), *shape), arg.dtype.scalar)

    def create_trans(self, arg: Any, order: Any) -> Any:
        return TensorHandle(np.transpose(arg.data, (0, *(axis + 1 for axis in order))), arg.dtype.scalar)

    create_dot = _create_dot

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *_: Any) -> Any:
        kind = ptrs.get_element_ty()
        dtype = _dtype(kind)
        default = np.zeros((1,) * ptrs.data.ndim, dtype) if other is None else other.data
        return TensorHandle(_memory.load(*_spread(ptrs.data, mask.data, default), dtype), kind)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *_: Any) -> None:
        at, content, where = map(np.array, _spread(ptrs.data, value.data, mask.data))
        self._stored.append((at, _memory.load(at, where, np.zeros_like(content), content.dtype), where))
        _memory.store(at, content, where)

    def create_atomic_rmw(self, operation: Any, ptr: Any, value: Any, mask: Any, order: Any, _: Any) -> Any:
        shape = (self._programs.shape[1], *ptr.data.shape[1:])
        at, operand, where = (np.array(np.broadcast_to(t.data, shape)) for t in (ptr, value, mask))
        operation, order = self.ir_rmw_op_to_interpreter_rmw_op[operation], self.ir_sem_to_interpreter_sem[order]
        former = _memory.atomic_rmw(operation, at, operand, where, order)
        # Backwards: of programs that share an address, the first has seen what was there before.
        self._stored.append((at.ravel()[::-1], former.ravel()[::-1], where.ravel()[::-1]))
        return TensorHandle(former, value.dtype.scalar)

    def cast_impl(self, src: Any, type_: Any) -> Any:
        """As Triton's interpreter, which truncates to bfloat16, in fewer steps; subnormal numbers are left to it."""
        kinds = src.dtype.scalar, type_.scalar
        if kinds == (tl.float32, tl.bfloat16):
            whole = src.data.view(np.uint32)
            if not (((whole & 0x7F800000) == 0) & ((whole & 0x7FFFFF) != 0)).any():
                return TensorHandle((whole >> 16).astype(np.uint16), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32) and not (((src.data & 0x7F80) == 0) & ((src.data & 0x7F) != 0)).any():
            return TensorHandle(_widened(src.data), tl.float32)
        return super().cast_impl(src, type_)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("an operation that lockstep does not interpret")

    create_cat = create_histogram = create_gather = create_unsplat = create_atomic_cas = _refuse
    create_make_block_ptr = create_make_tensor_descriptor = _refuse

    def reduce(self, arg: Any, way: Callable[..., Any], axis: int, keep_dims: bool) -> Any:
        # Contiguous: numpy's order of a sum follows the layout of its argument.
        reduced = way(np.ascontiguousarray(arg.data), axis=axis + 1, keepdims=keep_dims)
        return TensorHandle(reduced.astype(_dtype(arg.dtype), copy=False), arg.dtype.scalar)
