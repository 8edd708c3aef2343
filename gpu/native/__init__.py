"""Kernels for CPUs: LLVM IR made in Python, compiled for this machine when a model is loaded."""
