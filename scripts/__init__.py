"""The ``coreml-delegate`` command."""

if __name__ == "scripts":
    raise ImportError("'scripts' is a subpackage; import coreml_delegate.scripts instead")
