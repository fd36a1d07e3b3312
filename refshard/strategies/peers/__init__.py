"""Other ways of sharding, each by its own public interface."""
