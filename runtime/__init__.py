"""Run Core ML programs here: mlpackages, blobs and delegated ``.pte`` files."""

if __name__ == "runtime":
    raise ImportError("'runtime' is a subpackage; import coreml_delegate.runtime instead")
