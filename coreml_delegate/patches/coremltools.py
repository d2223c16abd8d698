"""Patches and private interfaces of coremltools.

Some graph passes of coremltools 9.0 change the results of a program without a warning; others take
much time or memory. ``WORKAROUNDS`` and ``faster()`` hold while we convert.
"""

from __future__ import annotations

import copy
import math
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from coreml_delegate.patches import Patch

_MIL = "coremltools.converters.mil.mil"
_BUILDER = f"{_MIL}:Builder"
_PASSES = f"{_MIL}.passes.defs"
_TORCH = "coremltools.converters.mil.frontend.torch"
_QUANTIZATION_PASSES = "coremltools.optimize.coreml._quantization_passes"

# Ops that the pass over transposes takes for unary; it would not transpose their other operands.
_WITH_OPERANDS = frozenset({"pow", "softplus_parametric"})
_EVALUATED_WRONGLY = frozenset({"argsort", "scatter_along_axis", "topk"})

_FP16_TOLERANCE = 1e-3  # relative error of an inverse
INFINITE_FROM = 1e38
"""Coremltools takes constants from this magnitude on for infinity; smaller constants use fp32."""

_CHUNK = 2**20  # elements of a constant that are examined at once


def _patch(
    target: str, replacement: Callable[..., Any], reason: str, issue: int | None = None
) -> Patch:
    """Return a row of ``module:function`` or ``module:Class.method``."""
    owner, _, name = target.rpartition("." if "." in target.rpartition(":")[2] else ":")
    address = None if issue is None else f"https://github.com/apple/coremltools/issues/{issue}"
    import_owner = partial(pkgutil.resolve_name, owner)
    return Patch(import_owner, name, replacement, reason, address, "coremltools", ("9.0",))


def _instead(replacement: Any, _: Any) -> Any:
    return replacement


# Wrong results


def _fuse_difference(fuse: Callable[..., bool]) -> Callable[..., bool]:
    def try_to_transform(conv: Any, total: Any) -> bool:
        if total.outputs[0].shape != conv.outputs[0].shape:
            return False
        if total.op_type == "sub" and isinstance(total.y.val, np.ndarray):
            mb = pkgutil.resolve_name(_BUILDER)
            block, (difference,) = total.enclosing_block, total.outputs
            addition = mb.add(x=total.x, y=-total.y.val, before_op=total, name=difference.name)
            is_replaced = block.try_replace_uses_of_var_after_op(
                anchor_op=total, old_var=difference, new_var=addition
            )
            block.remove_ops([total if is_replaced else addition.op])
            return is_replaced and fuse(conv, addition.op)
        return fuse(conv, total)

    return try_to_transform


def _fuse_divisor(fuse: Callable[..., bool]) -> Callable[..., bool]:
    def is_dividend(scale: Any) -> bool:
        return scale.op_type == "real_div" and scale.x.val is not None

    return lambda conv, scale: not is_dividend(scale) and fuse(conv, scale)


def _fuse_channels(fuse: Callable[..., bool]) -> Callable[..., bool]:
    def try_to_transform(product: Any, total: Any, block: Any) -> bool:
        x = product.x if product.x.val is None else product.y
        return total.outputs[0].shape == x.shape and fuse(product, total, block)

    return try_to_transform


def _fuse_to_magnitude(first: Any, second: Any, block: Any) -> bool:
    """Replace ``sqrt(pow(x, 2))`` by ``abs(x)``; leave ``pow(sqrt(x), 2)``."""
    x, result = first.x, second.outputs[0]
    if first.op_type != "pow" or x.shape != result.shape:
        return False
    mb = pkgutil.resolve_name(_BUILDER)
    magnitude = mb.abs(x=x, name=result.name, before_op=first)
    block.replace_uses_of_var_after_op(anchor_op=second, old_var=result, new_var=magnitude)
    block.remove_ops([first, second])
    return True


def _crosses_blocks(var: Any, reader: Any) -> bool:
    """Whether a reader is in a block inside the variable's; casts are fused across blocks well."""
    if var.op is None or reader.op_type == "cast":
        return False
    return var.op.enclosing_block is not reader.enclosing_block


