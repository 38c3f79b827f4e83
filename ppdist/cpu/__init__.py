"""oneDNN kernels for convolutions: C interface, layers, switch."""
