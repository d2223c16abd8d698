"""Errors of methods that cannot share weights or states, and of ahead-of-time compilation."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.multimethod import (
    IOS18,
    Accumulator,
    Reader,
    exported,
    linear,
    lower_methods,
    rows,
    specs,
    two,
)

from coreml_delegate import CoreMLBackend, CoreMLPartitioner
from coreml_delegate.errors import ContractError, LoweringError, OptionError
from coreml_delegate.formats.blob import flatten, unflatten
from coreml_delegate.formats.blob_layout import MethodMetadata, ModelMetadata
from coreml_delegate.formats.files import write_folder
from coreml_delegate.options.compile_specs import ModelType
from coreml_delegate.options.lowering_options import CompileOptions
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.targets import Opset


def subgraphs(methods):
    """Whole programs, as if ExecuTorch had cut them out."""
    return {n: [each.run_decompositions({})] for n, each in exported(methods).items()}


def preprocess(methods, **by_method):
    """Preprocess subgraphs, with the same compile specs for all or with those of each."""
    programs = subgraphs(methods)
    given = {n: [by_method.get(n) or list(by_method["every"])] for n in programs}
    return CoreMLBackend.preprocess_multimethod(programs, given), given


class TestBuffersOfSeveralMethods:
    def test_written_by_two(self):
        with pytest.raises(ContractError) as error:
            preprocess(two(Accumulator(linear())), every=specs())
        assert str(error.value) == (
            "Core ML states are not shared between methods: got total (written by 'decode', "
            "written by 'prefill'). Set take_over_mutable_buffer=False and let ExecuTorch share "
            "the buffer, with MemoryPlanningPass(share_mutable_buffers=True), or pass it in and "
            "out of every method. Strategy DISABLED gives each method a buffer of its own"
        )

    def test_read_by_another(self):
        writer = Accumulator(linear())
        methods = {"write": (writer, rows(1, 4)), "read": (Reader(linear()), rows(1, 4))}
        with pytest.raises(ContractError) as error:
            preprocess(methods, every=specs("POSITIONAL", **IOS18))
        assert "total (written by 'write', read by 'read')" in str(error.value)
        assert error.value.remedy.startswith("Pass the buffer in and out of every method")

    def test_disabled_is_a_warning(self, caplog):
        methods = two(Accumulator(linear()))
        lowered = lower_methods(methods, specs("DISABLED"))
        assert lowered.references("decode") == [None]
        assert (
            "Core ML states are not shared between methods; each has its own of: total (written "
            "by 'decode', written by 'prefill')"
        ) in caplog.messages


class TestPositionalErrors:
    def test_unequal_counts(self):
        (program,), (other,) = subgraphs(two()).values()
        given = {"decode": [specs("POSITIONAL")], "prefill": [specs("POSITIONAL"), specs()]}
        with pytest.raises(LoweringError) as error:
            CoreMLBackend.preprocess_multimethod(
                {"decode": [program], "prefill": [other, other]}, given
            )
        assert str(error.value) == (
            "strategy POSITIONAL needs equally many partitions in all methods: got 1 in 'decode', "
            "2 in 'prefill'. See partitioner.reports for what divides them. Use strategy DISABLED "
            "to make every partition a model by itself"
        )

    def test_old_target(self):
        with pytest.raises(OptionError) as error:
            CoreMLPartitioner(
                compile_specs=specs("POSITIONAL", minimum_deployment_target=Opset.iOS17)
            )
        assert str(error.value) == (
            "methods share weights from iOS18 (iOS18, macOS15, watchOS11, tvOS18) on: got strategy "
            "POSITIONAL and minimum_deployment_target iOS17. Raise it. Use strategy DISABLED to "
            "make every partition a model by itself"
        )

    @pytest.mark.parametrize(
        ("decode", "prefill", "kind", "message"),
        [
            (
                specs("POSITIONAL", **IOS18),
                specs("POSITIONAL", minimum_deployment_target=Opset.iOS26),
                LoweringError,
                r"partitions cannot be one model: got partition 0 of 'decode', partition 0 of "
                r"'prefill': they need different targets \(iOS18, iOS26\)",
            ),
            (
                specs("POSITIONAL"),
                specs("DISABLED"),
                OptionError,
                "methods are given different strategies to share weights: got DISABLED and "
                "POSITIONAL, expected one for all",
            ),
            (
                specs("POSITIONAL"),
                specs(minimum_deployment_target=Opset.iOS17),
                OptionError,
                "got strategy POSITIONAL and minimum_deployment_target iOS17",
            ),
        ],
        ids=["targets", "strategies", "old_target"],
    )
    def test_options_of_methods_that_exclude_each_other(self, decode, prefill, kind, message):
        with pytest.raises(kind, match=message):
            preprocess(two(), decode=decode, prefill=prefill)


class TestCompiledAheadOfTime:
    COMPILED = CoreMLBackend.MODEL_TYPE.COMPILED_MODEL

    @pytest.fixture
    def compiler(self, monkeypatch):
        """In the place of Core ML's compiler, one that copies the model."""
        compiled = []

        def compile_model(source, destination):
            compiled.append(source)
            write_folder({"model.mil": b"program"}, Path(destination))
            return destination

        monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(coremltools().models.utils, "compile_model", compile_model)
        return compiled

    def test_the_model_of_all_is_compiled(self, compiler):
        results, given = preprocess(two(), every=specs("POSITIONAL", model_type=self.COMPILED))
        assert len(compiler) == 1
        (result,) = results["prefill"]
        store = result.data_store_output
        (entry,) = store.pte_data.values()
        files = unflatten(store.buffers[entry.buffer_index])
        assert bytes(files["model.mlmodelc/model.mil"]) == b"program"
        methods = ModelMetadata.decode(files["metadata.json"]).methods
        assert methods.keys() == {"decode", "prefill"}
        (recorded,) = given["prefill"]
        options = CompileOptions.from_specs(recorded)
        assert options.model_type is ModelType.COMPILED_MODEL
        assert options.deployment_target is Opset.iOS18

    def test_one_kind_for_all(self, compiler):
        compiled, package = specs("POSITIONAL", model_type=self.COMPILED), specs("POSITIONAL")
        with pytest.raises(OptionError, match="need one model_type: got COMPILED_MODEL and MODEL"):
            preprocess(two(), decode=compiled, prefill=package)

    def test_a_failing_compiler(self, compiler, monkeypatch):
        def fail(source, destination):
            raise RuntimeError("no space")

        monkeypatch.setattr(coremltools().models.utils, "compile_model", fail)
        given = specs("POSITIONAL", model_type=self.COMPILED)
        with pytest.raises(LoweringError, match="compiler fails on the model: got RuntimeError"):
            preprocess(two(), every=given)

    def test_without_a_strategy_they_stay_apart(self, monkeypatch):
        metadata = ModelMetadata("identifier", {"": MethodMetadata(("x",), ("y",))})
        blob = flatten({"metadata.json": metadata.encode(), "model.mlmodelc/model.mil": b"p"})
        monkeypatch.setattr(
            "coreml_delegate.lowering.multifunction.build_files",
            lambda program, options: dict(unflatten(blob)),
        )
        results, _ = preprocess(two(), every=specs(model_type=self.COMPILED, **IOS18))
        assert [r.processed_bytes for listed in results.values() for r in listed] == [blob, blob]
