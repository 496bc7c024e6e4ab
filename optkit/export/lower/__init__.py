"""One table per target says what each fused op becomes; ``translate`` turns a captured program into an onnx_ir model."""
