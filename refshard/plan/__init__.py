"""What a mode does, as pure data: placements, layouts and op streams."""
