"""What the code needs of tensors: local parts and layouts, shards, quantised classes, writes, checked values."""
