"""The op interface on CPUs: C++ kernels, compiled on first use and called through ctypes."""
