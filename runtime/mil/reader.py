"""Read and check ML Programs: from the files of an mlpackage to a frozen ``Program``.

Constants are views of the weight file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from coreml_delegate.errors import BlobFormatError, ProgramError
from coreml_delegate.formats import fp32_constants
from coreml_delegate.formats.blob import Buffer
from coreml_delegate.formats.mlpackage import MAIN, MODEL_PATH, locate, map_package
from coreml_delegate.formats.weight_file import check_header, read_record
from coreml_delegate.patches import third_party
from coreml_delegate.runtime.mil import features
from coreml_delegate.runtime.mil.dtypes import DType, packed_nbytes
from coreml_delegate.runtime.mil.program import (
    Binding,
    Block,
    Classifier,
    Constant,
    DictType,
    Feature,
    Function,
    ListType,
    Literal,
    NamedType,
    Op,
    Packed,
    Program,
    Ref,
    StateType,
    TensorType,
    TupleType,
    ValueType,
)
from coreml_delegate.runtime.mil.validation import check_function, check_tensor_type

ML_PROGRAM = "mlProgram"
"""Name in ``Model.proto`` of the model type that engines run."""

# Types of Model.proto other than ML Program: names -> description, how to get an ML Program.
_OTHER_TYPES: Mapping[tuple[str, ...], tuple[str, str]] = {
    ("neuralNetwork", "neuralNetworkClassifier", "neuralNetworkRegressor"): (
        "a neural network of the format before ML Programs",
        "Convert the PyTorch or TensorFlow model that it was made of again, with "
        "coremltools.convert(..., convert_to='mlprogram'); nothing converts the file itself",
    ),
    ("pipeline", "pipelineClassifier", "pipelineRegressor"): (
        "several models that run one after the other",
        "run, verify, inspect, runtime.load_mlpackage and MLModel.predict take it; for all else, "
        "save its models as packages of their own",
    ),
    ("nonMaximumSuppression",): (
        "the model that suppresses boxes at the end of a detector",
        "run, inspect, runtime.load_mlpackage and MLModel.predict take it",
    ),
    ("treeEnsembleClassifier", "treeEnsembleRegressor"): (
        "decision trees",
        "Make a PyTorch module of the estimator (the package hummingbird-ml does), and convert it "
        "with coremltools.convert",
    ),
    (
        "glmClassifier",
        "glmRegressor",
        "supportVectorClassifier",
        "supportVectorRegressor",
        "kNearestNeighborsClassifier",
        "bayesianProbitRegressor",
        "itemSimilarityRecommender",
    ): (
        "an estimator of classical machine learning",
        "Write its formula as a PyTorch module, and convert it with coremltools.convert",
    ),
    ("textClassifier", "wordTagger", "gazetteer", "wordEmbedding"): (
        "a text model of Create ML, which only Apple's Natural Language framework runs",
        "Train a PyTorch model for the task, and convert it with coremltools.convert",
    ),
    ("visionFeaturePrint", "audioFeaturePrint", "soundAnalysisPreprocessing"): (
        "a model whose weights are part of Apple's systems",
        "Train a PyTorch model for the task, and convert it with coremltools.convert",
    ),
    (
        "oneHotEncoder",
        "imputer",
        "featureVectorizer",
        "dictVectorizer",
        "scaler",
        "categoricalMapping",
        "normalizer",
        "arrayFeatureExtractor",
        "identity",
    ): (
        "a step of preprocessing",
        "Make the step part of the PyTorch module, and convert it with coremltools.convert",
    ),
}

_MAX_DEPTH = 64  # nesting of blocks, types and values; coremltools' programs stay below ten
# Number in a weight file -> DType.
_STORED_DTYPES = {
    1: DType.FP16,
    2: DType.FP32,
    3: DType.UINT8,
    4: DType.INT8,
    5: DType.BF16,
    6: DType.INT16,
    7: DType.UINT16,
    8: DType.INT4,
    9: DType.UINT1,
    10: DType.UINT2,
    11: DType.UINT4,
    12: DType.UINT3,
    13: DType.UINT6,
    14: DType.INT32,
    15: DType.UINT32,
}


def read_files(files: Mapping[str, Buffer]) -> Program:
    """Read the program of an mlpackage from its files; constants are views of them.

    Raises:
        BlobFormatError: Any part is missing or malformed.
        ProgramError: The model is not an ML Program.
    """
    parts = locate(files)
    weights = {
        path: WeightFile(path, content)
        for path, content in parts.weights.items()
        if path.endswith(".bin")
    }
    return read_program(parts.spec, weights)


def read_mlpackage(path: Path | str) -> Program:
    """Read the program of an ``.mlpackage`` folder; the weights are mapped, not read.

    Raises:
        ProgramError: No such folder, or the model is not an ML Program.
        BlobFormatError: Any part is missing or malformed.
    """
    return read_files(map_package(Path(path)))


def read_program(spec: bytes | memoryview, weights: Mapping[str, WeightFile]) -> Program:
    """Parse a serialized ``Model``.

    The paths of weight files, such as ``weights/weight.bin``, are relative to the specification.

    Raises:
        BlobFormatError: The bytes do not parse, or are inconsistent.
        ProgramError: The model is not an ML Program.
    """
    model = parse_model(spec)
    kind = model.WhichOneof("Type")
    if kind != ML_PROGRAM:
        raise refusal("model", str(kind))
    reader = _Reader(weights)
    functions = {
        name: reader.function(name, model.mlProgram.functions[name], model.description)
        for name in sorted(model.mlProgram.functions)
    }
    if not functions:
        raise BlobFormatError("ML Program has no function")
    default = model.description.defaultFunctionName or MAIN
    if default not in functions:
        if model.description.defaultFunctionName or len(functions) > 1:
            raise BlobFormatError(
                "default function is not in the program", got=default, expected=", ".join(functions)
            )
        default = next(iter(functions))
    return Program(
        specification_version=model.specificationVersion,
        functions=functions,
        default_function=default,
        metadata=dict(sorted(model.description.metadata.userDefined.items())),
    )


def parse_model(spec: bytes | memoryview) -> Any:
    """Parse a serialized ``Model`` of any type.

    Raises:
        BlobFormatError: The bytes do not parse.
    """
    model = third_party.model_pb2().Model()
    try:
        model.ParseFromString(bytes(spec))
    except DecodeError as error:
        raise BlobFormatError("model specification does not parse", got=str(error)) from error
    return model


def refusal(what: str, kind: str) -> ProgramError:
    """Return the error for a model of another type, ``kind`` in ``Model.proto``."""
    family, remedy = next(
        (names for kinds, names in _OTHER_TYPES.items() if kind in kinds),
        ("another type", "Make the model of a PyTorch module, by coremltools.convert"),
    )
    return ProgramError(
        f"{what} is not an ML Program", got=f"{kind}, {family}", expected=ML_PROGRAM, remedy=remedy
    )


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A weight file in memory or mapped; every read is a view of it."""

    name: str
    buffer: memoryview

    def __post_init__(self) -> None:
        check_header(self.name, self.buffer)

    def read(self, offset: int, dtype: DType, count: int) -> NDArray[np.uint8]:
        """Return the stored bytes of the blob whose record is at byte ``offset``.

        ``dtype`` and ``count`` are the type and the number of elements that the program declares.

        Returns:
            [nbytes], uint8, a read-only view.

        Raises:
            BlobFormatError: The record or its data is outside the file, or differs from ``dtype``
                and ``count``.
        """
        where = f"weight file {self.name!r} at {offset}"
        record = read_record(self.name, self.buffer, offset)
        stored = _STORED_DTYPES.get(record.dtype)
        if stored is not dtype:
            raise BlobFormatError(
                f"{where}: wrong data type",
                got=stored.label if stored else str(record.dtype),
                expected=dtype.label,
            )
        nbytes = packed_nbytes(dtype, count)
        if record.size != nbytes or record.start + record.size > len(self.buffer):
            raise BlobFormatError(
                f"{where}: wrong size",
                got=f"{record.size} bytes at {record.start} of {len(self.buffer)}",
                expected=f"{nbytes} bytes",
            )
        data = np.frombuffer(self.buffer, dtype=np.uint8, count=record.size, offset=record.start)
        data.flags.writeable = False
        return data


