"""What allocators hold, from traces and from snapshots."""
