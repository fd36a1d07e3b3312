"""What a user asks for: models, cases and suites, frozen and validated once, read from TOML.

A *suite* is one or more matrices; their products are a list of *cases*; a case is one run of one strategy at one world
size, complete in itself and identified by the hash of its content.
"""
