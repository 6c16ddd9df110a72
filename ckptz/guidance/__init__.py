"""What an encoder may know of tensors beside their values: moments, gradients, inputs of layers."""
