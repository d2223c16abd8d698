"""The choice of an engine for a function, its compilation, and what is logged of both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import handmade
from support.mil import builder_program, mb
from support.packages import long_chain, package_files

from coreml_delegate.errors import OptionError
from coreml_delegate.formats.blob import flatten
from coreml_delegate.formats.blob_layout import METADATA, MethodMetadata, ModelMetadata
from coreml_delegate.formats.files import write_folder
from coreml_delegate.patches.third_party import coremltools
from coreml_delegate.runtime import EngineOptions, load_mlpackage
from coreml_delegate.runtime.delegate import delegate_loader
from coreml_delegate.runtime.engines import selection
from coreml_delegate.runtime.engines.openvino import translate
from coreml_delegate.runtime.engines.program_source import ProgramSource
from coreml_delegate.runtime.engines.selection import compile_function
from coreml_delegate.runtime.model import Model
from coreml_delegate.runtime.program.delegate_interface import COREML_BACKEND_ID, DelegatePayload
from coreml_delegate.targets import Opset

_OPTIONS = EngineOptions(cache=None)


@pytest.fixture
def translations(monkeypatch):
    """Names of the functions translated."""
    names: list[str] = []
    original = translate.translate

    def spy(function, **options):
        names.append(function.name)
        return original(function, **options)

    monkeypatch.setattr(translate, "translate", spy)
    return names


def test_an_rejected_engine_is_logged_once_for_each_program(monkeypatch, caplog):
    monkeypatch.setattr(selection, "_LOGGED", set())
    function = handmade.function([handmade.op("classify", "y", probabilities="x")], ["y"])
    engines = {"openvino": selection.ENGINES["openvino"], "second": _Taking()}
    monkeypatch.setattr(selection, "ENGINES", engines)
    first, second = ProgramSource(b"one", {}), ProgramSource(b"two", {})
    for source in (first, first, second, None, None):
        chosen = compile_function("auto", function, _OPTIONS, source)
        assert chosen.engine_name == "second"
        (reason,) = chosen.rejected_engines["openvino"]
        assert reason.startswith("classify (output 'y')")
        del chosen
    assert len(caplog.records) == 3
    assert "function 'main' does not run on the openvino engine: classify" in caplog.text


class _Taking:
    """An engine that takes everything."""

    name = "second"

    def unavailable_reason(self):
        return None

    def unsupported(self, function):
        return []

    def compile(self, function, options, source=None):
        return object()


def test_an_unknown_engine_is_refused():
    with pytest.raises(OptionError, match=r"got 'gpu', expected auto \| coreml \| openvino"):
        compile_function("gpu", handmade.function([], ["x"]), _OPTIONS)


def test_only_the_functions_asked_for_are_compiled(translations, tmp_path):
    ct = coremltools()
    paths = {}
    for name, factor in (("double", 2), ("triple", 3)):
        program = builder_program(
            lambda x, factor=factor: mb.mul(x=x, y=np.full(64, factor, np.float32)),
            {"x": np.zeros(64, np.float32)},
            Opset.iOS18,
        )
        paths[name] = _saved(package_files(program), tmp_path / f"{name}.mlpackage")
    description = ct.utils.MultiFunctionDescriptor()
    for name, path in paths.items():
        description.add_function(path, "main", name)
    description.default_function_name = "double"
    merged = str(tmp_path / "merged.mlpackage")
    ct.utils.save_multifunction(description, merged)
    model = load_mlpackage(merged, function_name="triple", engine="openvino", options=_OPTIONS)
    (result,) = model.predict({"x": np.ones(64)}).values()
    assert set(result.tolist()) == {3}
    assert translations == ["triple"]


def _saved(files, path):
    write_folder(files, path)
    return str(path)


def _payload(blob, method):
    return DelegatePayload(
        backend_id=COREML_BACKEND_ID,
        processed=memoryview(blob),
        compile_specs=(),
        method_name=method,
        named_data=lambda key: None,
    )


def test_methods_that_share_a_delegate_share_its_compilation(translations):
    files = long_chain(length=4)
    model = Model.from_files(files, engine="reference", options=_OPTIONS)
    names = MethodMetadata(model.input_names, model.output_names)
    blob = flatten(
        {f"model.mlpackage/{name}": data for name, data in files.items()}
        | {METADATA: ModelMetadata("id", {"": names}).encode()}
    )
    load = delegate_loader("openvino", _OPTIONS)
    first, second = (load(_payload(blob, method)) for method in ("forward", "other"))
    assert translations == ["main"]
    x = torch.ones(2, 3)
    torch.testing.assert_close(first([x]), second([x]), rtol=0, atol=0)