class _Reader:
    def __init__(self, weights: Mapping[str, WeightFile]) -> None:
        self._weights = weights
        # Constants of weights, which functions share.
        self._stored: dict[tuple[str, int, TensorType], Constant] = {}

    def function(self, name: str, message: Any, description: Any) -> Function:
        if message.opset not in message.block_specializations:
            raise BlobFormatError(
                f"function {name!r} has no block of its opset",
                got=", ".join(sorted(message.block_specializations)) or "none",
                expected=message.opset,
            )
        params = tuple(self.named(p, 0) for p in message.inputs)
        block = self.block(message.block_specializations[message.opset], 0)
        block, classifier, probabilities = _split_classify(block)
        types = {p.name: p.type for p in params}
        for op in block.ops:
            types.update((o.name, o.type) for o in op.outputs)
        labelled = () if classifier is None else (classifier.label, classifier.probabilities)
        inputs, outputs, states = features.read_features(name, description, types, labelled)
        outputs = *probabilities, *outputs
        function = Function(
            name,
            message.opset,
            params,
            block,
            inputs,
            outputs,
            states,
            fp32_constants=fp32_constants.read(description.metadata.userDefined, name),
            classifier=classifier,
        )
        check_function(function)
        return function

    def block(self, message: Any, depth: int) -> Block:
        _check_depth(depth)
        return Block(
            inputs=tuple(self.named(i, depth) for i in message.inputs),
            ops=tuple(self.op(o, depth) for o in message.operations),
            outputs=tuple(message.outputs),
        )

    def op(self, message: Any, depth: int) -> Op:
        return Op(
            type=message.type,
            inputs={k: self.bindings(message.inputs[k]) for k in sorted(message.inputs)},
            outputs=tuple(self.named(o, depth) for o in message.outputs),
            blocks=tuple(self.block(b, depth + 1) for b in message.blocks),
            attributes={
                k: self.constant(message.attributes[k], 0) for k in sorted(message.attributes)
            },
        )

    def bindings(self, argument: Any) -> tuple[Binding, ...]:
        bound: list[Binding] = []
        for binding in argument.arguments:
            kind = binding.WhichOneof("binding")
            if kind == "name":
                bound.append(Ref(binding.name))
            elif kind == "value":
                bound.append(self.constant(binding.value, 0))
            else:
                raise BlobFormatError("argument binds neither a name nor a value")
        return tuple(bound)

    def named(self, message: Any, depth: int) -> NamedType:
        return NamedType(message.name, _value_type(message.type, depth))

    def constant(self, message: Any, depth: int) -> Constant:
        _check_depth(depth)
        declared = _value_type(message.type, depth)
        kind = message.WhichOneof("value")
        if kind == "blobFileValue":
            return self.stored(declared, message.blobFileValue)
        if kind != "immediateValue":
            raise BlobFormatError("value is neither immediate nor in a file")
        immediate = message.immediateValue
        if isinstance(declared, TensorType):
            return _immediate_tensor(declared, immediate.tensor)
        data: Literal
        if isinstance(declared, DictType):
            if not isinstance(declared.key, TensorType) or declared.key.shape != ():
                raise BlobFormatError("dictionary has keys that are no scalars", got=str(declared))
            pairs = immediate.dictionary.values
            data = {
                _hashable(self.constant(p.key, depth + 1).data): self.constant(
                    p.value, depth + 1
                ).data
                for p in pairs
            }
        else:
            values = immediate.list if isinstance(declared, ListType) else immediate.tuple
            data = tuple(self.constant(v, depth + 1).data for v in values.values)
        return Constant(declared, data)

    def stored(self, declared: ValueType, value: Any) -> Constant:
        if not isinstance(declared, TensorType):
            raise BlobFormatError("only tensors can lie in a weight file", got=str(declared))
        name = value.fileName.removeprefix(MODEL_PATH)
        if name not in self._weights:
            raise BlobFormatError(
                "weight file is missing",
                got=value.fileName,
                expected=", ".join(self._weights) or "no weight file at all",
            )
        key = name, int(value.offset), declared
        if key not in self._stored:
            shape, count = _static(declared)
            raw = self._weights[name].read(value.offset, declared.dtype, count)
            self._stored[key] = _from_bytes(declared, shape, raw, offset=value.offset)
        return self._stored[key]


