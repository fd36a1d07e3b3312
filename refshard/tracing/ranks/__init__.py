"""What the traces of several ranks say together."""
