"""What is kept for a parameter: its formats, its making, a state as it lies in memory."""
