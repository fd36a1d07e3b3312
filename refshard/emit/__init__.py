"""A configuration in the words of the tool that trains with it: files, a command, and what the tool cannot express."""
