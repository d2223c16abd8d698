"""Calls of compiled models without Python, for hosts that pass addresses.

OpenVINO's Python package adds 10 to 20 us to a call, as long as a small model takes. Its C library
does not. A compiled model is exported, and the C library imports the export: worthwhile for small
models, where the overhead dominates, and where there is no Python.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import openvino as ov

from coreml_delegate.errors import EngineUnavailableError
from coreml_delegate.runtime import native
from coreml_delegate.runtime.cpp_libraries import CppLibrary
from coreml_delegate.runtime.engines.openvino.plugin import DEVICE
from coreml_delegate.runtime.native import (
    InputLimits,
    NativeCall,
    NativeInterface,
    NativeModel,
    NativeProgram,
    NativeState,
)

_logger = logging.getLogger(__name__)

_PACKAGE: Final = "coreml_delegate.runtime.engines.openvino.session"
_SOURCE: Final = "native_calls.cpp"
_ERROR_BYTES: Final = 1024
_MACHINE_BYTES: Final = 4096
# Stands for a size that is not fixed, and for an absent limit or dimension.
_OPEN: Final = -1
_LARGEST: Final = 1 << 62

# Codes of element types in OpenVINO's C library (ov_common.h), for tensors at a model's boundary.
_TYPES: Final[Mapping[str, int]] = {
    "boolean": 1,
    "f16": 3,
    "f32": 4,
    "f64": 5,
    "i8": 7,
    "i16": 8,
    "i32": 9,
    "i64": 10,
    "u8": 16,
}


class OpenVinoNativeFunction:
    """A function that can be called without Python; models may be added.

    Raises:
        EngineUnavailableError: The library cannot be built or loaded, or refuses the function.
    """

    def __init__(self, program: NativeProgram) -> None:
        library, reason = _library()
        if reason is not None:
            raise EngineUnavailableError("native calls are impossible", got=reason)
        pairs = [text.encode() for pair in program.config for text in pair]
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._library = library
        self._function = library.coreml_native_create(
            *_array(program.words),
            program.device.encode(),
            (ctypes.c_char_p * len(pairs))(*pairs),
            len(program.config),
            error,
            len(error),
        )
        if not self._function:
            raise _refused(error)
        self._contents: list[bytes] = []
        _release_with(self, _free, library, self._function, self._contents)
        for model in program.models:
            self.add(model)

    @property
    def model_count(self) -> int:
        """The number of models."""
        return len(self._contents)

    def add(self, model: NativeModel) -> None:
        """Add a model, for the input shapes that it takes.

        Raises:
            EngineUnavailableError: OpenVINO refuses the model.
        """
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        content = model.content
        if not self._library.coreml_native_add(
            self._function, *_array(model.words), content, len(content), error, len(error)
        ):
            raise _refused(error)
        self._contents.append(content)

    def bind(self, state: NativeState | None) -> NativeCall:
        """Return a call of the function with these states, which must live as long as the call."""
        library = self._library
        model = library.coreml_native_bind(
            self._function, None if state is None else ctypes.byref(state)
        )
        if not model:
            raise MemoryError
        run = ctypes.cast(library.coreml_native_run, ctypes.c_void_p).value or 0
        call = NativeCall(run, model)
        _release_with(call, _unbind, library, model, self, state)
        return call


def load_natively(program: NativeProgram) -> OpenVinoNativeFunction | None:
    """Return a function that is called without Python; None if the library refuses it."""
    try:
        return OpenVinoNativeFunction(program)
    except EngineUnavailableError as error:
        _logger.debug("no native calls: %s", error)
        return None


def native_obstacle(compiled: Any) -> str | None:
    """Return the reason why a compiled model cannot be called without Python, or None."""
    ports = [*compiled.inputs, *compiled.outputs]
    if any(port.get_partial_shape().rank.is_dynamic for port in ports):
        return "the ranks of its tensors are not fixed"
    types = {port.get_element_type().get_type_name() for port in ports}
    if not types <= _TYPES.keys():
        return f"tensors of {', '.join(sorted(types - _TYPES.keys()))} cross its boundary"
    return _library()[1]


def describe_function(
    config: Mapping[str, object], interface: NativeInterface, models: Iterable[NativeModel]
) -> NativeProgram:
    """Return the native form of a function.

    ``config`` has the properties that the models were compiled with: one model for each set of
    input shapes.
    """
    words = [len(interface.limits)]
    for limits in interface.limits:
        words += _limit_words(limits)
    pairs = tuple((name, str(value)) for name, value in config.items())
    return NativeProgram(
        _describe_machine(_library()[0]), DEVICE, pairs, tuple(words), tuple(models)
    )


def describe_model(
    compiled: Any,
    inputs: Sequence[int],
    outputs: Sequence[int],
    passed_on: Iterable[int],
    states: Sequence[int],
    writes: Sequence[tuple[int, ...] | None],
) -> NativeModel:
    """Return the native form of a compiled model.

    Args:
        compiled: ``openvino.CompiledModel``.
        inputs: Indices of the model's inputs, in the order in which calls pass them.
        outputs: Indices of the model's outputs, in the order in which calls pass them.
        passed_on: Outputs that return an input unchanged, whose memory must not be bound.
        states: Indices of the inputs that are states.
        writes: How each state is written, by the outputs after ``outputs``.
    """
    unbound = frozenset(passed_on)
    has_one_thread = int(compiled.get_property("INFERENCE_NUM_THREADS")) == 1
    words = [int(has_one_thread), len(inputs)]
    for index in inputs:
        words += _port_words(compiled.inputs[index], index)
    words.append(len(outputs))
    for index in outputs:
        words += _port_words(compiled.outputs[index], index, is_copied=index in unbound)
    words.append(len(states))
    output = len(outputs)
    for index, axes in zip(states, writes, strict=True):
        words += _port_words(compiled.inputs[index], index)
        if axes is None:
            words += [0, output]
            output += 1
            continue
        words += [1, len(axes)]
        for axis in axes:
            words += [axis, output, output + 1]
            output += 2
    return NativeModel(tuple(words), compiled.export_model().getvalue())


def _describe_machine(library: Any) -> str:
    text = ctypes.create_string_buffer(_MACHINE_BYTES)
    if not library.coreml_native_machine(DEVICE.encode(), text, len(text)):
        raise EngineUnavailableError("OpenVINO's C library does not describe the machine")
    return text.value.decode()


def _limit_words(limits: InputLimits) -> Iterator[int]:
    yield int(limits is None)
    yield len(limits or ())
    for limit in limits or ():
        # A program may declare any bound; no tensor has a larger size.
        yield min(limit.low, _LARGEST)
        yield _OPEN if limit.high is None else min(limit.high, _LARGEST)
        yield from limit.same_as or (_OPEN, _OPEN)


def _port_words(port: Any, index: int, *, is_copied: bool = False) -> Iterator[int]:
    shape = port.get_partial_shape()
    yield index
    yield _TYPES[port.get_element_type().get_type_name()]
    yield int(is_copied or shape.is_dynamic)
    yield len(shape)
    for size in shape:
        yield size.get_length() if size.is_static else _OPEN


def _array(words: Sequence[int]) -> tuple[Any, int]:
    return (ctypes.c_int64 * len(words))(*words), len(words)


def _refused(error: Any) -> EngineUnavailableError:
    return EngineUnavailableError(
        "OpenVINO's C library refuses the function", got=error.value.decode(errors="replace")
    )


def _release_with(owner: object, release: Callable[..., None], *arguments: Any) -> None:
    """Call ``release`` after ``owner`` is freed; not at process exit, where calls may still run."""
    weakref.finalize(owner, release, *arguments).atexit = False


def _free(library: Any, function: int, _: list[bytes]) -> None:
    """Free a function; the third argument is the memory of its constants, alive until then."""
    library.coreml_native_free(function)


def _unbind(library: Any, model: int, *_: object) -> None:
    """Free a bound model; the last arguments are the function and its states, alive until then."""
    library.coreml_native_unbind(model)


@functools.cache
def _library() -> tuple[Any, str | None]:
    """Return the library and None, or None and the reason why it cannot be built or loaded."""
    try:
        return _load(), None
    except (EngineUnavailableError, OSError, AttributeError) as error:
        return None, str(error)


def _load() -> Any:
    root = Path(ov.__file__).parent
    libraries = sorted((root / "libs").glob("libopenvino_c.so*"))
    if sys.platform != "linux" or not libraries:
        raise EngineUnavailableError(f"the openvino package for {sys.platform} has no C library")
    folder = importlib.resources.files(_PACKAGE)
    source = CppLibrary(
        name="native_calls",
        folder="native-calls",
        source=folder.joinpath(_SOURCE).read_bytes(),
        headers={native.HEADER: native.header()},
        flags=(f"-I{root / 'include'}",),
        libraries=(str(libraries[0]),),
        depends_on=(ov.get_version(), libraries[0].stat().st_size),
    )
    reason = source.unavailable_reason()
    if reason is not None:
        raise EngineUnavailableError("native calls cannot be built", got=reason)
    path = source.build()
    ctypes.CDLL(str(libraries[0]))  # the library needs it by name, and finds the loaded one
    library = ctypes.CDLL(str(path))
    if library.coreml_native_version() != native.VERSION:
        raise EngineUnavailableError("native calls are of another version", got=str(path))
    words = ctypes.POINTER(ctypes.c_int64), ctypes.c_uint64
    message = ctypes.c_char_p, ctypes.c_uint64
    text, pointer = ctypes.c_char_p, ctypes.c_void_p
    library.coreml_native_create.restype = pointer
    library.coreml_native_create.argtypes = (
        *(*words, text, ctypes.POINTER(text), ctypes.c_uint64, *message),
    )
    library.coreml_native_add.argtypes = (pointer, *words, text, ctypes.c_uint64, *message)
    library.coreml_native_machine.argtypes = (text, *message)
    library.coreml_native_bind.restype = pointer
    library.coreml_native_bind.argtypes = (pointer, ctypes.POINTER(NativeState))
    for release in (library.coreml_native_free, library.coreml_native_unbind):
        release.restype, release.argtypes = None, (pointer,)
    _describe_machine(library)  # fails here rather than in a later call
    return library