def _split_classify(block: Block) -> tuple[Block, Classifier | None, tuple[Feature, ...]]:
    """Remove the op ``classify``, which ends a classifier; its probabilities become an output.

    Engines compute tensors; labels are looked up afterwards.

    Returns:
        The block, the labels, and the output with the probabilities.

    Raises:
        BlobFormatError: The op is malformed, or its labels and probabilities differ in number.
    """
    if not block.ops or block.ops[-1].type != "classify":
        return block, None, ()
    last = block.ops[-1]
    types = {output.name: output.type for op in block.ops for output in op.outputs}
    match last.inputs.get("probabilities", ()), last.inputs.get("classes", ()), last.outputs:
        case (Ref(name),), (Constant(ListType(), tuple(labels)),), (label, probabilities):
            computed = types.get(name)
        case _:
            raise BlobFormatError(
                "op 'classify' is malformed", expected="probabilities, a list of labels"
            )
    if not isinstance(computed, TensorType):
        raise BlobFormatError("op 'classify' has no computed probabilities", got=repr(name))
    sizes = computed.shape or (None,)
    if None not in sizes and math.prod(size or 0 for size in sizes) != len(labels):
        raise BlobFormatError(
            "op 'classify' has other labels than probabilities",
            got=f"{len(labels)} labels",
            expected=f"one for each element of {computed}",
        )
    outputs = [o for o in block.outputs if o not in (label.name, probabilities.name)]
    ops = block.ops[:-1]
    if name in outputs:
        passed_on = NamedType(probabilities.name, computed)
        ops = *ops, Op("identity", {"x": (Ref(name),)}, (passed_on,))
    else:
        ops = tuple(_rename(op, name, probabilities.name) for op in ops)
    return (
        Block(block.inputs, ops, (probabilities.name, *outputs)),
        Classifier(label.name, probabilities.name, tuple(_label(value) for value in labels)),
        (Feature(probabilities.name, computed),),
    )


