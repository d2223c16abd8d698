"""Lower in one process with our backend and with ExecuTorch's own of the same name.

Prints, as JSON, the largest error of each flow's program against eager torch, and which backend
made each of its models; further what their public names are and give. The argument says which of
the two is imported first.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch.exir.backend.backend_api import to_backend
from torch import nn

ORDERS = ("ours", "theirs")
# ExecuTorch's own backend calls its models so, with a random number; ours derives it from content.
_THEIRS = "executorch_"


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Delegate(nn.Module):
    """A module that calls a program lowered as a whole."""

    def __init__(self, lowered: Any) -> None:
        super().__init__()
        self.lowered = lowered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lowered(x)


def _import_ours() -> None:
    import coreml_delegate.recipes  # noqa: F401


def _import_theirs() -> None:
    from executorch.export.target_recipes import get_ios_recipe
    from executorch.extension.llm.export import LLMEdgeManager  # noqa: F401 - it is lazy
    from executorch.extension.llm.export.partitioner_lib import get_coreml_partitioner

    get_coreml_partitioner()
    get_ios_recipe("ios-arm64-coreml-fp32")


def _flows(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, bytes]:
    import coremltools as ct
    from executorch.backends.apple.coreml.compiler import CoreMLBackend as TheirBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner as TheirPartitioner
    from executorch.export import ExportRecipe, export
    from executorch.export.target_recipes import get_ios_recipe

    from coreml_delegate import CoreMLBackend, CoreMLPartitioner
    from coreml_delegate.recipes import CoreMLRecipeType

    options = {
        "compute_precision": ct.precision.FLOAT32,
        "minimum_deployment_target": ct.target.iOS17,
    }
    our_specs = CoreMLBackend.generate_compile_specs(**options)
    their_specs = TheirBackend.generate_compile_specs(**options)
    exported = torch.export.export(module, inputs)

    def partitioned(*partitioners: Any) -> Any:
        return to_edge_transform_and_lower(exported, partitioner=[*partitioners]).to_executorch()

    def by_name(specs: Any) -> Any:
        edge = to_edge(torch.export.export(module, inputs)).exported_program()
        lowered = Delegate(to_backend("CoreMLBackend", edge, specs))
        return to_edge(torch.export.export(lowered, inputs)).to_executorch()

    def by_recipe(recipe: Any) -> Any:
        session = export(model=module, example_inputs=[inputs], export_recipe=recipe)
        return session.get_executorch_program_manager()

    ours = CoreMLPartitioner(compile_specs=our_specs)
    theirs = TheirPartitioner(compile_specs=their_specs)

    def both() -> Any:
        partitioners = {"ours": [ours], "theirs": [theirs], "forward": [ours]}
        methods = dict.fromkeys(partitioners, exported)
        return to_edge_transform_and_lower(methods, partitioner=partitioners).to_executorch()

    programs = {
        "our specs": by_name(our_specs),
        "their partitioner": partitioned(theirs),
        "our partitioner": partitioned(ours),
        "both partitioners": both(),
        "their specs": by_name(their_specs),
        "our to_backend": to_edge(exported).to_backend(ours).to_executorch(),
        "their to_backend": to_edge(exported).to_backend(theirs).to_executorch(),
        "our recipe": by_recipe(ExportRecipe.get_recipe(CoreMLRecipeType.FP32)),
        "their recipe": by_recipe(get_ios_recipe("ios-arm64-coreml-fp32")),
    }
    return {name: program.buffer for name, program in programs.items()}


def _described(pte: bytes, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    from coreml_delegate import runtime
    from coreml_delegate.runtime.delegate import blob_files
    from coreml_delegate.runtime.program.pte import PteProgram
    from coreml_delegate.scripts.delegates import all_partitions

    makers: dict[str, list[str]] = {}
    for partition in all_partitions(PteProgram.open(pte)):
        _, metadata = blob_files(partition.blob)
        maker = "theirs" if metadata.identifier.startswith(_THEIRS) else "ours"
        makers.setdefault(partition.method, []).append(maker)
    program = runtime.load_program(pte)
    expected = module(*inputs)
    errors = [
        float((program.run(method, list(inputs))[0] - expected).abs().max()) for method in makers
    ]
    return {"makers": makers, "error": max(errors)}


def main(first: str) -> int:
    """Import in this order, lower by every flow, and print.

    Returns:
        The exit code.
    """
    imports = {"ours": _import_ours, "theirs": _import_theirs}
    for name in sorted(imports, key=lambda name: name != first):
        imports[name]()
    module, inputs = Network().eval(), (torch.rand(2, 4),)
    with torch.no_grad():
        found = {n: _described(pte, module, inputs) for n, pte in _flows(module, inputs).items()}
    sys.stdout.write(json.dumps({"flows": found} | _compared()))
    return 0


def _compared() -> dict[str, Any]:
    from executorch.backends.apple.coreml.compiler import coreml_preprocess as theirs

    from coreml_delegate import backend as ours
    from tests.upstream.compared import names_of, results_of

    modules = {"ours": ours, "theirs": theirs}
    return {
        "names": {who: names_of(m.CoreMLBackend) for who, m in modules.items()},
        "results": {
            who: results_of(m.CoreMLBackend, m.MULTIMETHOD_WEIGHT_SHARING_STRATEGY)
            for who, m in modules.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
