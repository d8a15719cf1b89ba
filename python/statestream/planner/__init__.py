"""What training takes in bytes and seconds, by arithmetic: before a cluster is asked for, or of a live model."""