def _add_reader_twice(add: Callable[..., None]) -> Callable[..., None]:
    def add_child_op(self: Any, new_op: Any) -> None:
        for _ in range(2 if _crosses_blocks(self, new_op) else 1):
            add(self, new_op)

    return add_child_op


def _remove_both_readers(remove: Callable[..., None]) -> Callable[..., None]:
    def remove_child_op(self: Any, target_op: Any, no_check: bool = False) -> None:
        if _crosses_blocks(self, target_op):
            remove(self, target_op, True)
            no_check = True
        remove(self, target_op, no_check)

    return remove_child_op


def _flatten_as_counted(flatten: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def get_flattened_inputs(self: Any) -> list[Any]:
        inputs = flatten(self)
        return inputs + [var for var in inputs if _crosses_blocks(var, self)]

    return get_flattened_inputs


def _is_mean(total: Any) -> bool:
    """Return whether the only user of a sum computes its mean."""
    result = total.outputs[0]
    if len(result.child_ops) != 1 or total.axes is None or total.axes.val is None:
        return False
    (user,) = result.child_ops
    if user.op_type not in ("mul", "real_div") or user.outputs[0].shape != result.shape:
        return False
    other = (user.y if user.x is result else user.x).val
    if other is None or np.size(other) != 1:
        return False
    from coremltools.converters.mil.mil.types.symbolic import is_symbolic

    reduced_sizes = [total.x.shape[axis] for axis in total.axes.val]
    if any(is_symbolic(size) for size in reduced_sizes):
        return False
    factor = np.asarray(other, np.float64).item()
    count = float(math.prod(reduced_sizes))
    ratio = factor * count if user.op_type == "mul" else factor / count
    return abs(ratio - 1) < _FP16_TOLERANCE


def _find_added_bias(find: Callable[..., Any]) -> Callable[..., Any]:
    def find_candidate(product: Any) -> Any:
        addition = find(product)
        if addition is None or product.x.val is not None:
            return None
        is_subtracted = addition.op_type == "sub" and addition.x.val is not None
        return None if is_subtracted else addition

    return find_candidate


def _visit_operands(visit: Callable[..., None]) -> Callable[..., None]:
    reduction = pkgutil.resolve_name(f"{_PASSES}.optimize_repeat_ops:_TransformReduceMean")

    def visit_op(self: Any, op: Any) -> None:
        operands = [v for k, v in op.inputs.items() if k != "x"]
        depends = op.op_type in _WITH_OPERANDS and any(
            v.val is None or v.rank > 0 for v in operands
        )
        is_reduction = self._AXIS_UPDATE_OPS.get(op.op_type) is reduction
        if depends or (is_reduction and "axes" not in op.inputs):
            self._visit_materialize_op(op)
        else:
            visit(self, op)

    return visit_op


def _move_updates(move: Callable[..., None]) -> Callable[..., None]:
    def move_updates(self: Any, op: Any, block: Any, _: Any) -> None:
        if self._try_find_child_coreml_update_state_ops(op):
            move(self, op, block, list(block.operations))

    return move_updates


def _dequantize_unsigned(dequantize: Callable[..., Any]) -> Callable[..., Any]:
    def constexpr_affine_dequantize(quantized_data: Any, zero_point: Any, **keywords: Any) -> Any:
        data, zero = _as_unsigned(quantized_data), _as_unsigned(zero_point)
        return dequantize(quantized_data=data, zero_point=zero, **keywords)

    return constexpr_affine_dequantize


def _as_unsigned(value: Any) -> Any:
    """Return int8 as uint8, plus 128; other values unchanged."""
    array = np.asarray(getattr(value, "val", value))
    return (array.view(np.uint8) ^ np.uint8(128))[()] if array.dtype == np.int8 else value


def _evaluate_typed(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    def auto_val(self: Any, output_types: Any) -> Any:
        if self.op_type in _EVALUATED_WRONGLY:
            return (None,) * len(output_types)
        infer = self.value_inference
        self.value_inference = lambda: _typed_values(infer(), output_types)
        try:
            return evaluate(self, output_types)
        finally:
            del self.value_inference

    return auto_val


def _typed_values(values: Any, output_types: Any) -> list[Any]:
    """Return an op's results: numbers in the result's type, arrays row-major."""
    listed = values if isinstance(values, tuple | list) else (values,)
    return [_typed_value(*pair) for pair in zip(listed, output_types, strict=False)]


def _typed_value(value: Any, kind: Any) -> Any:
    from coremltools.converters.mil.mil.types import is_float, is_int, nptype_from_builtin

    if isinstance(value, int | float | np.number | np.ndarray) and (is_float(kind) or is_int(kind)):
        return np.asarray(value).astype(nptype_from_builtin(kind))[()]
    return np.asarray(value, order="C") if isinstance(value, np.ndarray) else value


WORKAROUNDS = (
    _patch(
        f"{_PASSES}.optimize_conv:fuse_conv_bias._try_to_transform",
        _fuse_difference,
        "It negates the constant subtracted from a convolution in place, in the lowered model, and"
        " takes summands with more channels than the convolution for a bias.",
    ),
    _patch(
        f"{_PASSES}.optimize_conv:fuse_conv_scale._try_to_transform",
        _fuse_divisor,
        "It takes a constant divided by a convolution for the divisor.",
        2776,
    ),
    _patch(
        f"{_PASSES}.optimize_elementwise_binary:fuse_elementwise_to_batchnorm._try_to_transform",
        _fuse_channels,
        "It makes a batch norm of a product and a sum that repeat the only channel of an image.",
    ),
    _patch(
        "coremltools.converters.mil.backend.mil.passes.fuse_pow2_sqrt:_try_to_transform",
        partial(_instead, _fuse_to_magnitude),
        "It takes the root of a square for the number itself, which may be negative, and the square"
        " of a root of a negative number for the number.",
    ),
    *(
        _patch(
            f"{_MIL}:{name}",
            replacement,
            "Passes fuse an op of a loop or branch with the only op before it, outside, and fail. A"
            " reader in another block counts as two, as that of ``x * x`` does.",
        )
        for name, replacement in (
            ("Var.add_child_op", _add_reader_twice),
            ("Var.remove_child_op", _remove_both_readers),
            ("Operation.get_flattened_inputs", _flatten_as_counted),
        )
    ),
    _patch(
        f"{_PASSES}.cleanup:fuse_reduce_mean._try_to_transform",
        lambda fuse: lambda total, block: _is_mean(total) and fuse(total, block),
        "It turns a sum into a mean if its factor is within 1e-6 of the inverse of the count, or"
        " has more dimensions.",
        2792,
    ),
    _patch(
        f"{_PASSES}.optimize_linear:fuse_matmul_weight_bias._find_candidate_op",
        _find_added_bias,
        "It makes linear layers of differences in either operand order, and of products with the"
        " constant first, whose bias is along the wrong dimension.",
        2801,
    ),
    _patch(
        f"{_PASSES}.optimize_repeat_ops:_TransposeOptimization._visit_op",
        _visit_operands,
        "It moves a transpose past pow without its exponents, and fails at a reduction over all"
        " dimensions, without axes.",
        2784,
    ),
    _patch(
        f"{_PASSES}.optimize_state:canonicalize_inplace_pattern._try_match_and_transform_pattern",
        _move_updates,
        "It fails on two states whose new values come one after the other: it inserts an op before"
        " one that it has removed.",
    ),
    _patch(
        f"{_BUILDER}.constexpr_affine_dequantize",
        _dequantize_unsigned,
        "Below iOS18, GPU and neural engine dequantize int8 weights wrongly: they and their zero"
        " points are stored as uint8, plus 128.",
        2675,
    ),
    _patch(
        f"{_MIL}:Operation._auto_val",
        _evaluate_typed,
        "A function of a constant scalar becomes a number without element type, a flipped constant"
        " a view that cannot be cast; scatter_along_axis of constants becomes an update for any"
        " mode, and topk and argsort order equal elements at random and take the smallest integer"
        " for the largest: these three are not evaluated.",
        2802,
    ),
)
"""Errors of graph passes and builders."""


def _transform_and_restore(transform: Callable[..., None]) -> Callable[..., None]:
    def transform_op(self: Any, op: Any) -> None:
        weight = op.outputs[0].val
        original = weight.copy()
        transform(self, op)
        if op.enclosing_block is not None:  # otherwise a palettized weight has replaced it
            weight[...] = original

    return transform_op


def _scale_table(scale_weight: Callable[..., Any]) -> Callable[..., Any]:
    def constexpr_blockwise_shift_scale(data: Any, scale: Any, **keywords: Any) -> Any:
        lookup = data.op
        if lookup.op_type != "constexpr_lut_to_dense":
            return scale_weight(data=data, scale=scale, **keywords)
        del keywords["offset"]
        scaled = pkgutil.resolve_name(_BUILDER).constexpr_lut_to_dense(
            indices=lookup.indices,
            lut=lookup.lut.val * scale[..., None, None],  # axes of entries and of their elements
            vector_axis=lookup.vector_axis,
            **keywords,
        )
        lookup.enclosing_block.remove_ops([lookup])
        return scaled

    return constexpr_blockwise_shift_scale


PALETTES_WITH_SCALES = (
    _patch(
        f"{_QUANTIZATION_PASSES}:palettize_weights.transform_op",
        _transform_and_restore,
        "With a scale per channel, it divides a weight in place before it finds that the groups do"
        " not fit: the weight is restored.",
        2777,
    ),
    _patch(
        f"{_BUILDER}.constexpr_blockwise_shift_scale",
        _scale_table,
        "macOS 26 does not load the scaling of looked-up values for the neural engine: the table is"
        " scaled, which gives the same numbers.",
        2688,
    ),
)
"""Errors of palettization with a scale per channel."""


# Precision


OVERFLOW_CHECK = _patch(
    f"{_PASSES}.quantization:FP16ComputePrecision.fp16_overflow",
    _instead,
    "It takes several times the memory of each constant. The state is a function of the op.",
)


_Selector = Callable[[Any], bool]


def _around_cast(
    steps: tuple[Callable[[Any, _Selector], _Selector], Callable[[Any], None]],
    cast: Callable[..., None],
) -> Callable[..., None]:
    before, after = steps
    fp16 = pkgutil.resolve_name(f"{_PASSES}.quantization:FP16ComputePrecision")

    def apply(self: Any, program: Any) -> None:
        if not isinstance(self, fp16):
            cast(self, program)
            return
        caster = copy.copy(self)  # the registered pass serves all conversions
        caster.op_selector = before(program, self.op_selector or (lambda _: True))
        cast(caster, program)
        after(program)

    return apply


AROUND_FP16_CAST = _patch(
    f"{_PASSES}.quantization:AbstractQuantizationPass.apply",
    _around_cast,
    "Rewrites for fp16 need to know which ops are cast; casts of constants, which a later pass"
    " folds, show which constants fp16 loses. The state is a pair: a function of program and"
    " selector of ops, which returns a selector, and a function of the program with casts.",
)


def _guard_others(handles: frozenset[int], guard: Callable[..., None]) -> Callable[..., Any]:
    source = pkgutil.resolve_name(f"{_MIL}.scope:ScopeSource").EXIR_DEBUG_HANDLE
    return lambda op, block: not handles & set(op.scopes.get(source) or ()) and guard(op, block)


GUARD_INDICES = _patch(
    f"{_PASSES}.optimize_tensor_operation:guard_negative_gather_indices"
    "._try_match_and_transform_pattern",
    _guard_others,
    "From iOS17 on each lookup gets ops that make negative indices positive, which the neural"
    " engine does not run. The state has the handles of the lookups that stay without them.",
)


def _before_names(step: Callable[[Any], None], apply: Callable[..., None]) -> Callable[..., None]:
    def apply_to_names(self: Any, program: Any) -> None:
        step(program)
        apply(self, program)

    return apply_to_names


BEFORE_NAMES = _patch(
    "coremltools.converters.mil.backend.mil.passes.sanitize_name_strings:sanitize_name_strings.apply",
    _before_names,
    "Other passes would undo rewrites for a device. The state is a function of the program.",
)


# Time and memory


def _validate_ends(validate: Callable[..., None]) -> Callable[..., None]:
    def validate_program(program: Any, check_essential_scope: bool | None = None) -> None:
        # Passes that need no check pass False.
        if check_essential_scope is not False:
            validate(program, bool(check_essential_scope))

    return validate_program


def _record_compressed(
    compressed: list[bool], is_compressed: Callable[..., bool]
) -> Callable[..., bool]:
    def is_nonreplaceable_var(var: Any) -> bool:
        if answer := is_compressed(var):
            compressed[:] = [True]
        return answer

    return is_nonreplaceable_var


def _trace_if_any(compressed: list[bool], trace: Callable[..., None]) -> Callable[..., None]:
    # Without compressed constants, the set of each value is empty.
    return lambda block: trace(block) if compressed else None


def _compare_in_chunks(compare: Callable[..., bool]) -> Callable[..., bool]:
    def allclose(a: Any, b: Any, *arguments: Any, **keywords: Any) -> bool:
        are_arrays = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        if not are_arrays or a.shape != b.shape or a.size <= _CHUNK:
            return compare(a, b, *arguments, **keywords)
        rows = max(1, _CHUNK // a[0].size)
        parts = ((a[n : n + rows], b[n : n + rows]) for n in range(0, len(a), rows))
        return all(compare(*pair, *arguments, **keywords) for pair in parts)

    return allclose


def _write_uncopied(write: Callable[..., Any]) -> Callable[..., Any]:
    def write_data(var: Any, writer: Any) -> Any:
        if var.val.dtype != np.float16:
            return write(var, writer)
        return writer.write_fp16_data(np.ascontiguousarray(var.val).reshape(-1).view(np.uint16))

    return write_data


VALIDATE_ENDS = _patch(
    f"{_MIL}:Program.validate",
    _validate_ends,
    "Validation after each of about 110 passes changes nothing and takes a third of a conversion.",
)
COMPARE_IN_CHUNKS = _patch(
    "numpy:allclose",
    _compare_in_chunks,
    "Constants that may be equal are compared at once, which takes 24 times the memory of int8.",
)
WRITE_HALVES_UNCOPIED = _patch(
    "coremltools.converters.mil.backend.mil.helper:_get_offset_by_writing_data",
    _write_uncopied,
    "An fp16 constant is copied twice to be written, the largest embeddings a gigabyte each.",
)
_RECORD_COMPRESSED = _patch(
    f"{_MIL}:Var._is_nonreplaceable_var",
    _record_compressed,
    "It shows whether a program has compressed constants.",
)
_TRACE_IF_ANY = _patch(
    f"{_MIL}:Block._propagate_nonreplaceable_vars",
    _trace_if_any,
    "The users of compressed constants are searched whenever a block is left, about 110 times: 18 %"
    " of the time to convert a transformer of 4 layers, a third to a half with loops.",
)


def faster() -> tuple[Patch, ...]:
    """Return patches that save time or memory and leave the written bytes unchanged."""
    compressed: list[bool] = []
    tracing = (row.with_state(compressed) for row in (_RECORD_COMPRESSED, _TRACE_IF_ANY))
    return (VALIDATE_ENDS, COMPARE_IN_CHUNKS, WRITE_HALVES_UNCOPIED, *tracing)


# State of the process


def _number_own_names(counts: dict[str, int], _: Any) -> Callable[..., str]:
    def get_free_name(name: str) -> str:
        counts[name] += 1
        return f"{name}_{counts[name] - 1}"

    return get_free_name


def _reset_own_names(counts: dict[str, int], _: Any) -> Callable[[], None]:
    from coremltools.converters.mil.mil.types.symbolic import k_used_symbols

    def reset_conversion_state() -> None:
        counts.clear()
        k_used_symbols.clear()

    return reset_conversion_state


_OWN_NAMES = (
    _patch(
        f"{_BUILDER}._get_free_name",
        _number_own_names,
        "Numbers in names count per process; equal models need equal bytes.",
    ),
    _patch(
        "coremltools.converters.mil.converter:_reset_conversion_state",
        _reset_own_names,
        "It restarts the numbers of the process; other threads may be building programs.",
    ),
)


def own_names() -> tuple[Patch, ...]:
    """Number the names of values from 0 on, apart from other programs of the process."""
    counts = defaultdict[str, int](int)
    return tuple(row.with_state(counts) for row in _OWN_NAMES)


SILENCE = tuple(
    _patch(f"{module}tqdm", partial(partial, disable=True), "Progress bars have no option.")
    for module in (f"{_TORCH}.ops:_", f"{_MIL}.passes.pass_pipeline:", f"{_QUANTIZATION_PASSES}:")
)
"""No progress bars."""


TEMPORARY_FOLDER = _patch(
    "tempfile:gettempdir",
    lambda folder, _: lambda: folder,
    "Coremltools does not always remove its temporary folders; the state is the folder for them.",
)


# Translation of torch ops


def _get_own_translation(
    translations: Mapping[str, Callable[..., None]], get: Callable[..., Any]
) -> Callable[..., Any]:
    return lambda registry, name: translations.get(name) or get(registry, name)


def _contains_own_translation(
    translations: Mapping[str, Callable[..., None]], contains: Callable[..., bool]
) -> Callable[..., bool]:
    return lambda registry, name: name in translations or contains(registry, name)


_TRANSLATIONS = tuple(
    _patch(
        f"{_TORCH}.torch_op_registry:TorchOpsRegistry.{name}",
        replacement,
        "Registered translations would hold for all conversions of the process.",
    )
    for name, replacement in (
        ("get_func", _get_own_translation),
        ("__contains__", _contains_own_translation),
    )
)


def with_translations(translations: Mapping[str, Callable[..., None]]) -> tuple[Patch, ...]:
    """Translate torch ops, as "prod.dim_int", without registration for the whole process."""
    return tuple(row.with_state(translations) for row in _TRANSLATIONS)


def _record_failure(failed_nodes: list[str], translate: Callable[..., None]) -> Callable[..., None]:
    def convert_single_node(context: Any, node: Any) -> None:
        try:
            translate(context, node)
        except Exception:
            failed_nodes.append(str(node.name))
            raise

    return convert_single_node


RECORD_FAILURE = _patch(
    f"{_TORCH}.ops:convert_single_node",
    _record_failure,
    "Errors do not name the node that was being translated; the state is a list of names.",
)


def registered_translations() -> Iterable[Callable[..., None]]:
    """Return the translations of torch ops in coremltools' registry."""
    registry = pkgutil.resolve_name(f"{_TORCH}.torch_op_registry:_TORCH_OPS_REGISTRY")
    return registry.name_to_func_mapping.values()


def mil_program(model: Any) -> Any:
    """Return the MIL program that an ``MLModel`` was converted from."""
    return model._mil_program


def forget_value(var: Any) -> None:
    """Make a value of a MIL program unknown until the program runs."""
    var._sym_val = None


# Native modules


def core_ml_proxy() -> Any:
    """Return the class by which coremltools calls Core ML, or None."""
    return vars(pkgutil.resolve_name("coremltools.models.model"))["_MLModelProxy"]


def load_error(model: Any) -> Exception | None:
    """Return the error of loading an ``MLModel``, which is raised only at its first prediction."""
    return model._framework_error


BLOB_WRITER, BLOB_READER = (
    _patch(
        f"coremltools.converters.mil.{name}",
        _instead,
        "It is None where coremltools was built from source; the state is a class.",
    )
    for name in ("backend.mil.load:BlobWriter", "frontend.milproto.load:BlobReader")
)
CREATE_PACKAGE, LOAD_SPEC, FIND_WEIGHTS = (
    _patch(
        f"coremltools.models.model:{name}",
        _instead,
        "It needs the class _ModelPackage, which is None where coremltools was built from source;"
        " the state is a function.",
    )
    for name in ("_create_mlpackage", "_load_spec", "_try_get_weights_dir_path")
)


def is_missing(native: Patch) -> bool:
    """Return whether coremltools was built without the native class of a patch."""
    return vars(native.owner())[native.name] is None


def lacks_packages() -> bool:
    """Return whether coremltools was built without its native module for mlpackages."""
    return vars(pkgutil.resolve_name("coremltools.models.model"))["_ModelPackage"] is None
