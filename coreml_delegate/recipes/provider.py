"""The recipe types, and the provider that creates recipes for ``executorch.export``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from executorch.exir import EdgeCompileConfig
from executorch.export import (
    AOQuantizationConfig,
    BackendRecipeProvider,
    ExportRecipe,
    LoweringRecipe,
    QuantizationRecipe,
    RecipeType,
)
from torch import nn

from coreml_delegate.backend import CoreMLBackend
from coreml_delegate.errors import OptionError, near_matches
from coreml_delegate.options.checks import Check, function, integer, optional, positive, refused
from coreml_delegate.options.compile_specs import Precision
from coreml_delegate.options.declaration import documented, options_of
from coreml_delegate.options.lowering_options import CompileOptions, PartitionerKeywords
from coreml_delegate.partition import CoreMLPartitioner
from coreml_delegate.quantization import Method, QuantizationMode, mode_of
from coreml_delegate.quantization.configs import (
    FULL,
    has_rows,
    is_weight_of_attention,
    linear_quantizer_config,
    torchao_config,
)
from coreml_delegate.quantizer import CoreMLQuantizer
from coreml_delegate.targets import STATE_OPSET

COREML_BACKEND = "coreml_delegate"
"""Our backend's name in ExecuTorch's recipe registry; its own Core ML backend is ``coreml``."""

_DEFAULT_GROUP = 32
_BITS = range(1, 9)


def _bits(name: str, value: Any) -> None:
    integer(name, value)
    if value not in _BITS:
        raise refused(name, f"must be between {_BITS[0]} and {_BITS[-1]}", value)


def _block_size(name: str, value: Any) -> None:
    if not isinstance(value, list):
        raise refused(name, "must be a list", value)
    sizes = cast("list[Any]", value)
    if len(sizes) != 2 or not all(type(s) is int and (s == FULL or s > 0) for s in sizes):
        problem = "must be a list of rows and columns that share a table, -1 for all"
        raise refused(name, problem, value)
    if FULL not in sizes:
        raise refused(name, "must have -1 for rows or columns", value)


_COMMON = [
    option
    for kind in (CompileOptions, PartitionerKeywords)
    for option in options_of(kind)
    if option.is_in_recipes
]
"""Options that every recipe takes."""

_OWN: Mapping[str, Check] = MappingProxyType(
    {
        "filter_fn": optional(function("a module and its path")),
        "group_size": positive,
        "bits": _bits,
        "block_size": _block_size,
    }
)
"""Checks of the keywords that only some recipes take."""


class CoreMLRecipeType(RecipeType):
    """Names of the recipes: those of ExecuTorch's own backend, and ``AUTO``.

    ``ExportRecipe.get_recipe`` takes them; ``CoreMLRecipeProvider`` documents the keywords.
    """

    FP32 = "coreml_fp32"
    FP16 = "coreml_fp16"
    AUTO = "coreml_auto"
    PT2E_INT8_STATIC = "coreml_pt2e_int8_static"
    PT2E_INT8_WEIGHT_ONLY = "coreml_pt2e_int8_weight_only"
    TORCHAO_INT4_WEIGHT_ONLY_PER_CHANNEL = "coreml_torchao_int4_weight_only_per_channel"
    TORCHAO_INT4_WEIGHT_ONLY_PER_GROUP = "coreml_torchao_int4_weight_only_per_group"
    TORCHAO_INT8_WEIGHT_ONLY_PER_CHANNEL = "coreml_torchao_int8_weight_only_per_channel"
    TORCHAO_INT8_WEIGHT_ONLY_PER_GROUP = "coreml_torchao_int8_weight_only_per_group"
    CODEBOOK_WEIGHT_ONLY = "coreml_codebook_weight_only"

    @classmethod
    def get_backend_name(cls) -> str:
        """Return the backend that provides these recipes."""
        return COREML_BACKEND


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Definition of a recipe.

    Attributes:
        mode: Returns the name of the quantization mode for the user's keywords, or None.
        precision: Precision that Core ML computes in.
        keywords: Names of the recipe's own keywords.
        required: Names of its required keywords.
    """

    mode: Callable[[Mapping[str, Any]], str | None] = lambda _: None
    precision: Precision = Precision.FLOAT16
    keywords: tuple[str, ...] = ()
    required: tuple[str, ...] = ()

    def check(self, name: str, values: Mapping[str, Any]) -> None:
        """Check the keywords of the recipe ``name``.

        Raises:
            OptionError: A keyword is unknown, missing, of the wrong type or out of range.
        """
        checks = {option.keyword: option.check for option in _COMMON} | {
            keyword: _OWN[keyword] for keyword in (*self.keywords, *self.required)
        }
        for keyword in values:
            if keyword not in checks:
                raise OptionError(
                    f"{name} has no such keyword",
                    got=repr(keyword),
                    expected=near_matches(keyword, checks),
                )
        missing = [keyword for keyword in self.required if keyword not in values]
        if missing:
            raise OptionError(f"{name} requires {' and '.join(missing)}")
        for keyword, value in values.items():
            checks[keyword](keyword, value)


