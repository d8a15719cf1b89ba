"""An interpreter for the PTX that nvcc makes of the kernels, and what it proves; README.md says how."""
