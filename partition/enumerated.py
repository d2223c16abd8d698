"""Enumerated shapes in a program that is delegated in part."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import Node

from coreml_delegate.dynamic_shapes.enumerated import EnumeratedShapes
from coreml_delegate.dynamic_shapes.symbols import input_tensors
from coreml_delegate.errors import OptionError
from coreml_delegate.ops import Reason, ReasonCode
from coreml_delegate.ops.flops import tensors_of
from coreml_delegate.preprocess.enumerated_shapes import undetermined


def undetermined_calls(
    program: ExportedProgram, enumerated: EnumeratedShapes | None
) -> dict[Node, Reason]:
    """The calls on tensors, or with results, whose size the enumerated shapes leave open.

    Args:
        program: In ATen or edge dialect.
        enumerated: Of the program; None if there are none.

    Raises:
        OptionError: They are of another program.
    """
    if enumerated is None:
        return {}
    _check_inputs(program, enumerated)
    found: dict[Node, Reason] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        for value in (*node.all_input_nodes, node):
            open_sizes = (undetermined(t, enumerated) for t in tensors_of(value.meta.get("val")))
            size = next((size for size in open_sizes if size is not None), None)
            if size is not None:
                text = f"size {size} of {value.name!r} does not follow from the enumerated shapes"
                found[node] = Reason(ReasonCode.SYMBOLIC, text)
                break
    return found


def _check_inputs(program: ExportedProgram, enumerated: EnumeratedShapes) -> None:
    tensors = input_tensors(program)
    fixed = all(isinstance(size, int) for tensor in tensors.values() for size in tensor.shape)
    for entry in () if fixed else enumerated.inputs:
        expected = [str(getattr(size, "expression", size)) for size in entry.sizes]
        for name in entry.names:
            got = [str(size) for size in tensors[name].shape] if name in tensors else None
            if got != expected:
                raise OptionError(
                    f"enumerated shapes are of another program, by its input {name!r}",
                    got="none" if got is None else f"[{', '.join(got)}]",
                    expected=f"[{', '.join(expected)}]",
                    remedy="Make the compile spec from the program that is lowered",
                )