def _rename(op: Op, old: str, new: str) -> Op:
    """Return an op with value ``old`` renamed to ``new``, also in nested blocks."""

    def renamed(name: str) -> str:
        return new if name == old else name

    return replace(
        op,
        inputs={
            key: tuple(Ref(renamed(b.name)) if isinstance(b, Ref) else b for b in bindings)
            for key, bindings in op.inputs.items()
        },
        outputs=tuple(replace(output, name=renamed(output.name)) for output in op.outputs),
        blocks=tuple(
            replace(
                block,
                ops=tuple(_rename(inner, old, new) for inner in block.ops),
                outputs=tuple(map(renamed, block.outputs)),
            )
            for block in op.blocks
        ),
    )


def _label(value: Literal) -> str | int:
    label = _hashable(value)
    if not isinstance(label, str | int):
        raise BlobFormatError("a class label is neither text nor integer", got=repr(label))
    return label


def _value_type(message: Any, depth: int) -> ValueType:
    _check_depth(depth)
    kind = message.WhichOneof("type")
    if kind == "tensorType":
        return _tensor_type(message.tensorType)
    if kind == "listType":
        length = message.listType.length
        size = length.constant.size if length.WhichOneof("dimension") == "constant" else None
        return ListType(_value_type(message.listType.type, depth + 1), size)
    if kind == "tupleType":
        return TupleType(tuple(_value_type(t, depth + 1) for t in message.tupleType.types))
    if kind == "dictionaryType":
        return DictType(
            _value_type(message.dictionaryType.keyType, depth + 1),
            _value_type(message.dictionaryType.valueType, depth + 1),
        )
    if kind == "stateType":
        wrapped = _value_type(message.stateType.wrappedType, depth + 1)
        if isinstance(wrapped, TensorType):
            return StateType(wrapped)
    raise BlobFormatError("unknown MIL value type", got=str(kind))


