"""What is known of tensors beside their values, and where it comes from: moments, gradients, layer inputs."""
