"""What of statestream is built and usable on this machine, and what to do where it is not."""
