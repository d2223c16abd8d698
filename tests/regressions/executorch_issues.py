"""Issues of ExecuTorch's own Core ML backend about lowering and results."""

from __future__ import annotations

import torch
from ops.op_samples.sample import i, w, x
from torch.nn import functional

from regressions.record import COREMLTOOLS, EXECUTORCH, Here, Regression, case, issues

_INT16 = {"dtype": torch.int16}
_INT32 = {"dtype": torch.int32}


def _circular(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.conv1d(functional.pad(v, (1, 1), mode="circular"), weight)


def _largest_in_any_order(v: torch.Tensor) -> torch.Tensor:
    return torch.topk(v, 5, sorted=False).values.sort().values


RECORDS = (
    Regression(
        issues(EXECUTORCH, 11686, 19245),
        "`abs` of `uint8` ended the export with a `KeyError`",
        Here.REFUSED,
        "Core ML computes with no such integers",
        (case(torch.abs, i(3, 4, low=0, high=9, dtype=torch.uint8)),),
        refused={"aten.abs.default": "argument 'self' is uint8"},
    ),
    Regression(
        issues(EXECUTORCH, 11687),
        "`alpha` of `add` and `sub` was ignored",
        Here.DELEGATED,
        "the second term is multiplied by it",
        (case(torch.sub, x(10), x(10), alpha=5),),
    ),
    Regression(
        issues(EXECUTORCH, 11688),
        "A strided, dilated convolution in groups crashed the device",
        Here.DELEGATED,
        "upstream it no longer does; its numbers are right here",
        (case(functional.conv1d, x(2, 16, 11), w(4, 8, 6), None, 8, 0, 2, 2),),
    ),
    Regression(
        issues(EXECUTORCH, 11689),
        "`addmm` with an integer `beta` ended the export",
        Here.REFUSED,
        "Core ML's product adds a bias as it is",
        (case(torch.addmm, x(8, 8), x(8, 8), x(8, 8), beta=5),),
        refused={"aten.addmm.default": "beta=5, Core ML takes 1"},
    ),
    Regression(
        issues(EXECUTORCH, 11690),
        "`mm` of `int16` with a constant ended the export",
        Here.REFUSED,
        "Core ML multiplies matrices of floats",
        (case(torch.mm, i(8, 8, **_INT16), w(8, 8, **_INT16)),),
        refused={"aten.mm.default": "int16"},
    ),
    Regression(
        (*issues(EXECUTORCH, 11691), *issues(COREMLTOOLS, 2575)),
        "`mm` of `int32` with a constant failed to load",
        Here.REFUSED,
        "Core ML multiplies matrices of floats",
        (case(torch.mm, i(8, 8, **_INT32), w(8, 8, **_INT32)),),
        refused={"aten.mm.default": "int32"},
    ),
    Regression(
        issues(EXECUTORCH, 11694),
        "A tensor of six dimensions ended the export",
        Here.REFUSED,
        "the result of the program cannot have six dimensions in Core ML",
        (case(lambda v: v.unsqueeze(0), x(1, 2, 3, 4, 5)),),
        refused={"aten.unsqueeze_copy.default": "rank 6"},
    ),
    Regression(
        issues(EXECUTORCH, 11698),
        "`topk` without sorting ended the export below iOS16",
        Here.DELEGATED,
        "Core ML sorts, which is one of the orders that PyTorch may give",
        (case(_largest_in_any_order, x(1, 64)),),
    ),
    Regression(
        issues(EXECUTORCH, 11701),
        "Batch normalization in three dimensions crashed the device",
        Here.DELEGATED,
        "upstream it no longer does; its numbers are right here",
        (
            case(
                functional.batch_norm,
                x(1, 3, 4, 4, 4),
                w(3),
                w(3, low=0.5, high=2.0),
                w(3),
                w(3),
            ),
        ),
    ),
    Regression(
        issues(EXECUTORCH, 11702),
        "Instance normalization in three dimensions failed to compile",
        Here.DELEGATED,
        "means and products",
        (case(functional.instance_norm, x(1, 3, 4, 4, 4)),),
    ),
    Regression(
        issues(EXECUTORCH, 11703),
        "A convolution with circular padding ended the export",
        Here.DELEGATED,
        "`torch.export` pads by slices",
        (case(_circular, x(1, 5, 3), w(5, 5, 3)),),
    ),
    Regression(
        (*issues(EXECUTORCH, 11705), *issues(COREMLTOOLS, 2377)),
        "A transposed convolution with output padding ended the export",
        Here.DELEGATED,
        "the result is padded",
        (case(functional.conv_transpose2d, x(1, 5, 6, 6), w(5, 5, 3, 3), None, 2, 0, 1),),
    ),
    *(
        Regression(
            (*issues(EXECUTORCH, number), *issues(COREMLTOOLS, *more)),
            f"`{mode}` padding in three dimensions failed to load",
            Here.DELEGATED,
            "ExecuTorch makes it a choice of elements",
            (case(functional.pad, x(1, 2, 4, 4, 4), (2,) * 6, mode),),
        )
        for number, mode, more in (
            (11708, "reflect", (2576, 2701)),
            (11709, "replicate", (2571, 2697)),
        )
    ),
    Regression(
        issues(EXECUTORCH, 11710),
        "Circular padding ended the export",
        Here.DELEGATED,
        "`torch.export` pads by slices",
        (case(functional.pad, x(1, 6, 6, 6), (2, 2, 2, 2), "circular"),),
    ),
    Regression(
        issues(EXECUTORCH, 11711),
        "`pixel_unshuffle` ended the export below iOS16",
        Here.DELEGATED,
        "the deployment target is raised, or, where one is given, the op stays on the CPU",
        (case(functional.pixel_unshuffle, x(1, 3, 8, 8), 2),),
    ),
    Regression(
        issues(EXECUTORCH, 11712),
        "`asinh` and `acosh` ended the export",
        Here.REPAIRED,
        "logarithms and roots",
        (case(torch.acosh, x(1, 64, low=1.0, high=9.0)),),
    ),
    Regression(
        issues(EXECUTORCH, 11714),
        "`floor_divide` of integers crashed the process",
        Here.DELEGATED,
        "integers are divided as integers",
        (
            case(
                torch.floor_divide, i(10, 10, low=-100, high=100), w(values=[2], dtype=torch.int64)
            ),
        ),
    ),
    Regression(
        issues(EXECUTORCH, 11715, 19247),
        "`argmax` and `argmin` of all elements crashed the process",
        Here.DELEGATED,
        "of the flattened tensor",
        (
            case(torch.argmax, x(10, 10)),
            case(torch.argmin, x(10, 10), note="argmin"),
        ),
    ),
    Regression(
        issues(EXECUTORCH, 11716),
        "`cumsum` along a negative dimension other than the last ended the export",
        Here.REPAIRED,
        "the dimension is counted from the first",
        (case(torch.cumsum, x(2, 2, 2), -3),),
    ),
    Regression(
        issues(EXECUTORCH, 11718),
        "`diagonal` was wrong or crashed",
        Here.DELEGATED,
        "elements at equal distances of the flattened matrix",
        (case(torch.diagonal, x(values=[[float(5 * r + c) for c in range(5)] for r in range(5)])),),
    ),
    Regression(
        issues(EXECUTORCH, 6817),
        "Group normalization ended the export",
        Here.DELEGATED,
        "Core ML has it as several",
        (case(functional.group_norm, x(1, 6, 4, 4), 3, w(6), w(6)),),
    ),
    Regression(
        issues(EXECUTORCH, 2769, 10443),
        "An input without dimensions ended the export, or crashed the runtime",
        Here.DELEGATED,
        "the delegate takes it as a vector of one element",
        (case(torch.add, x(), x()),),
    ),
    Regression(
        issues(EXECUTORCH, 17537),
        "`where` with one argument and `nonzero` crashed the device",
        Here.REFUSED,
        "the shape of the result depends on values",
        (case(lambda v: torch.nonzero(v), x(values=[[0.0, 1.0], [2.0, 0.0]]), fp16=False),),
        refused={"aten.nonzero.default": "the shape of the result depends on values"},
    ),
    Regression(
        issues(EXECUTORCH, 21855, 21979, 22296),
        "A buffer that a call writes by way of others was taken for a constant, and became a state "
        "that the runtime does not bind",
        Here.DELEGATED,
        "buffers are told by the program's signature; unasked, none becomes a state",
        held_by="tests/e2e/test_states.py::test_no_state_is_made_unasked",
    ),
    Regression(
        issues(EXECUTORCH, 9969),
        "A model with an embedding, quantized by the quantizer, could not be lowered",
        Here.DELEGATED,
        "the table is stored as integers, and the program equals the quantized model",
        held_by="tests/e2e/test_quantized_programs.py::test_the_program_equals_the_quantized_model",
    ),
    Regression(
        issues(EXECUTORCH, 21856, 21969),
        "`op_linear_quantizer_config` failed for a table that is embedding and output layer",
        Here.REPAIRED,
        "the table is quantized as the layer asks, and stored once, for both",
        held_by="tests/options/test_weight_compression.py"
        "::test_a_table_that_is_the_output_layer_too_is_compressed",
    ),
    Regression(
        issues(EXECUTORCH, 19523, 8641, 21559),
        "A root mean square that is written out overflowed in fp16, and the norm was zero",
        Here.REPAIRED,
        "the norm is Core ML's layer norm of `[x, -x]`",
        tuple(
            case(
                lambda v, g, square=square: v * torch.rsqrt(square(v).mean(-1, True) + 1e-6) * g,
                *(x(values=[[300.0, -400.0, 250.0, 10.0], [0.0] * 4, [1.0, 2.0, 3.0, 4.0]]), w(4)),
                note=name,
            )
            for name, square in (
                ("pow", lambda v: v.pow(2)),
                ("product", lambda v: v * v),
                ("square", torch.square),
            )
        ),
    ),
    Regression(
        issues(EXECUTORCH, 21951),
        "A program of several methods, each in several partitions, did not load",
        Here.DELEGATED,
        "it does here, and equals eager PyTorch",
        held_by="tests/e2e/test_multifunction.py::test_methods_in_several_partitions",
    ),
    Regression(
        issues(EXECUTORCH, 22728),
        "`op_linear_quantizer_config` leaves tables of embeddings at full size",
        Here.DELEGATED,
        "as there; `weight_compression` quantizes them too",
        held_by="tests/options/test_weight_compression.py::test_a_table_of_embeddings_alone_is_not_quantized",
    ),
    Regression(
        issues(EXECUTORCH, 22798),
        "A constant that two partitions take in lists, as of `cat`, ended the export",
        Here.DELEGATED,
        "the constant is an input of each partition",
        held_by="tests/partition/test_shared_constants.py"
        "::test_a_constant_that_several_partitions_take_in_lists_is_an_input",
    ),
    Regression(
        issues(EXECUTORCH, 20338),
        "A compiled model that was removed while it was loaded crashed the device runtime",
        Here.NOT_CONCERNED,
        "of the runtime on Apple's systems, which is ExecuTorch's own",
    ),
    Regression(
        issues(EXECUTORCH, 11722),
        "`rand` ended the export",
        Here.REPAIRED,
        "`rand_like`",
        (case(lambda v: torch.where(torch.rand(v.shape) < 2, v, 0.0), x(3)),),
    ),
)
