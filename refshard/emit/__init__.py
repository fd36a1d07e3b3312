"""A configuration as another tool reads it: files, a command, and notes on what the tool cannot express."""
