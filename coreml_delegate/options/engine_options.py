"""``EngineOptions``: how an engine executes a program."""

from __future__ import annotations

import enum
from typing import Any

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.entry_cache import CacheOptions
from coreml_delegate.options.checks import flag, instance, integer, member, optional, values_of
from coreml_delegate.options.declaration import Argument, option, option_class
from coreml_delegate.targets import ComputeUnit


class Precision(enum.Enum):
    """The floating-point type that a fast engine computes in.

    An engine that computes in the program's own dtypes accepts only ``F32``, which is the default.
    """

    F32 = "f32"
    BF16 = "bf16"


def _threads(name: str, value: Any) -> int:
    if integer(name, value) < 1:
        raise OptionError("wrong number of threads", got=str(value), expected="1 or more, or None")
    return value


@option_class()
class EngineOptions:
    """How to execute.

    Attributes:
        options: See the fields.

    Raises:
        OptionError: No such precision or compute unit, fewer threads than one, or an invalid value
            of the environment variable.
    """

    threads: int | None = option(
        default=None,
        check=optional(_threads),
        doc="CPU threads of a call on the openvino engine; None for all. With 1, calls of several "
        "threads compute side by side; otherwise one after the other, each on all its threads.",
        argument=Argument("--threads", metavar="N", parse=int),
    )
    precision: Precision | str = option(
        default=Precision.F32,
        check=member(Precision, "unknown engine precision", texts=values_of(Precision)),
        doc="Floating-point type that the openvino engine computes in: a ``Precision`` or its "
        'value, ``"f32"`` or ``"bf16"``.',
        argument=Argument("--engine-precision", choices=values_of(Precision)),
    )
    exact_nan: bool = option(
        default=False,
        check=flag,
        doc="Propagate NaN through every op of the openvino engine, even where its kernels lose it "
        "and have to be replaced by slower kernels.",
        argument=Argument("--exact-nan"),
    )
    cache: CacheOptions | None = option(
        factory=CacheOptions.from_environment,
        check=optional(instance(CacheOptions, "CacheOptions, or None")),
        doc="Where compiled programs are cached between processes: "
        "``CacheOptions(folder, limit_bytes)``, or None for no cache. By default read from the "
        "environment; see ``CacheOptions.from_environment``.",
    )
    profiling: bool = option(
        default=False,
        check=flag,
        doc="Time ops, which takes some time itself; see ``CompiledFunction.profile``.",
    )
    compute_unit: ComputeUnit | str | None = option(
        default=None,
        check=optional(member(ComputeUnit, "unknown compute unit", texts=values_of(ComputeUnit))),
        doc="Processors that the coreml engine may use: a ``ComputeUnit`` or its value, such as "
        '``"cpu_only"``; None for the compute unit of the export.',
        argument=Argument("--compute-unit", choices=values_of(ComputeUnit)),
    )
    dynamic_quantization: bool = option(
        default=False,
        check=flag,
        doc="Let the openvino engine round activations to 8 bits where they are multiplied by "
        "weights compressed to integers of 4 or 8 bits. Each call computes a scale for every 32 "
        "activations.",
        argument=Argument("--dynamic-quantization"),
    )

    @property
    def numerics_option(self) -> str | None:
        """The option that changes the program's numerics, as ``name=value``; None by default.

        These are ``precision`` and ``dynamic_quantization``, which only the openvino engine has.
        """
        if self.precision is not Precision.F32:
            return f"precision={Precision(self.precision).value!r}"
        return "dynamic_quantization=True" if self.dynamic_quantization else None

    def refuse_numerics_option(self, engine: str) -> None:
        """Refuse options that change a program's numerics, for an ``engine`` without such options.

        Raises:
            OptionError: ``numerics_option`` is set.
        """
        if self.numerics_option is not None:
            raise OptionError(
                f"{engine} cannot change the numerics of a program",
                got=self.numerics_option,
                remedy="Use the openvino engine, or leave the option out",
            )
