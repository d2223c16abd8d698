"""Damage to serialized MIL programs: to fields of the message, to bytes of the weights.

``choose(n)``, which returns an integer below ``n``, decides on the damage: Hypothesis, a fuzzer or
a random generator can all provide it. A sample is the length of the specification, the
specification and the weight file, as bytes.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from coreml_delegate.errors import CoreMLDelegateError
from coreml_delegate.patches.third_party import model_pb2
from coreml_delegate.runtime.engines.base import EngineOptions
from coreml_delegate.runtime.engines.openvino import OPENVINO
from coreml_delegate.runtime.engines.selection import ENGINES
from coreml_delegate.runtime.mil.program import Program
from coreml_delegate.runtime.mil.reader import WeightFile, read_program
from coreml_delegate.runtime.model import Model
from coreml_delegate.runtime.native import NATIVE_RUN, SCALAR_TYPES, NativeArgument

Choose = Callable[[int], int]

_LENGTH = struct.Struct("<I")
_WEIGHTS = "weights/weight.bin"

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
"""Samples to damage, and damaged samples (``found-*``) that once failed."""

MAX_TURNS = 200
"""Most turns of a loop, so that an endless loop is refused quickly; see ``limits.MAX_TURNS``."""

_INTEGERS = (0, 1, 2, 3, 5, 7, 31, 64, 255, 65536, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1)
_FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-30,
    1e30,
    3.4e38,
    math.inf,
    -math.inf,
    math.nan,
)
_STRINGS = ("", "x", "fp16", "int32", "bool", "valid", "same", "NEAREST", "\u00e9", "a" * 300)
_SIGNED = {
    FieldDescriptor.TYPE_INT32: 32,
    FieldDescriptor.TYPE_INT64: 64,
    FieldDescriptor.TYPE_SINT32: 32,
    FieldDescriptor.TYPE_SINT64: 64,
}


def pack(spec: bytes, weights: bytes = b"") -> bytes:
    """Pack a specification and a weight file into one sample."""
    return _LENGTH.pack(len(spec)) + spec + weights


def unpack(sample: bytes) -> tuple[bytes, bytes]:
    """Unpack a sample, which may be any bytes: the specification and the weight file."""
    if len(sample) < _LENGTH.size:
        return sample, b""
    end = _LENGTH.size + _LENGTH.unpack_from(sample)[0]
    return sample[_LENGTH.size : end], sample[end:]


def read(sample: bytes) -> Program:
    """The program of a sample."""
    spec, weights = unpack(sample)
    files = {_WEIGHTS: WeightFile(_WEIGHTS, memoryview(weights))} if weights else {}
    return read_program(spec, files)


NATIVE = "native"
"""The openvino engine with calls that enter no Python."""


def execute(sample: bytes, engine: str) -> list[CoreMLDelegateError]:
    """Read a sample and run its functions; return this package's errors, raise all others.

    Args:
        sample: See above.
        engine: An engine's name, or ``NATIVE`` to compare calls without and with Python.
    """
    is_native = engine == NATIVE
    engine = OPENVINO.name if is_native else engine
    try:
        program = read(sample)
    except CoreMLDelegateError as error:
        return [error]
    errors: list[CoreMLDelegateError] = []
    for name in program.functions:
        try:
            model = Model(
                program, function_name=name, engine=engine, options=EngineOptions(threads=1)
            )
            inputs = _inputs(model)
            is_random = any(op.type.startswith("random") for op in model.function.block.walk())
            if is_native and not is_random:
                _check_native_calls(model, inputs)
            else:
                model.predict(inputs, model.make_state())
        except CoreMLDelegateError as error:
            errors.append(error)
            ENGINES[engine].unsupported(program.functions[name])
    return errors


def _check_native_calls(model: Model, inputs: dict[str, np.ndarray]) -> None:
    """Compare two calls without Python, on their own states, with the calls in Python."""
    state, other = model.make_state(), model.make_state()
    call = model.native_call(tuple(inputs), model.output_names, other)
    for _ in range(2):  # the second finds everything bound
        results = model.predict(inputs, state)
        if call is None:
            continue
        native_results = {name: np.full_like(array, 1) for name, array in results.items()}
        arguments = native_arguments(*inputs.values(), *native_results.values())
        code = NATIVE_RUN(call.run)(call.model, arguments, len(arguments), None, None)
        if code == 0 and not _are_equal(results, native_results):
            raise AssertionError("a native call gives something else")
        if code != 0:
            return
        if state is not None and not _are_equal(state.snapshot(), other.snapshot()):
            raise AssertionError("a native call leaves other states")


def native_arguments(*arrays: np.ndarray) -> Any:
    """Return the arguments of a native call; the arrays have to be contiguous and outlive it."""
    arguments = (NativeArgument * len(arrays))()
    for argument, array in zip(arguments, arrays, strict=True):
        argument.data, argument.rank = array.ctypes.data, array.ndim
        argument.sizes = (ctypes.c_int32 * array.ndim)(*array.shape)
        argument.type = SCALAR_TYPES[array.dtype.name]
    return arguments


def _are_equal(results: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return results.keys() == expected.keys() and all(
        np.array_equal(results[n], expected[n], equal_nan=results[n].dtype.kind == "f")
        for n in results
    )


def _inputs(model: Model) -> dict[str, np.ndarray]:
    arrays = {}
    for feature, dtype in zip(model.function.inputs, model.param_dtypes(), strict=True):
        shape = feature.shapes[0] if feature.shapes else feature.type.shape or ()
        sizes = [1 if size is None else min(size, 64) for size in shape]
        # Of another shape than declared, and refused, where that is larger than a test may be.
        arrays[feature.name] = np.ones(sizes if np.prod(sizes) < 1 << 20 else (1,), dtype)
    return arrays


def damage(sample: bytes, choose: Choose, *, times: int = 1) -> bytes:
    """``sample`` with one damage: to a field, a subtree, or bytes of the weights."""
    spec, weights = unpack(sample)
    if weights and choose(8) == 0:
        damaged = bytearray(weights)
        index = choose(min(len(damaged), 4096))
        damaged[index] ^= 1 << choose(8)
        return pack(spec, bytes(damaged[: len(damaged) - choose(2) * choose(len(damaged))]))
    model = model_pb2().Model()
    model.ParseFromString(spec)
    for _ in range(times):
        _damage_message(model, choose)
    return pack(model.SerializeToString(deterministic=True), weights)


def _damage_message(message: Any, choose: Choose) -> None:
    # Mostly values of the program's own: damage to its structure is refused before an engine runs.
    structural = choose(4) == 0
    fields = list(_set_fields(message if structural else message.mlProgram))
    if not structural:
        fields = [(owner, field) for owner, field in fields if field.message_type is None]
    if not fields:
        return
    owner, field = fields[choose(len(fields))]
    if field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated and choose(4):
        # A word of the same kind from elsewhere in the program: an op type, a name, a mode.
        words = sorted({getattr(o, f.name) for o, f in fields if f is field})
        setattr(owner, field.name, words[choose(len(words))])
        return
    value = getattr(owner, field.name)
    if _is_map(field):
        _damage_map(value, choose)
    elif field.is_repeated:
        _damage_repeated(value, field, choose)
    elif field.message_type is None:
        setattr(owner, field.name, _scalar(field, value, choose))
    else:
        owner.ClearField(field.name)


def _set_fields(message: Any) -> Iterator[tuple[Any, FieldDescriptor]]:
    """Every field set in ``message`` or below, with its message, in a fixed order."""
    for field, value in message.ListFields():
        yield message, field
        if field.message_type is None:
            continue
        if _is_map(field):
            if field.message_type.fields_by_name["value"].message_type is not None:
                for key in sorted(value):
                    yield from _set_fields(value[key])
        elif field.is_repeated:
            for item in value:
                yield from _set_fields(item)
        else:
            yield from _set_fields(value)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _damage_map(entries: Any, choose: Choose) -> None:
    keys = sorted(entries)
    key = keys[choose(len(keys))]
    other = (*keys, *_STRINGS)[choose(len(keys) + len(_STRINGS))]
    if hasattr(entries[key], "CopyFrom"):
        if choose(2) and other != key:
            entries[other].CopyFrom(entries[key])
    elif choose(2):
        entries[other] = entries[key]
    if choose(2):
        del entries[key]


def _damage_repeated(items: Any, field: FieldDescriptor, choose: Choose) -> None:
    index = choose(len(items))
    match choose(4):
        case 0:
            del items[index]
        case 1:
            items.append(items[index])
        case 2:
            items.insert(choose(len(items) + 1), items.pop(index))
        case _:
            if field.message_type is None:
                items[index] = _scalar(field, items[index], choose)
            else:
                items[index].CopyFrom(
                    type(items[index]).FromString(items[choose(len(items))].SerializeToString())
                )


def _scalar(field: FieldDescriptor, value: Any, choose: Choose) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, bytes):
        return value[: choose(len(value) + 1)] + bytes([choose(256)])
    if isinstance(value, str):
        return _STRINGS[choose(len(_STRINGS))]
    if isinstance(value, float):
        return _FLOATS[choose(len(_FLOATS))]
    if field.enum_type is not None:
        numbers = [member.number for member in field.enum_type.values]
        return (*numbers, 99)[choose(len(numbers) + 1)]
    chosen = _INTEGERS[choose(len(_INTEGERS))]
    if field.type not in _SIGNED:
        return chosen % (1 << (32 if field.type == FieldDescriptor.TYPE_UINT32 else 64))
    limit = 1 << (_SIGNED[field.type] - 1)
    return min(chosen, limit - 1) * (-1 if choose(3) == 0 else 1)
