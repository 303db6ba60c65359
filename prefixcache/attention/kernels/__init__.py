"""The Triton kernels of the operations, one file each, launched by the module of the same name."""
