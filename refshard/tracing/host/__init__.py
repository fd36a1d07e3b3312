"""What the host's calls tell: which block, and which hold the device up."""
