"""``python -m validation``: ``refshard validate``, with the same options."""

import sys

from refshard.cli import main

if __name__ == "__main__":
    main(["validate", *sys.argv[1:]])
