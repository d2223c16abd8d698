"""Ops that draw random numbers: anew at every call, whatever generator the program names.

``rand`` fails in coremltools 9.0 (pytorch/executorch#11722); ``randint`` is rounded toward zero
there, which makes the numbers around zero too frequent.
"""

from coreml_delegate.op_rules.constraints import static_result
from coreml_delegate.op_rules.rule import FLOAT, OpRule

RULES = (
    OpRule("aten.randn.default", "sampling", results=FLOAT),
    *(
        OpRule(target, "sampling", results=FLOAT, constraints=(static_result,))
        for target in ("aten.randn_like.default", "aten.rand_like.default")
    ),
)
