"""oneDNN kernels: C interface, layers, switch."""
