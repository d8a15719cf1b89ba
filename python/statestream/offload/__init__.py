"""State in host memory, streamed through the device in chunks."""
