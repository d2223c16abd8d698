"""``PartitionerKeywords``: the options of ``CoreMLPartitioner``, and their declaration."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from coreml_delegate.errors import OptionError
from coreml_delegate.options.checks import (
    flag,
    function,
    list_of,
    member,
    positive,
    positive_number,
    values_of,
)
from coreml_delegate.options.checks import optional as or_none
from coreml_delegate.options.compile_options import CompileOptions, Precision, checked_specs
from coreml_delegate.options.declaration import (
    Argument,
    check_fields,
    option,
    option_class,
    options_of,
)
from coreml_delegate.targets import Device

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from torch import nn
    from torch.fx import Node

_OPERATORS = or_none(list_of("operator names", str))
_MODULES = or_none(list_of("paths and classes of modules"))
_PREDICATE = or_none(function("a node of the graph"))


MIN_SQNR_DB = 40.0
"""Default ratio of signal to error, in dB, that the outputs of a program in fp16 have to reach."""


def _is_set(value: object) -> bool:
    return value is not None


def _names(flag: str) -> Argument:
    return Argument(flag, metavar="NAME", is_repeatable=True)


@option_class(kw_only=True, slots=False)
class PartitionerKeywords:
    """The options of ``CoreMLPartitioner``.

    Attributes:
        options: See the fields.

    Raises:
        OptionError: An invalid value, or options that exclude each other.
    """

    skip_ops_for_coreml_delegation: Collection[str] | None = option(
        default=None,
        check=_OPERATORS,
        doc="Operators to keep on the CPU, such as ``aten.add.Tensor``, ``aten::add.Tensor``, "
        "``add.Tensor``, ``aten.add`` (all overloads) or ``add``.",
        argument=_names("--skip-op"),
        is_in_recipes=True,
        leaves_calls=bool,
    )
    compile_specs: Collection[CompileSpec] | None = option(
        default=None,
        check=or_none(lambda _, value: tuple(checked_specs(value))),
        doc="From ``CoreMLBackend.generate_compile_specs``; None for its defaults.",
    )
    take_over_mutable_buffer: bool | None = option(
        default=True,
        check=or_none(flag),  # ExecuTorch's own takes None for False
        doc="Turn suitable mutable buffers into Core ML states (needs iOS18); other buffers become "
        "inputs and outputs. The report lists both.",
        leaves_calls=operator.not_,
    )
    take_over_constant_data: bool = option(
        default=True,
        check=flag,
        doc="Store weights and constants in the Core ML models; otherwise they become inputs.",
        is_in_recipes=True,
        leaves_calls=operator.not_,
    )
    lower_full_graph: bool = option(
        default=False,
        check=flag,
        doc="Fail, listing every obstacle, unless the entire graph can be delegated, and refuse "
        "options that leave calls to the CPU.",
        argument=Argument("--full-graph"),
        is_in_recipes=True,
    )
    only_ops: Collection[str] | None = option(
        default=None,
        check=_OPERATORS,
        doc="Operators to delegate, and no others; None for all.",
        argument=_names("--only-op"),
        leaves_calls=_is_set,
    )
    skip_modules: Collection[str | type[nn.Module]] | None = option(
        default=None,
        check=_MODULES,
        doc="Modules to keep on the CPU, by paths like ``layers.0``, paths with wildcards, or "
        "classes like ``torch.nn.LayerNorm``.",
        argument=_names("--skip-module"),
        leaves_calls=bool,
    )
    only_modules: Collection[str | type[nn.Module]] | None = option(
        default=None,
        check=_MODULES,
        doc="Modules to delegate, and nothing outside them; None for all.",
        argument=_names("--only-module"),
        leaves_calls=_is_set,
    )
    node_filter: Callable[[Node], bool] | None = option(
        default=None,
        check=_PREDICATE,
        doc="Called with every call, first in ATen and then in edge dialect, where nodes have "
        "other names; false keeps the call on the CPU.",
        leaves_calls=_is_set,
    )
    min_partition_nodes: int = option(
        default=1,
        check=positive,
        doc="Keep partitions of fewer operations on the CPU, except partitions with weights that "
        "``quantize_`` compressed, for which the CPU has no kernel.",
        argument=Argument("--min-partition-nodes", metavar="N", parse=int),
        leaves_calls=(1).__ne__,
    )
    max_partitions: int | None = option(
        default=None,
        check=or_none(positive),
        doc="Delegate at most this number of partitions, those with the most estimated FLOPs.",
        argument=Argument("--max-partitions", metavar="N", parse=int),
    )
    strict: bool = option(
        default=False,
        check=flag,
        doc="Fail, listing every obstacle, if any call stays on the CPU, for any reason.",
        argument=Argument("--strict"),
    )
    keep_fp32: Callable[[Node], bool] | None = option(
        default=None,
        check=_PREDICATE,
        doc="Called with every delegated call, in edge dialect; true keeps it in fp32 if the "
        "compile specs demand fp16. Compile specs can name such calls too.",
    )
    precision_data: Collection[Collection[Any]] | None = option(
        default=None,
        check=or_none(list_of("samples, each a tuple of arguments", (list, tuple))),
        doc='With ``compute_precision="auto"``, the inputs to measure with: a list of samples, '
        "each a tuple of the arguments of a call; None for the example inputs of "
        "``torch.export``.",
    )
    min_sqnr_db: float = option(
        default=MIN_SQNR_DB,
        check=positive_number,
        doc='With ``compute_precision="auto"``, the ratio of signal to error in dB that every '
        "floating-point output has to reach; integers and booleans have to be equal.",
        argument=Argument(
            "--min-sqnr",
            "ratio of signal to error that every output has to reach on the example inputs or the "
            "data: the goal of --precision auto, and the least of float16 without a warning",
            "DB",
            float,
        ),
        is_in_recipes=True,
    )

    device: Device | None = option(
        default=None,
        check=or_none(member(Device, texts=values_of(Device))),
        doc='Processor to shape the program for: ``"neural-engine"``, ``"gpu"`` or ``"cpu"``; None '
        "for that of the compile specs.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.precision_data is not None and not self.measures_precision:
            raise OptionError(
                "precision_data is for precision auto",
                got=f"compute_precision={self.compiling.precision.value}",
                remedy='Pass generate_compile_specs(compute_precision="auto")',
            )
        if self.lower_full_graph:
            self._check_full_graph()

    @cached_property
    def compiling(self) -> CompileOptions:
        """The compile options, decoded."""
        options = CompileOptions.from_specs(self.compile_specs or ())
        return options if self.device is None else replace(options, device=self.device)

    @property
    def measures_precision(self) -> bool:
        """Whether a measurement decides which calls compute in fp32."""
        return self.compiling.precision is Precision.AUTO

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for ``pickle``; name the option that cannot be pickled.

        Raises:
            OptionError: A function among the options cannot be pickled.
        """
        for name, value in self._functions().items():
            try:
                pickle.dumps(value)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise OptionError(
                    f"a partitioner with this {name} cannot be pickled",
                    got=str(error),
                    remedy="Pass a function that is defined at the top of a module, or copy the "
                    "partitioner by copy.deepcopy",
                ) from error
        return vars(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Only the functions can have state.
        functions = self._functions()
        return replace(self, **{n: copy.deepcopy(value, memo) for n, value in functions.items()})

    def _functions(self) -> dict[str, Any]:
        values = {
            declared.name: getattr(self, declared.name) for declared in options_of(type(self))
        }
        return {name: value for name, value in values.items() if callable(value)}

    def _check_full_graph(self) -> None:
        clashing = [
            declared.name
            for declared in options_of(type(self))
            if declared.leaves_calls is not None
            and declared.leaves_calls(getattr(self, declared.name))
        ]
        if clashing:
            raise OptionError(
                "lower_full_graph=True leaves nothing to the CPU",
                got=f"together with {', '.join(clashing)}",
                remedy="Drop these options, or set lower_full_graph=False",
            )