def _fixed_mode(mode: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda _: mode


def _group_mode(bits: int) -> Callable[[Mapping[str, Any]], str]:
    return lambda values: f"int{bits}-group{values.get('group_size', _DEFAULT_GROUP)}"


_RECIPES = MappingProxyType(
    {
        CoreMLRecipeType.FP32: _Recipe(precision=Precision.FLOAT32),
        CoreMLRecipeType.FP16: _Recipe(),
        CoreMLRecipeType.AUTO: _Recipe(precision=Precision.AUTO),
        CoreMLRecipeType.PT2E_INT8_STATIC: _Recipe(_fixed_mode("int8-static")),
        CoreMLRecipeType.PT2E_INT8_WEIGHT_ONLY: _Recipe(_fixed_mode("int8-weight")),
        CoreMLRecipeType.TORCHAO_INT4_WEIGHT_ONLY_PER_CHANNEL: _Recipe(
            _fixed_mode("int4-channel"), keywords=("filter_fn",)
        ),
        CoreMLRecipeType.TORCHAO_INT4_WEIGHT_ONLY_PER_GROUP: _Recipe(
            _group_mode(4), keywords=("group_size", "filter_fn")
        ),
        CoreMLRecipeType.TORCHAO_INT8_WEIGHT_ONLY_PER_CHANNEL: _Recipe(
            _fixed_mode("int8-channel"), keywords=("filter_fn",)
        ),
        CoreMLRecipeType.TORCHAO_INT8_WEIGHT_ONLY_PER_GROUP: _Recipe(
            _group_mode(8), keywords=("group_size", "filter_fn")
        ),
        CoreMLRecipeType.CODEBOOK_WEIGHT_ONLY: _Recipe(
            lambda values: f"codebook-{values['bits']}",
            keywords=("filter_fn",),
            required=("bits", "block_size"),
        ),
    }
)


class CoreMLRecipeProvider(BackendRecipeProvider):
    """Creates the recipes of ``CoreMLRecipeType``.

    All take the options that ``create_recipe`` lists. The torchao recipes take ``filter_fn(module,
    path)``, which selects the quantized modules: linear layers by default, and for a codebook
    embeddings too. Recipes with groups take ``group_size`` (32); the codebook recipe requires
    ``bits`` and ``block_size``, the rows and columns that share a table.
    """

    @property
    def backend_name(self) -> str:
        """Name of the backend in the registry."""
        return COREML_BACKEND

    def get_supported_recipes(self) -> Sequence[RecipeType]:
        """Return every ``CoreMLRecipeType``."""
        return list(_RECIPES)

    @documented(_COMMON)
    def create_recipe(self, recipe_type: RecipeType, **kwargs: Any) -> ExportRecipe | None:
        """Create a recipe.

        Args:
            recipe_type: A ``CoreMLRecipeType``.
            **kwargs: See ``CoreMLPartitioner`` and ``CoreMLBackend.generate_compile_specs``.

        Returns:
            The recipe; None for a type of another backend, as the registry expects.

        Raises:
            OptionError: A keyword is unknown, missing or not accepted, or the deployment target is
                too old for the recipe.
        """
        if not isinstance(recipe_type, CoreMLRecipeType):
            return None
        recipe = _RECIPES[recipe_type]
        recipe.check(recipe_type.value, kwargs)
        name = recipe.mode(kwargs)
        mode = None if name is None else mode_of(name)
        return ExportRecipe(
            name=recipe_type.value,
            quantization_recipe=None if mode is None else _quantization(mode, kwargs),
            lowering_recipe=_lowering(recipe_type.value, mode, recipe.precision, kwargs),
        )


def _quantization(mode: QuantizationMode, values: Mapping[str, Any]) -> QuantizationRecipe:
    if mode.method is Method.PT2E:
        return QuantizationRecipe(quantizers=[CoreMLQuantizer(linear_quantizer_config(mode))])
    # None selects torchao's default, linear layers; its codebooks have no default.
    default = _is_quantized if mode.codebook else None
    return QuantizationRecipe(
        ao_quantization_configs=[
            AOQuantizationConfig(
                torchao_config(mode, block_size=values.get("block_size")),
                values.get("filter_fn") or default,
            )
        ]
    )


def _is_quantized(module: nn.Module, _path: str) -> bool:
    return has_rows(module) and not is_weight_of_attention(module)


def _values_of(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options of a dataclass."""
    names = [option.keyword for option in options_of(kind)]
    return {name: values[name] for name in names if name in values}


def _lowering(
    recipe: str, mode: QuantizationMode | None, precision: Precision, values: Mapping[str, Any]
) -> LoweringRecipe:
    compiling = _values_of(CompileOptions, values)
    target = CompileOptions.from_keywords(**compiling).deployment_target
    if mode is not None:
        mode.require_target(target, f"{recipe}: minimum_deployment_target")
        target = target or mode.lowering_target
    compiling |= {"compute_precision": precision, "minimum_deployment_target": target}
    partitioner = CoreMLPartitioner(
        compile_specs=CoreMLBackend.generate_compile_specs(**compiling),
        take_over_mutable_buffer=target is None or target >= STATE_OPSET,
        **_values_of(PartitionerKeywords, values),
    )
    # The configuration of ExecuTorch's other backends, so that recipes can be combined.
    return LoweringRecipe(
        partitioners=[partitioner],
        edge_compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=False),
    )
