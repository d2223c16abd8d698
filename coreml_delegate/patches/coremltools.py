"""Patches and private interfaces of coremltools.

Some graph passes of coremltools 9.0 take much time or memory: ``faster()`` holds while we convert,
as do the workarounds of wrong results, in ``patches.coremltools_errors``.
"""

from __future__ import annotations

import copy
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from coreml_delegate.patches import Patch

MIL = "coremltools.converters.mil.mil"
BUILDER = f"{MIL}:Builder"
PASSES = f"{MIL}.passes.defs"
_TORCH = "coremltools.converters.mil.frontend.torch"
_QUANTIZATION_PASSES = "coremltools.optimize.coreml._quantization_passes"


INFINITE_FROM = 1e38
"""Coremltools takes constants from this magnitude on for infinity; smaller constants use fp32."""

_CHUNK = 2**20  # elements of a constant that are examined at once


def coremltools_row(
    target: str, replacement: Callable[..., Any], reason: str, issue: int | None = None
) -> Patch:
    """Return a row of ``module:function`` or ``module:Class.method``."""
    owner, _, name = target.rpartition("." if "." in target.rpartition(":")[2] else ":")
    address = None if issue is None else f"https://github.com/apple/coremltools/issues/{issue}"
    import_owner = partial(pkgutil.resolve_name, owner)
    return Patch(import_owner, name, replacement, reason, address, "coremltools", ("9.0",))


def instead(replacement: Any, _: Any) -> Any:
    """Return a replacement that does not call the original."""
    return replacement


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
        scaled = pkgutil.resolve_name(BUILDER).constexpr_lut_to_dense(
            indices=lookup.indices,
            lut=lookup.lut.val * scale[..., None, None],  # axes of entries and of their elements
            vector_axis=lookup.vector_axis,
            **keywords,
        )
        lookup.enclosing_block.remove_ops([lookup])
        return scaled

    return constexpr_blockwise_shift_scale


PALETTES_WITH_SCALES = (
    coremltools_row(
        f"{_QUANTIZATION_PASSES}:palettize_weights.transform_op",
        _transform_and_restore,
        "With a scale per channel, it divides a weight in place before it finds that the groups do"
        " not fit: the weight is restored.",
        2777,
    ),
    coremltools_row(
        f"{BUILDER}.constexpr_blockwise_shift_scale",
        _scale_table,
        "macOS 26 does not load the scaling of looked-up values for the neural engine: the table is"
        " scaled, which gives the same numbers.",
        2688,
    ),
)
"""Errors of palettization with a scale per channel."""


# Precision


OVERFLOW_CHECK = coremltools_row(
    f"{PASSES}.quantization:FP16ComputePrecision.fp16_overflow",
    instead,
    "It takes several times the memory of each constant. The state is a function of the op.",
)


_Selector = Callable[[Any], bool]


def _around_cast(
    steps: tuple[Callable[[Any, _Selector], _Selector], Callable[[Any], None]],
    cast: Callable[..., None],
) -> Callable[..., None]:
    before, after = steps
    fp16 = pkgutil.resolve_name(f"{PASSES}.quantization:FP16ComputePrecision")

    def apply(self: Any, program: Any) -> None:
        if not isinstance(self, fp16):
            cast(self, program)
            return
        caster = copy.copy(self)  # the registered pass serves all conversions
        caster.op_selector = before(program, self.op_selector or (lambda _: True))
        cast(caster, program)
        after(program)

    return apply


AROUND_FP16_CAST = coremltools_row(
    f"{PASSES}.quantization:AbstractQuantizationPass.apply",
    _around_cast,
    "Rewrites for fp16 need to know which ops are cast; casts of constants, which a later pass"
    " folds, show which constants fp16 loses. The state is a pair: a function of program and"
    " selector of ops, which returns a selector, and a function of the program with casts.",
)


def _guard_others(handles: frozenset[int], guard: Callable[..., None]) -> Callable[..., Any]:
    source = pkgutil.resolve_name(f"{MIL}.scope:ScopeSource").EXIR_DEBUG_HANDLE
    return lambda op, block: not handles & set(op.scopes.get(source) or ()) and guard(op, block)


GUARD_INDICES = coremltools_row(
    f"{PASSES}.optimize_tensor_operation:guard_negative_gather_indices"
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


BEFORE_NAMES = coremltools_row(
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


VALIDATE_ENDS = coremltools_row(
    f"{MIL}:Program.validate",
    _validate_ends,
    "Validation after each of about 110 passes changes nothing and takes a third of a conversion.",
)
COMPARE_IN_CHUNKS = coremltools_row(
    "numpy:allclose",
    _compare_in_chunks,
    "Constants that may be equal are compared at once, which takes 24 times the memory of int8.",
)
WRITE_HALVES_UNCOPIED = coremltools_row(
    "coremltools.converters.mil.backend.mil.helper:_get_offset_by_writing_data",
    _write_uncopied,
    "An fp16 constant is copied twice to be written, the largest embeddings a gigabyte each.",
)
_RECORD_COMPRESSED = coremltools_row(
    f"{MIL}:Var._is_nonreplaceable_var",
    _record_compressed,
    "It shows whether a program has compressed constants.",
)
_TRACE_IF_ANY = coremltools_row(
    f"{MIL}:Block._propagate_nonreplaceable_vars",
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
    coremltools_row(
        f"{BUILDER}._get_free_name",
        _number_own_names,
        "Numbers in names count per process; equal models need equal bytes.",
    ),
    coremltools_row(
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
    coremltools_row(
        f"{module}tqdm", partial(partial, disable=True), "Progress bars have no option."
    )
    for module in (f"{_TORCH}.ops:_", f"{MIL}.passes.pass_pipeline:", f"{_QUANTIZATION_PASSES}:")
)
"""No progress bars."""


TEMPORARY_FOLDER = coremltools_row(
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
    coremltools_row(
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


RECORD_FAILURE = coremltools_row(
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
    coremltools_row(
        f"coremltools.converters.mil.{name}",
        instead,
        "It is None where coremltools was built from source; the state is a class.",
    )
    for name in ("backend.mil.load:BlobWriter", "frontend.milproto.load:BlobReader")
)
CREATE_PACKAGE, LOAD_SPEC, FIND_WEIGHTS = (
    coremltools_row(
        f"coremltools.models.model:{name}",
        instead,
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
