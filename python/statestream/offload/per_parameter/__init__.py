"""Any optimizer that steps each parameter by itself, some parameters at a time."""
