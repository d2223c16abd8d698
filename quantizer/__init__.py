"""PT2E quantization for Core ML."""

if __name__ == "quantizer":
    raise ImportError("'quantizer' is a subpackage; import coreml_delegate.quantizer instead")
