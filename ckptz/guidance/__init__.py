"""Side information that guides an encoder, and where it comes from: moments, gradients, layer inputs."""
