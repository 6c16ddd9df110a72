"""Side information for encoders: moments, gradients, layer inputs."""