def _tensor_type(message: Any) -> TensorType:
    if message.rank < 0:
        return TensorType(DType.from_number(message.dataType), None)
    if message.rank != len(message.dimensions):
        raise BlobFormatError(
            "tensor type is inconsistent",
            got=f"{len(message.dimensions)} dimensions",
            expected=f"rank {message.rank}",
        )
    dims: list[int | None] = []
    for dim in message.dimensions:
        if dim.WhichOneof("dimension") == "constant":
            dims.append(dim.constant.size)
        elif dim.unknown.variadic:
            return TensorType(DType.from_number(message.dataType), None)
        else:
            dims.append(None)
    declared = TensorType(DType.from_number(message.dataType), tuple(dims))
    check_tensor_type(declared)
    return declared


def _static(declared: TensorType) -> tuple[tuple[int, ...], int]:
    if declared.shape is None or any(d is None for d in declared.shape):
        raise BlobFormatError("constant has a dynamic shape", got=str(declared))
    shape = tuple(d for d in declared.shape if d is not None)
    return shape, math.prod(shape)


def _immediate_tensor(declared: TensorType, tensor: Any) -> Constant:
    shape, count = _static(declared)
    field = tensor.WhichOneof("value")
    if declared.dtype is DType.STRING:
        return _immediate_string(declared, shape, tensor.strings.values)
    if field is None:
        values: Any = []
    elif field == "bytes":
        raw = np.frombuffer(tensor.bytes.values, dtype=np.uint8)
        if len(raw) != packed_nbytes(declared.dtype, count):
            raise _wrong_count(declared, f"{len(raw)} bytes")
        return _from_bytes(declared, shape, raw, offset=None)
    else:
        values = getattr(tensor, field).values
    if len(values) != count:
        raise _wrong_count(declared, f"{len(values)} values")
    try:
        array = np.fromiter(values, dtype=declared.dtype.numpy, count=count).reshape(shape)
    except (OverflowError, ValueError, TypeError) as error:
        raise BlobFormatError("constant does not fit its type", got=str(declared)) from error
    array.flags.writeable = False
    return Constant(declared, array)


def _immediate_string(declared: TensorType, shape: tuple[int, ...], values: Any) -> Constant:
    if shape != () or len(values) != 1:
        if len(values) != math.prod(shape):
            raise _wrong_count(declared, f"{len(values)} strings")
        return Constant(declared, tuple(str(v) for v in values))
    return Constant(declared, str(values[0]))


def _from_bytes(
    declared: TensorType, shape: tuple[int, ...], raw: NDArray[np.uint8], *, offset: int | None
) -> Constant:
    if declared.dtype.is_packed:
        return Constant(declared, Packed(raw, declared.dtype, shape), offset)
    if declared.dtype is DType.BOOL and raw.size and raw.max() > 1:
        raise BlobFormatError("boolean constant holds other bytes than 0 and 1")
    data = raw.view(declared.dtype.numpy).reshape(shape)
    if not data.flags.aligned:
        # A blob may have a weight file at any offset, but kernels need aligned elements.
        data = data.copy()
        data.flags.writeable = False
    return Constant(declared, data, offset=offset)


def _wrong_count(declared: TensorType, got: str) -> BlobFormatError:
    return BlobFormatError(
        "constant has the wrong number of values", got=got, expected=str(declared)
    )


def _hashable(key: Literal) -> Literal:
    return key.item() if isinstance(key, np.ndarray) else key


def _check_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise BlobFormatError(
            "program is nested too deeply", expected=f"at most {_MAX_DEPTH} levels"
        )
